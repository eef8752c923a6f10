"""Packages that tests of their engines need, and that most environments lack."""

from __future__ import annotations

import pytest

from drumroll.backends.infer import sglang, vllm
from drumroll.errors import PluginError

CHECKS = {"vllm": vllm.check_installed, "sglang": sglang.check_installed}


def missing(kind: str) -> str:
    """Why an engine's package cannot be used here; empty where it can."""
    try:
        CHECKS.get(kind, lambda: None)()
    except PluginError as error:
        return f"{error} `make test-{kind}` does both."
    return ""


def needs(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(missing(kind)), reason=missing(kind))
