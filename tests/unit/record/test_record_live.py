"""The phase timer and the live view."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import pytest
from rich.console import Console

from drumroll.record.live import LiveView, sparkline
from drumroll.record.phases import PhaseTimer

METRICS = {
    "rollout/reward_mean": 0.5,
    "rollout/success_mean": 0.25,
    "rollout/tokens_per_s": 8123.4,
    "time/rollout_s": 1.5,
    "time/update_s": 0.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_are_not_counted_twice() -> None:
    clock, heard = Clock(), []
    timer = PhaseTimer(clock, heard.append)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
        with timer.phase("sync"):
            clock.now += 4
        clock.now += 8
    with timer.phase("sync"):
        clock.now += 16
    assert timer.take() == {"time/rollout_s": 10.0, "time/sync_s": 20.0}
    assert timer.take() == {}
    assert heard == ["rollout", "sync", "rollout", "", "sync", ""]

    def fail() -> None:
        with timer.phase("update"):
            clock.now += 32
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with timer.phase("rollout"):
        clock.now += 64
        assert timer.take() == {"time/update_s": 32.0, "time/rollout_s": 64.0}  # an open phase counts so far
        clock.now += 128
    assert timer.totals() == {"total": 255.0, "rollout": 202.0, "sync": 20.0, "update": 32.0}


def events(view: LiveView) -> Iterator[None]:
    """What a run tells its view."""
    view.stage("starting workers")
    view.stage("warming up", total=8)
    for _ in range(8):
        view.advance()
        yield
    view.evaluation(0, 0.4, 0.6)
    for step in (1, 2, 3):
        view.phase("rollout")
        view.step(step, METRICS)
        yield
    view.stage("evaluating")
    view.evaluation(3, 0.9, None)
    view.phase("")
    yield


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_plain_lines_where_there_is_no_terminal(environment: dict[str, str]) -> None:
    file = Terminal() if environment.get("TERM") == "dumb" else io.StringIO()
    with LiveView(3, "demo", Console(file=file, _environ=environment)) as view:
        list(events(view))
    text = file.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.isascii()
    lines = text.splitlines()
    assert lines[0] == "starting workers ..."
    assert [line for line in lines if line.startswith("warming up ") and "(" not in line] == [
        "warming up 2/8",
        "warming up 4/8",
        "warming up 6/8",
    ]
    assert "held-out sampled 0.400, greedy 0.600 at step 0" in lines
    assert "step 2/3  reward 0.500  success 0.250  tokens/s 8,123  2.00 s (rollout 1.50, update 0.50)" in lines
    assert lines[-1] == "held-out sampled 0.900 at step 3"


def test_a_live_view_shows_everything() -> None:
    file = Terminal()
    view = LiveView(3, "demo", Console(file=file, width=100, _environ={"TERM": "xterm"}))
    frames = ""
    with view:
        for _ in events(view):
            assert view._live is not None
            view._live.refresh()
        frames = file.getvalue()
    for part in (
        "demo",
        "warming up 8/8",
        "3/3",
        "reward",
        "0.500",
        "success",
        "0.250",
        "sampled 0.900 at step 3",
        "8,123",
        "rollout 75 %",
    ):
        assert part in frames, part


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_the_terminal_is_restored_whatever_happens(error: BaseException) -> None:
    file = Terminal()

    def run() -> None:
        with LiveView(3, "demo", Console(file=file, width=80, _environ={"TERM": "xterm"})) as view:
            view.stage("warming up", total=8)
            raise error

    with pytest.raises(type(error)):
        run()
    text = file.getvalue()
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "stopped after" in text


def test_output_that_nobody_takes_stops_nothing() -> None:
    with LiveView(3, "demo", Console(file=BrokenPipe(), _environ={})) as view:
        list(events(view))


def test_metrics_may_be_missing() -> None:
    file = io.StringIO()
    with LiveView(1, "demo", Console(file=file, _environ={})) as view:
        view.step(1, {})
    assert "reward -  success -" in file.getvalue()


def test_sparkline() -> None:
    assert sparkline([0, 0.5, 1], 8) == "▁▅█"
    assert sparkline([0.2, 2.0], 8, 0.0, 1.0) == "▂█"
    assert sparkline([3, 3, math.nan], 8) == "▁▁ "
    assert sparkline([math.nan], 8) == " "
    assert sparkline([], 8) == ""
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
