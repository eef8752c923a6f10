"""The collector rests while things are imported, and is back afterwards."""

import gc

import pytest

from drumroll.imports import begin_importing, have_imported, importing


def test_the_collector_rests_and_comes_back() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_what_was_imported_is_never_looked_at_again() -> None:
    frozen = gc.get_freeze_count()
    begin_importing()
    try:
        assert not gc.isenabled()
        kept = [[] for _ in range(100)]
    finally:
        have_imported()
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()
