"""A reward model on its device: conversations or texts in, scores out.

    score ─┐                                      ┌─ batch of similar lengths ─▶ forward, in a thread
    score ─┼─ tokens, a future ─▶ waiting ─ sort ─┤
    score ─┘                                      └─ ...one after the other

Calls that arrive together are computed together. Padding is masked, so a score does not depend on the others in its batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumroll.backends.infer.chat import Defuser
from drumroll.errors import ModelError, WorkerError
from drumroll.hub import resolve_folder
from drumroll.models.folder import check_classifier_folder
from drumroll.models.loading import check_complete, load_model
from drumroll.models.prepare import resolve_dtype
from drumroll.rewards.place import ScoreModel
from drumroll.text.chat import messages_to_ids
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Message


async def open_scorer(model: ScoreModel, *, device: str) -> Classifier:
    """Load a reward model onto `device` (`cpu`, `cuda:0`)."""

    def load() -> Classifier:
        folder = resolve_folder(model.path, model.revision, "model", ModelError)
        dtype = resolve_dtype(model.dtype, device)
        return Classifier(folder, device=device, dtype=dtype, trust_remote_code=model.trust_remote_code)

    return await asyncio.to_thread(load)


@dataclass(frozen=True, slots=True)
class _Call:
    """A score that somebody waits for."""

    token_ids: list[int]
    done: asyncio.Future[float]


class Classifier:
    """A Hugging Face sequence classification model with one label, whose logit is the score. All calls come from one event loop.

    Example: `await classifier.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])`.
    """

    def __init__(self, folder: Path, *, device: str, dtype: str, trust_remote_code: bool = False, max_batch_tokens: int = 16384) -> None:
        """`dtype` is `float32` or `bfloat16`. A batch holds `max_batch_tokens` with its padding; a longer text is a batch of its own."""
        check_classifier_folder(folder, trust_remote_code=trust_remote_code)
        self.folder = folder
        self.device = torch.device(device)
        self.max_batch_tokens = max_batch_tokens
        self.tokenizer = Tokenizer(folder, trust_remote_code=trust_remote_code)
        self.model = _load(folder, dtype, trust_remote_code).to(self.device)
        self._config = self.model.config.get_text_config()
        self._pad_id: int | None = self._config.pad_token_id
        self.context_tokens = _context(self._config, self.tokenizer)
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self._defuse = Defuser(self.tokenizer)
        self._waiting: list[_Call] = []
        self._loop: asyncio.Task[None] | None = None

    async def score(self, messages: Sequence[Message] | str) -> float:
        """The model's output for a conversation, rendered by its chat template, or for a text as it is.

        Control tokens that are spelled out in a conversation's messages are ordinary characters; in a text they are control tokens.
        Nothing is cut: what the model cannot read as a whole is a `ValueError`. So is a score that is not finite."""
        token_ids = self._encode(messages)
        self._check(token_ids)
        call = _Call(token_ids, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._serve())
        score = await call.done
        if not math.isfinite(score):
            raise ValueError(
                f"the reward model in '{self.folder}' gave {score} for a text of {len(token_ids)} tokens. Are its weights finite?"
            )
        return score

    def _encode(self, messages: Sequence[Message] | str) -> list[int]:
        return subject_ids(self.tokenizer, self._defuse, messages)

    def _check(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError(f"there is nothing to score: the text has no tokens for the reward model in '{self.folder}'.")
        if len(token_ids) > self.context_tokens:
            raise ValueError(
                f"the text has {len(token_ids)} tokens, and the reward model in '{self.folder}' reads at most {self.context_tokens} "
                f"(max_position_embeddings in its config, model_max_length in its tokenizer's). Shorten the replies, or use a model that "
                f"reads longer ones."
            )
        if max(token_ids) >= self.vocab_size:
            raise ValueError(
                f"the text holds token {max(token_ids)}, and the reward model in '{self.folder}' has {self.vocab_size}. "
                f"Does the tokenizer in that folder belong to it?"
            )

    async def _serve(self) -> None:
        """Everything that waits, in rounds, until nothing does."""
        while self._waiting:
            calls, self._waiting = self._waiting, []
            for batch in padded_batches([len(call.token_ids) for call in calls], self.max_batch_tokens):
                await self._settle([calls[index] for index in batch])

    async def _settle(self, calls: list[_Call]) -> None:
        """Compute one batch. What fails there is the batch's own."""
        wanted = [call for call in calls if not call.done.done()]  # the others were cancelled
        if not wanted:
            return
        try:
            scores = await asyncio.to_thread(self._forward, [call.token_ids for call in wanted])
        except Exception as error:
            reason = f"the reward model in '{self.folder}' failed on a batch of {len(wanted)}: {type(error).__name__}: {error}"
            for call in wanted:
                if not call.done.done():
                    call.done.set_exception(WorkerError(reason))
            return
        for call, score in zip(wanted, scores, strict=True):
            if not call.done.done():
                call.done.set_result(score)

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        """One forward pass over the rows, padded on the right.

        Heads of decoders read the last token that is not the config's padding token, or the very last one where the config names
        none. In that case padding is a token that no row ends with, so that the very last one it stays."""
        pad_id = self._pad_id
        if pad_id is None:
            ends = {row[-1] for row in rows}
            pad_id = self._config.pad_token_id = min(set(range(len(rows) + 1)) - ends)
        width = max(map(len, rows))
        token_ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
        scores: list[float] = self.model(input_ids=token_ids, attention_mask=mask).logits[:, 0].float().tolist()
        return scores


def subject_ids(tokenizer: Tokenizer, defuse: Defuser, subject: Sequence[Message] | str) -> list[int]:
    """Tokens that a reward model scores, and that one is trained on: of a conversation, or of a text."""
    if isinstance(subject, str):
        ids = list(tokenizer.hf(subject)["input_ids"])
        return ids[1:] if ids[:2] == [tokenizer.hf.bos_token_id] * 2 else ids  # the text may begin with that token already
    return messages_to_ids(tokenizer, defuse(list(subject)), add_generation_prompt=False)


def padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, in batches whose rows times their longest are at most `max_tokens`, if a single row is."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    while order:
        num_rows = max(1, max_tokens // lengths[order[0]])
        batches.append(order[:num_rows])
        order = order[num_rows:]
    return batches


def _load(folder: Path, dtype: str, trust_remote_code: bool) -> Any:
    model, missing = load_model(folder, "classifier", trust_remote_code=trust_remote_code, dtype=getattr(torch, dtype))
    check_complete(folder, missing)
    model.config.get_text_config().use_cache = False  # nothing is generated
    return model.eval().requires_grad_(False)


def _context(config: Any, tokenizer: Tokenizer) -> int:
    """Tokens that the model reads at most; the tokenizer knows of positions that some models keep for themselves."""
    own: int = tokenizer.hf.model_max_length
    return min(own, getattr(config, "max_position_embeddings", own))
