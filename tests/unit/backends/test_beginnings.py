"""Which tokens a pass computes: shared beginnings once, nothing behind what is asked for, and the same answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.backends.train import beginnings
from drumroll.backends.train.beginnings import computed
from drumroll.config.models import ScratchConfig
from drumroll.models.scratch import make_scratch
from drumroll.text.packing import pack_demonstrations

TEXTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@given(TEXTS)
def test_every_token_stands_for_itself_and_what_comes_before_it(texts: list[tuple[list[int], list[int]]]) -> None:
    batch = pack_demonstrations(texts)
    places = batch.loss_mask.nonzero().squeeze(1) - 1
    found = computed(batch, places)
    bounds = batch.offsets.tolist()
    whole = [tuple(batch.token_ids[start : start + size].tolist()) for start, size in zip(bounds, found.lengths, strict=False)]
    beginnings_ = [text[: place + 1] for text in whole for place in range(len(text))]
    assert found.lengths == [len(prompt) + len(reply) - 1 for prompt, reply in texts], "the last token tells nothing"
    owner = torch.bucketize(found.rows, batch.offsets[1:], right=True)
    of_rows = [tuple(batch.token_ids[bounds[n] : row + 1].tolist()) for row, n in zip(found.rows.tolist(), owner.tolist(), strict=True)]
    source = range(len(of_rows)) if found.source is None else found.source.tolist()
    assert [of_rows[row] for row in source] == beginnings_
    if found.source is not None:
        assert len(set(of_rows)) == len(of_rows), "each once"
    assert batch.token_ids[places].tolist() == batch.token_ids[found.rows[found.asked]].tolist()
    asked_owner = torch.bucketize(places, batch.offsets[1:], right=True)
    before = [
        tuple(batch.token_ids[bounds[n] : place + 1].tolist()) for place, n in zip(places.tolist(), asked_owner.tolist(), strict=True)
    ]
    assert [of_rows[row] for row in found.asked.tolist()] == before


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_log_probabilities_and_gradients_are_those_of_trajectories_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    from drumroll.algo.loss import cross_entropy
    from drumroll.backends.train.fsdp2 import Fsdp2
    from drumroll.types import RankInfo

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    make_scratch(ScratchConfig(architecture=architecture, characters="abcdefgh", config=sizes), tmp_path / "model", 0)
    backend = Fsdp2(Fsdp2.Config(lr=1e-2), tmp_path / "model", "float32", 0)
    backend.setup(RankInfo("actor_train", 0, 1, "cpu"))
    rng = random.Random(0)
    prompts = [[rng.randrange(11) for _ in range(40)] for _ in range(3)]
    batch = pack_demonstrations([(prompts[i % 3], [rng.randrange(11) for _ in range(1 + i)]) for i in range(12)])
    batch = batch.with_fields(weight=batch.loss_mask.float() / 78)
    grads, logp = [], []
    for worth_it in (beginnings.WORTH_IT, 1.0):
        monkeypatch.setattr(beginnings, "WORTH_IT", worth_it)
        found = computed(batch, batch.loss_mask.nonzero().squeeze(1) - 1)
        assert (found.source is not None) == (worth_it < 1)
        logp.append(backend.logprobs(batch))
        backend._optimizer.zero_grad()
        backend._learn(batch, cross_entropy, {}, None)
        grads.append([parameter.grad.clone() for parameter in backend._parameters if parameter.grad is not None])
    assert len(found.rows) == batch.num_tokens - 12
    torch.testing.assert_close(logp[0], logp[1], atol=1e-5, rtol=1e-5)
    for shared, alone in zip(*grads, strict=True):
        torch.testing.assert_close(shared, alone, atol=1e-6, rtol=1e-4)
    backend.close()
