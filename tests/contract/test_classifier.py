"""Reward models: the scores that transformers gives one by one, in any company; what cannot be scored is said, never guessed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from drumroll.backends.classifier import Classifier, open_scorer, padded_batches
from drumroll.errors import ModelError, WorkerError
from drumroll.models.folder import check_classifier_folder
from drumroll.models.scratch import scratch_tokenizer
from drumroll.rewards.place import ScoreModel

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789=<>/ .\n"
PAD, EOS = 0, 2
CONTEXT = 256
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
    "gpt2": {**SMALL, "max_position_embeddings": CONTEXT},
    "bert": {**SMALL, "intermediate_size": 48, "max_position_embeddings": CONTEXT},
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}={{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)


def make_classifier(folder: Path, architecture: str = "llama", *, auto: Any = AutoModelForSequenceClassification, **changes: Any) -> Path:
    tokenizer = scratch_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    options = {"vocab_size": len(tokenizer), "pad_token_id": PAD, "eos_token_id": EOS, "num_labels": 1, **ARCHITECTURES[architecture]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(architecture, **{**options, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder: Path, **options: Any) -> Classifier:
    return Classifier(folder, device="cpu", dtype="float32", **options)


def scores_of(classifier: Classifier, texts: Sequence[Any]) -> list[Any]:
    """All at once; what a call raises stands in its place."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(classifier.score(text) for text in texts), return_exceptions=True)

    return asyncio.run(together())


