"""Text to tokens and back: nothing guessed, nothing added without being asked for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from drumroll.errors import DataError, ModelError
from drumroll.models.scratch import scratch_tokenizer
from drumroll.text.tokenizer import Tokenizer

CHARACTERS = "abc123 =\n\té<"


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    scratch_tokenizer(CHARACTERS).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def subwords(tmp_path_factory):
    """Byte-level BPE with a few merges and without a beginning-of-sequence token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat, the dog sat on the cat"] * 10, trainer)
    folder = tmp_path_factory.mktemp("subwords")
    TokenizersBackend(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return Tokenizer(folder)


@given(st.text(alphabet=CHARACTERS, max_size=30))
def test_every_character_is_one_token_and_survives(characters, text):
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


@given(st.text(max_size=20).filter(lambda text: set(text) - set(CHARACTERS) and "<" not in text))  # special tokens are known
def test_unknown_characters_are_errors(characters, text):
    with pytest.raises(DataError, match=r"has no token for .*`model.scratch.characters`"):
        characters.encode(text)


def test_unknown_characters_are_named(characters):
    with pytest.raises(DataError, match=r"has no token for 'xz' in 'azbx'"):
        characters.encode_prompt("azbx")


def test_only_prompts_begin_with_bos(characters, subwords):
    assert characters.encode("ab") == [3, 4]
    assert characters.encode_prompt("ab") == [1, 3, 4]
    assert characters.encode_prompt("") == [1]
    assert characters.encode_prompt("<bos>ab") == [1, 3, 4], "a prompt that spells it out gets no second one"
    assert subwords.encode_prompt("the") == subwords.encode("the")


def test_special_tokens_are_not_decoded(characters):
    assert characters.decode([1, 3, 4, 2, 0]) == "ab"


def test_a_demonstration_ends_with_eos(characters, subwords):
    assert characters.encode_demonstration("a=", "b") == ([1, 3, 10], [4, 2])
    prompt, completion = subwords.encode_demonstration("the cat", " sat")
    assert prompt + completion == [*subwords.encode("the cat sat"), *subwords.eos_ids]
    assert subwords.decode(completion) == " sat"


def test_a_demonstration_never_moves_the_prompts_tokens(subwords):
    prompt, completion = subwords.encode_demonstration("th", "e cat")
    assert prompt == subwords.encode("th")
    assert subwords.decode(prompt + completion) == "the cat"


def test_end_tokens_come_from_tokenizer_and_both_configs(characters, tmp_path):
    characters.hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 5]}')
    assert Tokenizer(tmp_path).eos_ids == (2, 7, 5)


@given(st.text(alphabet=f"{CHARACTERS}hetcasodmn,", max_size=30), st.lists(st.integers(0, 13), max_size=12))
def test_what_is_read_without_transformers_is_what_transformers_reads(characters, subwords, text, ids):
    known = "".join(character for character in text if character in CHARACTERS)
    for tokenizer, said in ((characters, known), (characters, f"<bos>{known}<eos>"), (subwords, text), (subwords, f"{text}<end>the")):
        assert tokenizer._plain is not None
        assert tokenizer.encode(said) == tokenizer.hf(said, add_special_tokens=False)["input_ids"]
        assert tokenizer._ids(said, add_special_tokens=True) == tokenizer.hf(said)["input_ids"]
        assert tokenizer._text(ids) == tokenizer.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.vocabulary == tokenizer.hf.get_vocab()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"eos_token": "c"}),
        ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "<eos>", "lstrip": True}}),
        ("tokenizer.json", {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}),
        ("added_tokens.json", {"<more>": 20}),
    ],
)
def test_folders_that_say_more_are_left_to_transformers(characters, tmp_path, file, content):
    characters.hf.save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **content}))
    assert Tokenizer(tmp_path)._plain is None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not a readable JSON file"):
        Tokenizer(tmp_path)
