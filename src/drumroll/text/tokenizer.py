"""Text to token ids and back, by the tokenizer of a model folder.

Environment workers import this module, and importing transformers, let alone torch, takes longer than all else that they do before they
can work. A folder whose `tokenizer.json` is all there is to it is therefore read by the tokenizers library alone; what else is asked of
it, such as a chat template, brings in transformers' tokenizer without torch. Other folders are left to `AutoTokenizer`, which imports both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from drumroll.errors import DataError, ModelError

# tokenizer_class values whose behaviour is fully described by tokenizer.json.
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
PLAIN_SETTINGS = {"tokenizer_class", "backend", "model_max_length", "is_local", "chat_template", *NAMED_TOKENS}
"""Settings of a tokenizer that leave text as `tokenizer.json` says, if the named tokens are special there too."""
OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")
"""Where older folders say more of their tokens."""
MANY_TOKENS = 100_000
"""transformers mends some tokenizers, all of which have more tokens than this."""

CONTEXT_TOKENS = 4
"""Tokens before a text that may change how it is spelled."""


class Tokenizer:
    """The tokenizer of a model folder.

    `encode` never adds special tokens; `encode_prompt` begins with the beginning-of-sequence token if the folder's
    tokenizer would. A character that a tokenizer without an unknown token cannot represent is a `DataError`.
    """

    def __init__(self, folder: Path | str, *, trust_remote_code: bool = False) -> None:
        self.folder = Path(folder)
        self._trust_remote_code = trust_remote_code
        settings = _read_json(self.folder / "tokenizer_config.json")
        self._plain = _load_plain(self.folder, settings)
        if self._plain is not None:
            bos, eos = (self._plain.token_to_id(settings[name]) if settings.get(name) else None for name in ("bos_token", "eos_token"))
        else:
            bos, eos = self.hf.bos_token_id, self.hf.eos_token_id
        self.eos_ids = _eos_ids(self.folder, eos)
        """Tokens that end a reply, the tokenizer's own first; empty when the folder names none."""
        self._prefix: list[int] = [bos] if bos is not None and self._ids("", add_special_tokens=True)[:1] == [bos] else []

    @cached_property
    def hf(self) -> Any:
        """The transformers tokenizer of the folder."""
        return _load(self.folder, self._trust_remote_code)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its number."""
        return dict((self._plain or self.hf).get_vocab())

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same tokens: a hash of all tokens and their ids."""
        vocabulary = sorted(self.vocabulary.items(), key=lambda entry: entry[1])
        return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Tokens of text that follows other text; special tokens that are spelled out in it are recognised."""
        try:
            return self._ids(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises nothing more specific
            unknown = "".join(sorted(set(text) - set(self.vocabulary)))
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

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._plain is not None:
            return list(self._plain.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.hf(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._plain is not None:
            return str(self._plain.decode(ids, skip_special_tokens=True))
        return str(self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _load_plain(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The folder's tokenizer by the tokenizers library alone; None where that might say other than transformers."""
    if settings.get("tokenizer_class") not in GENERIC_CLASSES or set(settings) - PLAIN_SETTINGS:
        return None
    described = _read_json(folder / "tokenizer.json")
    special = {token.get("content") for token in described.get("added_tokens") or () if token.get("special")}
    named = {settings[name] for name in NAMED_TOKENS if isinstance(settings.get(name), str)}
    if described.get("truncation") or described.get("padding") or any((folder / name).exists() for name in OTHER_FILES):
        return None
    if named - special or any(isinstance(settings.get(name), dict) for name in NAMED_TOKENS):
        return None

    from tokenizers import Tokenizer as Plain

    try:
        tokenizer = Plain.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the tokenizers library raises nothing more specific; transformers says what is wrong
        return None
    return tokenizer if tokenizer.get_vocab_size() <= MANY_TOKENS else None


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
