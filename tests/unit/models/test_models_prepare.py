"""Models from folders, hub ids and from scratch, and what is said of folders that are none."""

import json
import subprocess
import sys

import huggingface_hub.constants
import pytest

from drumroll.config.models import ModelConfig, ScratchConfig
from drumroll.errors import ConfigError, ModelError
from drumroll.models.folder import LLAMA_FAMILY
from drumroll.models.prepare import check_model, prepare_model
from drumroll.models.scratch import _architecture_config, _is_plain
from drumroll.text.tokenizer import Tokenizer

CHARACTERS = "0123456789 =>\n"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def scratch(**changes):
    return ModelConfig(scratch=ScratchConfig(**{"characters": CHARACTERS, "config": SIZES, **changes}))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return prepare_model(scratch(), tmp_path_factory.mktemp("model") / "scratch", seed=3)


@pytest.fixture
def copy(model_folder, tmp_path):
    """A copy of the model folder to spoil."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_scratch_makes_a_folder_that_transformers_loads(model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 3
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)
    assert tokenizer("1 =\n")["input_ids"] == [1, 4, 13, 14, 16]
    assert model.config.hidden_size == 32


def test_scratch_weights_depend_on_the_seed_alone(model_folder, tmp_path):
    import torch

    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    again = prepare_model(scratch(), tmp_path / "again", seed=3)
    assert torch.equal(state, torch.random.get_rng_state()), "making a model must not disturb others' randomness"
    other = prepare_model(scratch(), tmp_path / "other", seed=4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model_folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_scratch_takes_other_architectures(architecture, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    folder = prepare_model(scratch(architecture=architecture, config=sizes), tmp_path, seed=0)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == architecture
    assert 32 in (config.get("hidden_size"), config.get("n_embd"))
    check_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"characters": "abca"}, r"`model.scratch.characters` lists 'a' more than once"),
        *(({"words": words}, r"`model.scratch.words`: '.*' is empty, or a token already") for words in (("ab", "ab"), ("1",), ("",))),
        ({"characters": ""}, r"`model.scratch.characters` is empty"),
        ({"architecture": "lama"}, r"no causal language model of the type 'lama'. Did you mean 'llama'\?"),
        ({"architecture": "vit"}, r"no causal language model of the type 'vit'"),
        ({"config": {"hiden_size": 3}}, r"`model.scratch.config.hiden_size`: LlamaConfig has no such field. Did you mean 'hidden_size'\?"),
        ({"config": {"vocab_size": 3}}, r"follows from `model.scratch.characters`"),
        ({"config": {"hidden_size": "big"}}, r"refuses these fields.*hidden_size.*expected int"),
        ({"config": {"hidden_size": 30, "num_attention_heads": 4}}, r"refuses these fields.*not a multiple"),
    ],
)
def test_bad_scratch_sections_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check_model(scratch(**changes))
    with pytest.raises(ConfigError, match=message):
        prepare_model(scratch(**changes), tmp_path / "model", seed=0)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("architecture", sorted(LLAMA_FAMILY))
def test_sizes_that_are_not_asked_about_are_right(architecture):
    section = scratch(architecture=architecture, config={**SIZES, "tie_word_embeddings": True}).scratch
    assert _is_plain(section)
    assert _architecture_config(section).num_key_value_heads == 2
    for change in ({"num_key_value_heads": 3}, {"hidden_size": 36}, {"hidden_size": 32.0}, {"head_dim": 8}):
        assert not _is_plain(section.model_copy(update={"config": {**SIZES, **change}}))


def test_a_folder_is_used_where_it_is(model_folder, tmp_path):
    assert prepare_model(ModelConfig(path=str(model_folder)), tmp_path / "unused", seed=0) == model_folder
    assert not (tmp_path / "unused").exists()


def test_a_hub_model_comes_from_the_offline_cache(model_folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for file in model_folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "v1").write_text("c0ffee")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = prepare_model(ModelConfig(path="org/tiny", revision="v1"), tmp_path / "unused", seed=0)
    assert folder == snapshot
    assert Tokenizer(folder).encode("1") == [4]
    with pytest.raises(ModelError, match="at revision 'v2' is not in the local hub cache"):
        check_model(ModelConfig(path="org/tiny", revision="v2"))


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def truncate(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"is not a model folder: it has no config.json; it holds generation_config.json"),
        (lambda f: (f / "config.json").write_text("{nope"), r"config.json' is not a readable JSON file"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json' holds a list"),
        (lambda f: edit(f, model_type=None), r"names no `model_type`"),
        (lambda f: edit(f, model_type="llamma"), r"knows no model_type 'llamma'. Did you mean 'llama'\?"),
        (lambda f: edit(f, model_type="mine", auto_map={"AutoModelForCausalLM": "m.M"}), r"set `model.trust_remote_code: true`"),
        (lambda f: edit(f, model_type="bert", architectures=["BertForMaskedLM"]), r"not a causal language model: it is BertForMaskedLM"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no weights: model.safetensors"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), r"is not a safetensors file.*Git LFS pointer"),
        (truncate, r"model.safetensors' is damaged"),
        (only_pickle, r"'pytorch_model.bin', a pickle.*save_pretrained"),
        (missing_shard, r"names weights that are not there: model-00002-of-00002"),
        (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer: tokenizer.json or"),
    ],
)
def test_folders_that_are_no_model_are_refused(copy, spoil, message):
    check_model(ModelConfig(path=str(copy)))
    spoil(copy)
    with pytest.raises(ModelError, match=message):
        check_model(ModelConfig(path=str(copy)))


def test_remote_code_is_allowed_only_by_name(copy):
    edit(copy, model_type="mine", auto_map={"AutoModelForCausalLM": "m.M"})
    check_model(ModelConfig(path=str(copy), trust_remote_code=True))


def test_the_folder_inside_is_suggested(copy):
    with pytest.raises(ModelError, match=r"Did you mean '.*copy'\?"):
        check_model(ModelConfig(path=str(copy.parent)))


def test_checking_a_folder_and_loading_its_tokenizer_need_no_torch(model_folder):
    program = f"""
import sys
from drumroll.config.models import ModelConfig
from drumroll.models.prepare import check_model
from drumroll.text.tokenizer import Tokenizer
check_model(ModelConfig(path={str(model_folder)!r}))
assert Tokenizer({str(model_folder)!r}).encode_prompt("1=") == [1, 4, 14]
assert "torch" not in sys.modules and "datasets" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_words_are_one_token_each_and_the_longest_comes_first(tmp_path):
    characters, words = " abcdefghijklmnopqrstuvwxyz.+", ("tan", "stand", "a.b")
    tokenizer = Tokenizer(prepare_model(scratch(characters=characters, words=words), tmp_path / "model", seed=0))
    texts = ["tan", "stand tan", "stan", "a.b+acb", "standtan"]
    pieces = [[tokenizer.decode([token]) for token in tokenizer.encode(text)] for text in texts]
    assert pieces == [["tan"], ["stand", " ", "tan"], ["s", "tan"], ["a.b", "+", "a", "c", "b"], ["stand", "tan"]]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
