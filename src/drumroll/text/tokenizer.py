"""Text to token ids and back, by the tokenizer of a model folder.

Environment workers import this module, so it stays clear of torch for every folder that says that its `tokenizer.json`
is all there is to it; other folders are left to transformers' `AutoTokenizer`, which imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from drumroll.errors import DataError, ModelError

# tokenizer_class values whose behaviour is fully described by tokenizer.json.
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


CONTEXT_TOKENS = 4
"""Tokens before a text that may change how it is spelled."""


class Tokenizer:
    """The tokenizer of a model folder.

    `encode` never adds special tokens; `encode_prompt` begins with the beginning-of-sequence token if the folder's
    tokenizer would. A character that a tokenizer without an unknown token cannot represent is a `DataError`.
    """

    def __init__(self, folder: Path | str, *, trust_remote_code: bool = False) -> None:
        self.folder = Path(folder)
        self.hf = _load(self.folder, trust_remote_code)
        """The transformers tokenizer behind it."""
        self.eos_ids = _eos_ids(self.folder, self.hf.eos_token_id)
        """Tokens that end a reply, the tokenizer's own first; empty when the folder names none."""
        bos = self.hf.bos_token_id
        self._prefix: list[int] = [bos] if bos is not None and self.hf("")["input_ids"][:1] == [bos] else []

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same tokens: a hash of all tokens and their ids."""
        vocabulary = sorted(self.hf.get_vocab().items(), key=lambda entry: entry[1])
        return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Tokens of text that follows other text; special tokens that are spelled out in it are recognised."""
        try:
            return list(self.hf(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # the tokenizers library raises nothing more specific
            unknown = "".join(sorted(set(text) - set(self.hf.get_vocab())))
            raise DataError(
                f"the tokenizer in '{self.folder}' has no token for {unknown!r} in {text[:80]!r}. "
                f"A model made from scratch knows exactly the characters in `model.scratch.characters`."
            ) from error

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of text that begins a trajectory."""
        ids = self.encode(text)
        return ids if self._prefix and ids[:1] == self._prefix else self._prefix + ids

    def encode_demonstration(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and of the reply to imitate with the end token.

        The reply is tokenised where it stands, behind the prompt, unless its first token would swallow the prompt's last."""
        prompt_ids = self.encode_prompt(prompt)
        joint = self.encode_prompt(prompt + completion)
        clean_cut = joint[: len(prompt_ids)] == prompt_ids
        completion_ids = joint[len(prompt_ids) :] if clean_cut else self.encode(completion)
        return prompt_ids, completion_ids + list(self.eos_ids[:1])

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Text without special tokens, as it stands behind the tokens `after`: many tokenizers swallow a text's first space."""
        context = list(after[-CONTEXT_TOKENS:])
        head, whole = self._text(context), self._text([*context, *ids])
        return whole[len(head) :] if whole.startswith(head) else self._text(list(ids))

    def _text(self, ids: list[int]) -> str:
        return str(self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) if ids else ""


def _load(folder: Path, trust_remote_code: bool) -> Any:
    described_as = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    try:
        if described_as in GENERIC_CLASSES and (folder / "tokenizer.json").exists():
            from transformers.tokenization_utils_tokenizers import TokenizersBackend

            return TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {error}") from error


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    ids = [own]
    for name in ("generation_config.json", "config.json"):
        named = _read_json(folder / name).get("eos_token_id")
        ids += named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not a readable JSON file: {error}") from error
    return content if isinstance(content, dict) else {}
