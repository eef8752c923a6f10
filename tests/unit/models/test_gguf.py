"""GGUF files as model folders: what is converted, what is refused, and the folder of converted models."""

import threading

import numpy as np
import pytest

from drumroll.config.models import ModelConfig
from drumroll.errors import ModelError, PluginError
from drumroll.models import packaged
from drumroll.models.prepare import check_model, prepare_model, resolve_model
from drumroll.text.chat import messages_to_ids, reply_ids
from drumroll.text.tokenizer import Tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary():
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def model():
    """The model that the files hold, as transformers has it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary()), rope_parameters=rope, tie_word_embeddings=False, **SIZES)).eval()


def gguf_order(weight, num_heads):
    """Row by row: the numbers i and i + half of a head become neighbours."""
    half = len(weight) // num_heads // 2
    places = [head * 2 * half + side * half + i for head in range(num_heads) for i in range(half) for side in range(2)]
    return weight[places]


def write(path, model, *, pre="smollm", architecture="llama", tokens=None, tied=False, quantised=(), extra=(), chat=CHAT):
    """A GGUF file of the model, as converters write it."""
    gguf = pytest.importorskip("gguf")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    listed = tokens or vocabulary()
    writer.add_token_list(listed)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in listed])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(chat)
    for name, tensor in [*model.state_dict().items(), *extra]:
        weight = np.asarray(tensor)
        whole = name.removesuffix(".weight")
        if tied and whole == "lm_head":
            continue
        layer, part = whole.split(".", 3)[2:] if whole.startswith("model.layers.") else (None, whole)
        own = names.get(part, part)
        if own in ("attn_q", "attn_k"):
            weight = gguf_order(weight, SIZES["num_attention_heads" if own == "attn_q" else "num_key_value_heads"])
        target = f"{own}.weight" if layer is None else f"blk.{layer}.{own}.weight"
        if own in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 9, 30, 77, 5, 41, 2]])).logits


def test_the_converted_model_computes_the_same(tmp_path, model):
    import torch

    folder = resolve_model(str(write(tmp_path / "tiny.gguf", model)))
    check_model(ModelConfig(path=str(tmp_path / "tiny.gguf")))
    assert torch.equal(logits(load(folder)), logits(model))
    assert load(folder).config.rms_norm_eps == 1e-5  # not the float32 nearest to it


def test_quantised_weights_are_what_the_quantisation_left_of_them(tmp_path, model):
    folder = resolve_model(str(write(tmp_path / "tiny.gguf", model, quantised=("attn_q", "ffn_down"))))
    found = load(folder).state_dict()
    for name, weight in model.state_dict().items():
        step = weight.abs().max() / 127
        changed = any(part in name for part in ("q_proj", "down_proj"))
        assert bool((found[name] != weight).any()) == changed
        assert (found[name] - weight).abs().max() <= step


def test_a_file_without_an_output_matrix_has_tied_embeddings(tmp_path, model):
    folder = resolve_model(str(write(tmp_path / "tiny.gguf", model, tied=True)))
    converted = load(folder)
    assert converted.lm_head.weight is converted.model.embed_tokens.weight


def test_the_tokenizer_is_the_files_own(tmp_path, model):
    folder = resolve_model(str(write(tmp_path / "tiny.gguf", model)))
    tokenizer = Tokenizer(folder)
    tokens = vocabulary()
    assert tokenizer.eos_ids == (2,)
    assert [tokens[index] for index in tokenizer.encode("hello hello<|im_end|>")] == ["hello", "Ġhello", "<|im_end|>"]
    for text in ("naïve — 你好 😀\n\n\tx = 12", " two  spaces ", "I'm"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    asked = messages_to_ids(tokenizer, [{"role": "user", "content": "hello"}])
    assert tokenizer.hf.decode(asked) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert [tokens[index] for index in reply_ids(tokenizer, "hello")] == ["hello", "<|im_end|>"]


def test_the_rule_that_cuts_text_decides_whether_digits_merge(tmp_path, model):
    spelled = {}
    for pre in ("smollm", "gpt-2"):
        folder = resolve_model(str(write(tmp_path / f"{pre}.gguf", model, pre=pre)))
        spelled[pre] = [vocabulary()[index] for index in Tokenizer(folder).encode("12")]
    assert spelled == {"smollm": ["1", "2"], "gpt-2": ["12"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; only llama"),
        ({"pre": "llama-bpe"}, "rule 'llama-bpe'; only gpt-2 and smollm"),
        ({"tokens": [*SPECIAL, "a"]}, "4 tokens and embeddings of 265"),
        ({"extra": [("attn_sinks", np.zeros(4, np.float32))]}, "tensor 'attn_sinks.weight'"),
        ({"extra": [("rope_freqs", np.ones(8, np.float32))]}, "stretches its positions"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, model, changes, message):
    file = write(tmp_path / "tiny.gguf", model, **changes)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(file))
    assert not [entry for entry in (tmp_path / "cache" / "drumroll" / "models").iterdir() if entry.is_dir()]


def test_files_that_are_none_are_named(tmp_path, model):
    whole = write(tmp_path / "whole.gguf", model)
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:20_000])
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name in ("cut.gguf", "text.gguf"):
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            resolve_model(str(tmp_path / name))
    with pytest.raises(ModelError, match=r"Did you mean '.*whole\.gguf'"):
        resolve_model(str(tmp_path / "wole.gguf"))
    with pytest.raises(ModelError, match="revision 'v1' means nothing"):
        resolve_model(str(whole), "v1")


def counting(monkeypatch):
    """How often something is converted."""
    from drumroll.models import gguf

    calls, convert = [], gguf.convert_gguf
    monkeypatch.setattr(gguf, "convert_gguf", lambda source, target: (calls.append(source), convert(source, target))[1])
    return calls


def test_a_file_is_converted_once_and_another_one_of_its_name_anew(tmp_path, model, monkeypatch):
    file = write(tmp_path / "tiny.gguf", model)
    calls = counting(monkeypatch)
    first = prepare_model(ModelConfig(path=str(file)), tmp_path / "unused", seed=0)
    assert resolve_model(str(file)) == first
    assert len(calls) == 1
    write(file, model, chat="other")
    assert resolve_model(str(file)) != first
    assert len(calls) == 2


def test_a_damaged_folder_is_made_anew(tmp_path, model, monkeypatch):
    file = write(tmp_path / "tiny.gguf", model)
    calls = counting(monkeypatch)
    folder = resolve_model(str(file))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert resolve_model(str(file)) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    (folder / "tokenizer.json").unlink()
    assert (resolve_model(str(file)) / "tokenizer.json").exists()
    assert len(calls) == 3


def test_a_conversion_that_was_cut_off_leaves_nothing_that_is_taken_for_a_model(tmp_path, model, monkeypatch):
    from drumroll.models import gguf

    file = write(tmp_path / "tiny.gguf", model)
    convert = gguf.convert_gguf

    def killed(source, target):
        convert(source, target)
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(str(file))
    monkeypatch.setattr(gguf, "convert_gguf", convert)
    folder = resolve_model(str(file))
    assert load(folder) is not None
    assert [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] == [folder.name]


def test_two_that_want_the_same_model_convert_it_once(tmp_path, model, monkeypatch):
    """Locks of two open files exclude each other whether their owners are threads or processes."""
    from drumroll.models import gguf

    file = write(tmp_path / "tiny.gguf", model)
    convert, calls = gguf.convert_gguf, []
    second_has_asked = threading.Event()

    def slow(source, target):
        calls.append(source)
        assert second_has_asked.wait(timeout=60)
        convert(source, target)

    monkeypatch.setattr(gguf, "convert_gguf", slow)
    found = []
    first = threading.Thread(target=lambda: found.append(resolve_model(str(file))))
    first.start()
    second = threading.Thread(target=lambda: (second_has_asked.set(), found.append(resolve_model(str(file)))))
    second.start()
    for thread in (first, second):
        thread.join(timeout=60)
    assert found[0] == found[1]
    assert len(calls) == 1


def test_a_packaged_model_is_found_by_name_and_checked(tmp_path, model, monkeypatch):
    file = write(tmp_path / "tiny.gguf", model)
    package = tmp_path / "site" / "tiny_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a model is read from its package, which is never imported')")
    (package / "tiny.gguf").write_bytes(file.read_bytes())
    known = packaged.PackagedModel("tiny_model_package", "tiny.gguf", packaged.file_checksum(file), "tiny")
    monkeypatch.setitem(packaged.PACKAGED, "tiny", known)
    with pytest.raises(PluginError, match=r"pip install 'drumroll\[tiny\]'"):
        resolve_model("package:tiny")
    monkeypatch.syspath_prepend(str(package.parent))
    assert load(resolve_model("package:tiny")) is not None
    (package / "tiny.gguf").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="missing or not the file that is expected"):
        resolve_model("package:tiny")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-instruct'"):
        resolve_model("package:smollm2")


def test_smollm2_speaks(tmp_path):
    pytest.importorskip("gguf")
    try:
        packaged.packaged_file("smollm2-135m-instruct")
    except PluginError as missing:
        pytest.skip(str(missing))
    import torch

    folder = resolve_model("package:smollm2-135m-instruct")
    tokenizer, model = Tokenizer(folder), load(folder)
    asked = messages_to_ids(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    replied = model.generate(torch.tensor([asked]), max_new_tokens=12, do_sample=False)[0, len(asked) :].tolist()
    assert tokenizer.decode(replied) == "The capital of France is Paris."
    assert replied[-1] in tokenizer.eos_ids
    assert model.num_parameters() == 134_515_008
