"""Several turns, token by token: what is trained on is what was sampled, and the engine saw exactly what the trajectory holds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step
from drumroll.rewards.compose import RewardSet
from drumroll.rollout.episode import Limits, Setting, Stage, run_episode
from drumroll.rollout.lease import Lease
from drumroll.text.episode import episode_ids
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, Exchange, GenRequest, Sampling, Task, Trajectory

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "chatml with a default system message": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "chatml that forgets what was thought": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "headers": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "instructions in brackets": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
    "turns with a model role": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
}
SPECIAL = ["<bos>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
OBSERVATIONS = ["Begin.", "Go on, it's  spaced", "äöü 漢字 again", "last"]


def make_tokenizer(folder: Path, template: str, eos: str) -> Tokenizer:
    """Bytes as tokens, and merges by which many texts have several spellings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("e", "r"), ("i", "n"), ("in", "g"), ("t", "h"), ("th", "e")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    backend = Backend(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf = TokenizersBackend(tokenizer_object=backend, bos_token="<bos>", eos_token=eos, extra_special_tokens=SPECIAL)
    hf.chat_template = template
    hf.save_pretrained(folder)
    return Tokenizer(folder)


class Talk(Env):
    """Says four things, as chat or as text, and is done."""

    def __init__(self, chat: bool) -> None:
        super().__init__(EnvConfig())
        self._chat = chat
        self._left = list(OBSERVATIONS)

    async def start(self, task: Task) -> Step:
        return self._say()

    async def step(self, reply: str) -> Step:
        return self._say() if self._left else Step(done=True, reward=1.0)

    def _say(self) -> Step:
        text = self._left.pop(0)
        return Step(messages=[{"role": "user", "content": text}]) if self._chat else Step(prompt=text)


class Sampler:
    """An engine that samples whatever comes: spellings that no tokenizer would choose, broken characters, replies that are cut off."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self.requests: list[GenRequest] = []
        self.replies: list[list[int]] = []

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        ids = [self._rng.randrange(len(self._tokenizer.hf) - len(SPECIAL) - 2) for _ in range(self._rng.randint(1, 12))]
        is_cut_off = self._rng.random() < 0.3
        ids += [] if is_cut_off else [self._tokenizer.eos_ids[0]]
        self.requests.append(request)
        self.replies.append(ids)
        logp = [-0.5 - 0.25 * len(self.requests)] * len(ids)
        return Chunk(request.id, ids, logp, [3] * len(ids), "length" if is_cut_off else "stop", slot=0)


def play(tokenizer: Tokenizer, chat: bool, engine: Sampler) -> Trajectory:
    async def run() -> Trajectory:
        setting = Setting(lambda: Talk(chat), RewardSet([]))
        stage = Stage(0, {"*": setting}, [engine], Renderer(tokenizer), Limits(8, 4096))
        lease = Lease("s", "g", Task("t"), 1, Sampling(max_new_tokens=16), 0)
        return await run_episode(lease, stage, asyncio.get_running_loop().create_future())

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_sampled_is_what_is_trained_on(tmp_path: Path, name: str, chat: bool) -> None:
    tokenizer = make_tokenizer(tmp_path, *TEMPLATES[name])
    for seed in range(20):
        engine = Sampler(tokenizer, seed)
        done = play(tokenizer, chat, engine)
        assert done.stop_reason in ("done", "length"), done.error
        ids, mask = done.token_ids.tolist(), done.loss_mask
        assert [token for token, sampled in zip(ids, mask, strict=True) if sampled] == [
            token for reply in engine.replies for token in reply
        ]
        for number, (request, turn) in enumerate(zip(engine.requests, [t for t in done.turns if t.author == "policy"], strict=True)):
            assert list(request.token_ids) == ids[: turn.start], "what the engine was given is the trajectory up to there"
            assert ids[turn.start : turn.end] == engine.replies[number]
            assert set(done.logp[turn.start : turn.end].tolist()) == {-0.5 - 0.25 * (number + 1)}
        assert not done.logp[~mask].any()
        shown = tokenizer.hf.decode(ids, skip_special_tokens=False)
        assert all(text in shown for text in OBSERVATIONS)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_demonstrated_episode_has_the_tokens_of_a_sampled_one(tmp_path: Path, name: str, chat: bool) -> None:
    """With the replies that a policy would sample to say the same."""
    tokenizer = make_tokenizer(tmp_path, *TEMPLATES[name])
    replies = ["there", "abc abc", "ring", "the end"]

    class Imitator(Sampler):
        async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
            ids = [*tokenizer.encode(replies[len(self.requests)]), tokenizer.eos_ids[0]]
            self.requests.append(request)
            return Chunk(request.id, ids, [0.0] * len(ids), [0] * len(ids), "stop", slot=0)

    sampled = play(tokenizer, chat, Imitator(tokenizer, 0))
    exchanges = [
        Exchange(None if chat else text, ({"role": "user", "content": text},) if chat else None, reply)
        for text, reply in zip(OBSERVATIONS, replies, strict=True)
    ]
    ids, mask = episode_ids(Renderer(tokenizer), exchanges)
    assert ids == sampled.token_ids.tolist()
    assert mask == sampled.loss_mask.tolist()
