"""From what an environment says to tokens, and from sampled tokens back to text; never twice over the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from drumroll.text.chat import continuation_ids, messages_to_ids
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Message

CACHED_PROMPTS = 256
"""Prompts whose tokens are kept: the samples of a group begin alike."""


class Renderer:
    """Renders prompts as plain text or by the tokenizer's chat template, as each environment step asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._prompt_ids = lru_cache(CACHED_PROMPTS)(tokenizer.encode_prompt)

    def first(
        self, prompt: str | None, messages: Sequence[Message] | None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], str]:
        """Tokens and text that open an episode."""
        if messages is not None:
            ids = messages_to_ids(self.tokenizer, messages, tools=tools)
            return ids, self.tokenizer.decode(ids)
        if prompt is None:
            raise ValueError("the environment's first step has neither `prompt` nor `messages`")
        return list(self._prompt_ids(prompt)), prompt

    def next(self, prompt: str | None, messages: Sequence[Message] | None, last_token: int) -> tuple[list[int], str]:
        """Tokens and text that follow a reply, whose last token says whether it closed itself."""
        if messages is not None:
            ids = continuation_ids(self.tokenizer, messages, last_token)
            return ids, self.tokenizer.decode(ids)
        if prompt is None:
            raise ValueError("the environment is not done, but its step has neither `prompt` nor `messages`")
        return self.tokenizer.encode(prompt), prompt

    def reply_text(self, ids: Sequence[int], stop: Sequence[str], after: Sequence[int] = ()) -> str:
        """What the policy said behind the tokens `after`, without end tokens and without the stop string that ended it."""
        text = self.tokenizer.decode(ids, after)
        cuts = [at for word in stop if (at := text.find(word)) >= 0]
        return text[: min(cuts)] if cuts else text
