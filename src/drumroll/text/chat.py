"""Chat messages as tokens, by the chat template of a model folder.

Only the first prompt of an episode is rendered whole. After a reply, the tokens that exist stay as they were sampled, and
only what the template puts between that reply and the next one is added:

    <user> 2+2? <end> <assistant>   Four!   <end> <user> Sure? <end> <assistant>   Yes.
    └───── messages_to_ids ─────┘  sampled  └──────── continuation_ids ────────┘  sampled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumroll.errors import ModelError
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Message

# Stands for a reply while its surroundings are rendered: templates leave such a word alone, and no real message holds it.
REPLY = "drumroll7reply7stands7here"


def messages_to_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Tokens of a conversation, up to where the next reply begins. `tools` are schemas of what the model may call."""
    return tokenizer.encode(_render(tokenizer, messages, add_generation_prompt, tools))


def continuation_ids(tokenizer: Tokenizer, messages: Sequence[Message], last_token: int | None = None) -> list[int]:
    """Tokens between a reply and the next one: the end of the turn, the new messages, the beginning of the next turn.

    `last_token` is the last one that the policy sampled; when that already ends the turn, it is not added a second time.
    """
    ids = tokenizer.encode(_after_reply(tokenizer, messages, add_generation_prompt=True))
    return ids[1:] if ids and last_token is not None and ids[0] == last_token else ids


def reply_ids(tokenizer: Tokenizer, reply: str) -> list[int]:
    """Tokens of a reply to imitate, up to the one that ends its turn."""
    after = tokenizer.encode(_after_reply(tokenizer, (), add_generation_prompt=False))
    end = next((index for index, token in enumerate(after) if token in tokenizer.eos_ids), None)
    closing = after[: end + 1] if end is not None else list(tokenizer.eos_ids[:1])
    return tokenizer.encode(reply) + closing


def _after_reply(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """What the template writes behind an assistant's message. What came before that message does not matter to it."""
    exchange: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}]
    _, found, after = _render(tokenizer, [*exchange, *messages], add_generation_prompt).rpartition(REPLY)
    if not found:
        raise ModelError(
            f"the chat template in '{tokenizer.folder}' does not show an assistant's earlier replies: no further turn can follow one."
        )
    return after


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    if not tokenizer.hf.chat_template:
        raise ModelError(
            f"the tokenizer in '{tokenizer.folder}' has no chat template, so chat messages cannot be shown to this model. "
            f"Give prompts as plain text, use an instruction-tuned model, or put a `chat_template.jinja` into the folder."
        )
    try:
        return str(
            tokenizer.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except Exception as error:  # templates raise what they like
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ModelError(f"the chat template in '{tokenizer.folder}' refuses messages of the roles {roles}: {error}") from error
