"""Models that reward workers serve, on a CUDA device: a reward model against the CPU, and a judge's engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_driver import ARCHITECTURES
from test_chat import TEMPLATE as CHAT_TEMPLATE
from test_classifier import make_classifier, scores_of, text_of

from drumroll.backends.classifier import Classifier, open_scorer
from drumroll.backends.infer.chat import open_chat
from drumroll.config.models import ScratchConfig
from drumroll.models.scratch import make_scratch
from drumroll.rewards.place import ChatModel, ScoreModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_scores_are_those_of_the_cpu(tmp_path: Path, architecture: str) -> None:
    folder = make_classifier(tmp_path / "model", architecture)
    texts = [text_of(length) for length in (1, 2, 7, 30, 31, 90, 200)]
    on_cpu = scores_of(Classifier(folder, device="cpu", dtype="float32"), texts)
    on_gpu = scores_of(Classifier(folder, device="cuda:0", dtype="float32"), texts)
    assert on_gpu == pytest.approx(on_cpu, abs=2e-3)  # TF32 aside, sums in another order


def test_auto_is_bfloat16_and_near(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "model")
    texts = [text_of(length) for length in (5, 60)]
    on_cpu = scores_of(Classifier(folder, device="cpu", dtype="float32"), texts)
    opened = asyncio.run(open_scorer(ScoreModel(path=str(folder)), device="cuda:0"))
    assert scores_of(opened, texts) == pytest.approx(on_cpu, abs=0.1, rel=0.1)


def test_a_judges_engine_answers_as_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    characters = "abcdefghijklmnopqrstuvwxyz0123456789=<>/+ .\n"
    make_scratch(ScratchConfig(architecture="llama", characters=characters, config=ARCHITECTURES["llama"]), folder, 0)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    async def answers(device: str) -> list[str]:
        model = ChatModel.model_validate({"path": str(folder), "dtype": "float32"})
        chat = await open_chat(model, device=device)
        try:
            questions = [[{"role": "user", "content": text}] for text in ("hello", "2+2=", "what is this")]
            return await asyncio.gather(*(chat.complete(each, max_new_tokens=12, temperature=0.0) for each in questions))
        finally:
            await chat.close()

    assert asyncio.run(answers("cuda:0")) == asyncio.run(answers("cpu"))
