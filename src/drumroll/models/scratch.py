"""Models made from scratch: random weights behind any causal LM architecture of transformers, and a tokenizer of characters and words."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drumroll.config.models import ScratchConfig
from drumroll.errors import ConfigError
from drumroll.models.folder import LLAMA_FAMILY
from drumroll.registry import nearest

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL = (PAD, BOS, EOS)

PLAIN_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

# Fields of an architecture's config that follow from the tokenizer.
FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


def check_scratch(cfg: ScratchConfig) -> None:
    """Raise a `ConfigError` for anything that `make_scratch` could not make."""
    scratch_vocabulary(cfg.characters, cfg.words)
    if not _is_plain(cfg):
        _architecture_config(cfg)


def make_scratch(cfg: ScratchConfig, target: Path, seed: int) -> None:
    """Write a Hugging Face folder, whole or not at all: tokenizer, config, and weights drawn from a generator seeded by `seed` alone."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = scratch_tokenizer(cfg.characters, cfg.words)
    config = _architecture_config(cfg)
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            raise ConfigError(f"`model.scratch.config`: {cfg.architecture} cannot be built with these fields: {error}") from error
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with _no_progress_bars():
        model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(target)


def scratch_vocabulary(characters: str, words: Sequence[str] = ()) -> dict[str, int]:
    """Token → id: the special tokens, then every character and every word in their order."""
    if not characters:
        raise ConfigError("`model.scratch.characters` is empty: list every character that prompts and replies are made of.")
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if repeated:
        raise ConfigError(f"`model.scratch.characters` lists {''.join(repeated)!r} more than once; every character is one token.")
    tokens = [*SPECIAL, *characters, *words]
    doubled = sorted({word for word in words if tokens.count(word) > 1 or not word})
    if doubled:
        raise ConfigError(f"`model.scratch.words`: {doubled[0]!r} is empty, or a token already. List every word once, characters apart.")
    return {token: index for index, token in enumerate(tokens)}


def scratch_tokenizer(characters: str, words: Sequence[str] = ()) -> Any:
    """A transformers tokenizer with one token for each word and character and none for unknown ones: those are errors, never guesses."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    vocabulary = scratch_vocabulary(characters, words)
    pieces = [*(re.escape(word) for word in sorted(words, key=len, reverse=True)), r"[\s\S]"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return TokenizersBackend(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _is_plain(cfg: ScratchConfig) -> bool:
    """Whether these are sizes that every decoder of the Llama family can have, so that transformers, whose import takes seconds, need not
    be asked."""
    sizes = {name: value for name, value in cfg.config.items() if name != "tie_word_embeddings"}
    if cfg.architecture not in LLAMA_FAMILY or set(sizes) != set(PLAIN_SIZES):
        return False
    if any(type(size) is not int or size < 1 for size in sizes.values()) or type(cfg.config.get("tie_word_embeddings", False)) is not bool:
        return False
    hidden, heads, kv_heads = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    return bool(hidden % (2 * heads) == 0 and heads % kv_heads == 0)


def _architecture_config(cfg: ScratchConfig) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if cfg.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"`model.scratch.architecture`: transformers knows no causal language model of the type '{cfg.architecture}'."
            f"{nearest(cfg.architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}"
        )
    kind = type(AutoConfig.for_model(cfg.architecture))
    # attribute_map holds other names of fields, for example GPT-2's `hidden_size` for `n_embd`.
    known = sorted(
        {*(field.name for field in dataclasses.fields(kind) if field.init), *kind.attribute_map} - {*FROM_TOKENIZER, "model_type"}
    )
    for name in cfg.config:
        if name in FROM_TOKENIZER:
            raise ConfigError(f"`model.scratch.config.{name}` follows from `model.scratch.characters` and `words`: remove it.")
        if name not in known:
            raise ConfigError(f"`model.scratch.config.{name}`: {kind.__name__} has no such field.{nearest(name, known)}")
    vocabulary = scratch_vocabulary(cfg.characters, cfg.words)
    try:
        return kind(
            **cfg.config,
            vocab_size=len(vocabulary),
            pad_token_id=vocabulary[PAD],
            bos_token_id=vocabulary[BOS],
            eos_token_id=vocabulary[EOS],
        )
    except Exception as error:  # transformers checks types and sizes with exceptions of several kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"`model.scratch.config`: {kind.__name__} refuses these fields: {reason}") from error
