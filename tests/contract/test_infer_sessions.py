"""What an engine keeps of a session between two requests changes how much it computes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import Driver, Reply, ask, engine, make_model, prompt_of, tensors

from drumroll.backends.infer.native import Native
from drumroll.types import GenRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sessions"))


def turn(session: str, number: int, tokens: list[int]) -> GenRequest:
    return replace(ask(f"{session}/{number}", tokens, seed=number, max_new_tokens=6), session=session)


def converse(driver: Driver, names: list[str], num_turns: int, *, in_sessions: bool = True) -> dict[str, list[Reply]]:
    """Every conversation's replies; each next turn begins with all tokens so far and adds five."""
    tokens = {name: prompt_of(20, seed=seed) for seed, name in enumerate(names)}
    replies: dict[str, list[Reply]] = {name: [] for name in names}
    for number in range(num_turns):
        requests = [turn(name, number, tokens[name]) for name in names]
        if not in_sessions:
            requests = [replace(request, session="") for request in requests]
        for name, reply in zip(names, driver.generate(*requests), strict=True):
            replies[name].append(reply)
            tokens[name] = [*tokens[name], *reply.token_ids, *prompt_of(5, seed=number)]
    return replies


def count_prefilled(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of every prefill call."""
    assert isinstance(driver.backend, Native)
    runner, counts = driver.backend._ready_runner, []
    prefill = runner.prefill

    def counted(chunks, length):  # type: ignore[no-untyped-def]
        counts.append(sum(len(chunk.tokens) for chunk in chunks))
        prefill(chunks, length)

    monkeypatch.setattr(runner, "prefill", counted)
    return counts


NAMES = [f"s{i}" for i in range(6)]


@pytest.mark.parametrize("num_slots", [2, 6, 16])
def test_replies_are_those_of_requests_without_sessions(folder: Path, num_slots: int) -> None:
    with engine(folder) as driver:
        expected = converse(driver, NAMES, 5, in_sessions=False)
    with engine(folder, num_slots=num_slots) as driver:
        got = converse(driver, NAMES, 5)
    for name in NAMES:
        assert [reply.token_ids for reply in got[name]] == [reply.token_ids for reply in expected[name]]
        for own, other in zip(got[name], expected[name], strict=True):
            assert own.logp == pytest.approx(other.logp, abs=1e-4)


def test_a_session_computes_only_what_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as driver:
        counts = count_prefilled(driver, monkeypatch)
        replies = converse(driver, NAMES, 5)
    lengths = [len(reply.token_ids) for name in NAMES for reply in replies[name][:-1]]
    assert max(lengths) > 1
    # A turn's last token is computed by the first decode step, and so is not prefilled; the reply's own last token then is.
    assert sum(counts) == len(NAMES) * (19 + 4 * 5)


def test_a_session_that_begins_otherwise_starts_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as driver:
        first = driver.generate(turn("s", 0, prompt_of(20)))[0]
        counts = count_prefilled(driver, monkeypatch)
        other = prompt_of(30, seed=9)
        reply = driver.generate(turn("s", 1, other))[0]
        assert sum(counts) == 29
        assert reply.token_ids == driver.generate(replace(turn("other", 1, other), session=""))[0].token_ids
        assert reply.slot == first.slot


def test_slots_at_rest_are_given_to_others(folder: Path) -> None:
    with engine(folder, num_slots=3) as driver:
        for number in range(9):
            assert driver.generate(turn(f"s{number}", 0, prompt_of(10, seed=number)))[0].finishes
        assert all(reply.finishes for reply in driver.generate(*(ask(f"plain {i}", prompt_of(8, seed=i)) for i in range(9))))
        load = driver.backend.load()
        assert (load.num_running, load.num_waiting) == (0, 0)


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_new_weights_keep_or_drop_what_rests(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    with engine(folder) as driver:
        tokens = prompt_of(16)
        reply = driver.generate(turn("s", 0, tokens))[0]
        driver.update(1, tensors(folder), cache)
        counts = count_prefilled(driver, monkeypatch)
        tokens = [*tokens, *reply.token_ids, *prompt_of(5)]
        driver.generate(turn("s", 1, tokens))
        assert sum(counts) == (len(tokens) - 1 if cache == "recompute" else 5)


def test_an_aborted_request_leaves_nothing_at_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as driver:
        long = replace(ask("s/0", prompt_of(20), seed=1, max_new_tokens=200), session="s")
        driver.submit(long)
        driver.until(lambda: bool(driver.replies.get("s/0", Reply()).token_ids), wait_s=0.01)
        driver.backend.abort(["s/0"])
        driver.gather(["s/0"])
        assert driver.replies["s/0"].finishes == ["aborted"]
        counts = count_prefilled(driver, monkeypatch)
        driver.generate(turn("s", 1, [*prompt_of(20), *driver.replies["s/0"].token_ids]))
        assert sum(counts) == 19 + len(driver.replies["s/0"].token_ids)
