"""Demonstrated episodes as tokens, put together exactly as sampled ones are."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.text.chat import reply_ids
from drumroll.text.renderer import Renderer
from drumroll.types import Exchange


def episode_ids(renderer: Renderer, exchanges: Sequence[Exchange], *, end_token: bool = True) -> tuple[list[int], list[bool]]:
    """Token ids of an episode, and where the loss is: on the imitated replies and the token that ends each.

    Without `end_token` the replies are taken as they stand: where sampling ends replies by a stop string, they end with it.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for exchange in exchanges:
        shown, replied = _exchange_ids(renderer, exchange, ids, end_token)
        ids += shown + replied
        mask += [False] * len(shown) + [exchange.is_imitated] * len(replied)
    return ids, mask


def _exchange_ids(renderer: Renderer, exchange: Exchange, before: Sequence[int], end_token: bool) -> tuple[list[int], list[int]]:
    tokenizer = renderer.tokenizer
    if exchange.messages is not None:
        shown, _ = renderer.next(None, exchange.messages, before[-1]) if before else renderer.first(None, exchange.messages)
        return shown, reply_ids(tokenizer, exchange.reply) if end_token else tokenizer.encode(exchange.reply)
    prompt = exchange.prompt or ""
    if not before:
        shown, replied = tokenizer.encode_demonstration(prompt, exchange.reply)
    else:
        shown, _ = renderer.next(prompt, None, before[-1])
        replied = tokenizer.encode(exchange.reply) + list(tokenizer.eos_ids[:1])
    return shown, replied if end_token else replied[: len(replied) - len(tokenizer.eos_ids[:1])]