def spy(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of every batch's rows."""
    batches: list[list[int]] = []
    forward = classifier._forward

    def noted(rows: Sequence[list[int]]) -> list[float]:
        batches.append([len(row) for row in rows])
        return forward(rows)

    monkeypatch.setattr(classifier, "_forward", noted)
    return batches


def text_of(length: int) -> str:
    return "".join(random.Random(length).choices(CHARACTERS, k=length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier") / "llama")


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Classifier:
    return opened(folder)


@pytest.mark.parametrize(
    ("architecture", "pad_token_id"),
    [("llama", PAD), ("llama", None), ("llama", EOS), ("gpt2", PAD), ("gpt2", None), ("bert", PAD)],
)
def test_scores_are_those_of_single_forward_passes(tmp_path: Path, architecture: str, pad_token_id: int | None) -> None:
    """Padding of the config's own, of none, and one that is also the end token with which every conversation closes."""
    folder = make_classifier(tmp_path / "model", architecture, pad_token_id=pad_token_id)
    classifier = opened(folder, max_batch_tokens=400)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [text_of(length) for length in (0, 1, 2, 3, 5, 7, 30, 31, 90, 200, 254)]
    conversations = [[{"role": "user", "content": text_of(n)}, {"role": "assistant", "content": text_of(n + 1)}] for n in (0, 4, 99)]

    def alone(ids: list[int]) -> float:
        with torch.inference_mode():
            return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    tokenizer = classifier.tokenizer.hf
    expected = [alone(tokenizer(text)["input_ids"]) for text in texts]
    expected += [alone(tokenizer.apply_chat_template(messages)["input_ids"]) for messages in conversations]
    assert len({round(score, 3) for score in expected}) > 10, "scores that are all alike would show nothing"
    assert scores_of(classifier, [*texts, *conversations]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert scores_of(classifier, texts[:1]) == pytest.approx(expected[:1], rel=1e-5, abs=1e-5)


def test_without_a_padding_token_the_last_token_counts_whatever_it_is(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "model", pad_token_id=None)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [[7, 8, 0], [7, 1], [9] * 20, [9, 2], [0], [3, 3]]
    with torch.inference_mode():
        expected = [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    assert opened(folder)._forward(rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_calls_that_arrive_together_share_forward_passes(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = spy(classifier, monkeypatch)
    scores_of(classifier, [text_of(10)] * 30)
    assert batches == [[11] * 30]


def test_batches_are_bounded_and_hold_similar_lengths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = opened(folder, max_batch_tokens=120)
    batches = spy(classifier, monkeypatch)
    scores_of(classifier, [text_of(length) for length in (5, 199, 6, 59, 58, 4)])
    assert batches == [[200], [60, 59], [7, 6, 5]]


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 500))
def test_padded_batches_hold_everything_once_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    batches = padded_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batch for batch in batches)
    assert all(len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in batches)


def test_later_calls_are_served_too(classifier: Classifier) -> None:
    """In one event loop, and in another one after it."""

    async def twice() -> list[float]:
        return [await classifier.score("first"), await classifier.score("second")]

    assert asyncio.run(twice()) == asyncio.run(twice())


def test_control_tokens_in_messages_are_ordinary_characters(classifier: Classifier) -> None:
    assert classifier._encode("fine.<eos>").count(EOS) == 1, "a text may be a conversation that was rendered before"
    assert classifier._encode("<bos>fine.") == classifier._encode("fine.")
    rendered = classifier._encode([{"role": "assistant", "content": "fine.<eos>user=great<eos>", "parts": ["<eos>"]}])
    assert rendered.count(EOS) == 1, "the template's own"
    assert classifier.tokenizer.decode(rendered) == "assistant=fine.< eos>user=great< eos>"


def test_a_text_that_is_too_long_is_refused_and_never_cut(classifier: Classifier) -> None:
    fits, too_long = scores_of(classifier, [text_of(CONTEXT - 1), text_of(CONTEXT)])
    assert isinstance(fits, float)
    assert isinstance(too_long, ValueError)
    assert "257 tokens" in str(too_long)
    assert "at most 256" in str(too_long)


def test_the_tokenizer_may_know_a_lower_limit(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 9}))
    fits, too_long = scores_of(opened(copy), ["12345678", "123456789"])
    assert isinstance(fits, float)
    assert "at most 9" in str(too_long)


def test_a_text_without_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    """Of a tokenizer that puts nothing in front of a text."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    (refusal,) = scores_of(opened(copy), [""])
    assert isinstance(refusal, ValueError)
    assert "nothing to score" in str(refusal)


def test_a_tokenizer_with_more_tokens_than_the_model_is_found_out(tmp_path: Path) -> None:
    fits, foreign = scores_of(opened(make_classifier(tmp_path / "model", vocab_size=20)), ["abc", "xyz"])
    assert isinstance(fits, float)
    assert isinstance(foreign, ValueError)
    assert "has 20" in str(foreign)


def test_a_failing_batch_fails_its_members_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = opened(folder, max_batch_tokens=120)
    forward = classifier._forward

    def broken(rows: Sequence[list[int]]) -> list[float]:
        if len(rows[0]) == 60:
            raise RuntimeError("the device fell off")
        return forward(rows)

    monkeypatch.setattr(classifier, "_forward", broken)
    *lost, fine = scores_of(classifier, [text_of(59), text_of(58), text_of(10)])
    for error in lost:
        assert isinstance(error, WorkerError)
        assert "the device fell off" in str(error)
        assert "batch of 2" in str(error)
    assert isinstance(fine, float)
    assert isinstance(scores_of(classifier, [text_of(58)])[0], float)


def test_scores_that_are_not_finite_are_no_scores(folder: Path) -> None:
    classifier = opened(folder)
    classifier.model.get_input_embeddings().weight[classifier._encode("x")[-1]] = torch.nan
    fine, spoilt = scores_of(classifier, ["abc", "xx"])
    assert isinstance(fine, float)
    assert isinstance(spoilt, ValueError)
    assert "nan" in str(spoilt)


def test_cancelled_calls_are_not_computed(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = spy(classifier, monkeypatch)

    async def cancel_one() -> float:
        kept, dropped = (asyncio.create_task(classifier.score(text_of(length))) for length in (10, 20))
        await asyncio.sleep(0)  # both wait now
        dropped.cancel()
        return await kept

    assert isinstance(asyncio.run(cancel_one()), float)
    assert batches == [[11]]


def test_open_scorer_takes_a_folder_and_says_what_is_wrong_with_it(folder: Path, tmp_path: Path) -> None:
    classifier = asyncio.run(open_scorer(ScoreModel(path=str(folder)), device="cpu"))
    assert classifier.model.dtype == torch.float32
    with pytest.raises(ModelError, match="does not exist"):
        asyncio.run(open_scorer(ScoreModel(path=str(tmp_path / "absent")), device="cpu"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"num_labels": 2}, "2 labels"), ({"num_labels": 5}, "5 labels"), ({"auto": AutoModelForCausalLM}, "it is LlamaForCausalLM")],
)
def test_another_head_is_refused(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    folder = make_classifier(tmp_path / "model", **options)
    for refuse in (check_classifier_folder, opened):
        with pytest.raises(ModelError, match=complaint):
            refuse(folder)


def test_a_head_without_weights_is_refused(tmp_path: Path) -> None:
    """The config says classifier, the weights are a language model's: transformers would make a head up."""
    folder = make_classifier(tmp_path / "model", auto=AutoModelForCausalLM)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelError, match=r"lacks weights.*score\.weight"):
        opened(folder)


def test_code_that_comes_with_a_classifier_runs_only_when_asked_for(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModelForSequenceClassification": "own.Own"}}))
    with pytest.raises(ModelError, match="trust_remote_code"):
        check_classifier_folder(copy)
    check_classifier_folder(copy, trust_remote_code=True)
