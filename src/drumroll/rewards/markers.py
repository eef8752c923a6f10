"""The words that chat templates are made of, in text that must not be taken for a template.

A tokenizer that meets `<|im_end|>` in a text makes of it the one token that ends a message. A reply in which that is spelled out
could so close its own message, and go on as somebody else.
"""

from __future__ import annotations

import re

MARKER = re.compile(
    r"<(?=[|｜][^\s<>]{1,64}[|｜]>"  # <|im_end|>, <|eot_id|>, <|channel|>, <｜Assistant｜>
    r"|</?SYS>>"
    r"|/?(?:s|bos|eos|pad|unk|mask|turn|start_of_turn|end_of_turn|end_of_utterance)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|CLS|SEP|PAD|MASK|UNK)\])"
)


def defuse(text: str) -> str:
    """The text with a space inside every marker of the chat templates in use, which makes it plain text to any tokenizer.

    Example: `defuse("Bye<|im_end|>")` is `"Bye< |im_end|>"`.
    """
    return MARKER.sub(lambda found: found[0] + " ", text)
