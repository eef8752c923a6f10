"""What only the SGLang engine has: processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_driver import ask, engine, make_model, prompt_of
from installed import needs

from drumroll.errors import WorkerError

needs_sglang = needs("sglang")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@needs_sglang
def test_an_engine_whose_process_dies_says_so_and_accepts_nothing_more(tmp_path: Path) -> None:
    with engine(make_model(tmp_path, kind="sglang"), "sglang") as driver:
        driver.submit(*(ask(str(i), prompt_of(5), seed=i, max_new_tokens=240, stop_token_ids=()) for i in range(8)))
        driver.until(lambda: bool(driver.replies), wait_s=0.01)
        processes = driver.backend._engine.get_all_child_pids()  # type: ignore[attr-defined]
        os.kill(processes[0], signal.SIGKILL)
        for reply in driver.gather(str(i) for i in range(8)):
            assert reply.finishes[0] in ("error", "stop", "length")
            assert ("the SGLang engine stopped" in reply.error) == (reply.finishes == ["error"])
        driver.submit(ask("late", prompt_of(5)))
        assert "stopped" in driver.gather(["late"])[0].error
        with pytest.raises(WorkerError, match="stopped"):
            driver.update(1)
    assert alive(processes) == []


@needs_sglang
def test_nothing_of_sglang_outlives_the_process_that_owns_it(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
if __name__ == "__main__":
    from pathlib import Path
    from engine_driver import engine, make_model
    with engine(make_model(Path({str(tmp_path / "model")!r}), kind="sglang"), "sglang") as driver:
        print("ready", *driver.backend._engine.get_all_child_pids(), flush=True)
        time.sleep(100)
"""
    )
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while "ready" not in (line := owner.stdout.readline()):
        assert line, "it ended before it was ready"
    children = [int(pid) for pid in line.split()[1:]]
    assert alive(children)
    owner.kill()
    owner.wait()
    end = time.monotonic() + 20
    while alive(children) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(children) == []
