"""An engine whose replies follow a script, and a tokenizer of characters with a chat template that knows tools."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from drumroll.models.scratch import scratch_tokenizer
from drumroll.rollout.lease import Lease
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, GenRequest, Sampling, Task

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}tools={% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos>{% endif %}"
    "{% for message in messages %}{{ message.role }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
PAD, BOS, EOS = 0, 1, 2
LEASE = Lease("train/3/t7/0", "train/3/t7", Task("t7", prompt="2+2?"), seed=41, sampling=Sampling(max_new_tokens=200), engine=2, attempt=1)


def make_tokenizer(folder: Path) -> Tokenizer:
    scratch_tokenizer(CHARACTERS).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def sampled_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a reply that no tokenizer would make of its text: special tokens in it do not show."""
    ids = tokenizer.encode(text)
    return [*ids[:1], BOS, PAD, *ids[1:], EOS]


class ScriptedEngine:
    """Answers what `rule` makes of the prompt's text. A rule may also raise, or say `HANG`, `DEADLINE`, `ERROR` or `ABORTED`."""

    def __init__(self, tokenizer: Tokenizer, rule: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.rule = rule
        self.given: dict[str, GenRequest] = {}
        self.sampled: dict[str, Chunk] = {}
        """The chunks of complete replies."""
        self.dropped: list[str] = []
        self.hangs = asyncio.Event()
        self.running = self.most_running = 0
        self._logp = itertools.count(1)

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        assert request.id not in self.given, "ids are unique"
        self.given[request.id] = request
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            self.dropped.append(request.id)
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: GenRequest) -> Chunk:
        await asyncio.sleep(0)
        text = self.rule(self.tokenizer.decode(request.token_ids))
        if text == "HANG":
            self.hangs.set()
            await asyncio.get_running_loop().create_future()
        for finish in ("deadline", "error", "aborted"):
            if text == finish.upper():
                return Chunk(request.id, [], [], [], finish, "said so")  # type: ignore[arg-type]
        ids = sampled_ids(self.tokenizer, text)
        cut = ids[: request.sampling.max_new_tokens]
        logp = [-next(self._logp) / 1024 for _ in cut]
        finish = "stop" if len(cut) == len(ids) else "length"
        chunk = Chunk(request.id, cut, logp, [len(self.sampled)] * len(cut), finish, slot=3, started=1e9, ended=1e9 + 1)  # type: ignore[arg-type]
        self.sampled[request.id] = chunk
        return chunk
