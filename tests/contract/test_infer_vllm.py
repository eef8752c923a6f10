"""What only the vLLM engine has: processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import ask, engine, make_model, prompt_of, reference, tensors
from installed import needs

from drumroll.errors import WorkerError
from vllm_processes import vllm_processes

needs_vllm = needs("vllm")


@needs_vllm
def test_an_engine_whose_process_dies_says_so_and_accepts_nothing_more(tmp_path: Path) -> None:
    with engine(make_model(tmp_path, kind="vllm"), "vllm") as driver:
        driver.submit(*(ask(str(i), prompt_of(5), seed=i, max_new_tokens=240, stop_token_ids=()) for i in range(8)))
        driver.until(lambda: bool(driver.replies), wait_s=0.01)
        for pid in vllm_processes("VLLM::EngineCore"):
            os.kill(pid, signal.SIGKILL)
        for reply in driver.gather(str(i) for i in range(8)):
            assert reply.finishes[0] in ("error", "stop", "length")
            assert ("the vLLM engine stopped" in reply.error) == (reply.finishes == ["error"])
        with pytest.raises(WorkerError, match="the vLLM engine stopped"):
            driver.until(lambda: False)
        driver.submit(ask("late", prompt_of(5)))
        assert "stopped" in driver.gather(["late"])[0].error
        with pytest.raises(WorkerError, match="stopped"):
            driver.update(1)
    assert gone(vllm_processes)


@needs_vllm
def test_an_engine_spans_devices(tmp_path: Path) -> None:
    folder, other = make_model(tmp_path / "one", kind="vllm"), make_model(tmp_path / "two", kind="vllm", seed=1)
    prompt = prompt_of(12)
    with engine(folder, "vllm", num_devices=2) as driver:
        for step, source in enumerate((folder, other), 1):
            driver.update(step, tensors(source))
            reply = driver.generate(ask(f"{step}", prompt, temperature=0.0, max_new_tokens=20))[0]
            model = reference(source)
            expected = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 12), max_new_tokens=20, do_sample=False)
            assert reply.token_ids == expected[0, 12:].tolist()
    assert gone(vllm_processes)


@needs_vllm
def test_nothing_of_vllm_outlives_the_process_that_owns_it(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
if __name__ == "__main__":
    from pathlib import Path
    from engine_driver import engine, make_model
    with engine(make_model(Path({str(tmp_path / "model")!r}), kind="vllm"), "vllm"):
        print("ready", flush=True)
        time.sleep(100)
"""
    )
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while "ready" not in (line := owner.stdout.readline()):
        assert line, "it ended before it was ready"
    assert vllm_processes()
    owner.kill()
    owner.wait()
    assert gone(vllm_processes)


def gone(processes: Callable[[], list[int]]) -> bool:
    """Whether they all end within a while."""
    end = time.monotonic() + 20
    while processes() and time.monotonic() < end:
        time.sleep(0.1)
    return not processes()
