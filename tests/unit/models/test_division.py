"""What can be divided over ranks, seen from a model's config alone; and where files cut tensors."""

from __future__ import annotations

from typing import Any

import pytest

from drumroll.config.models import ParallelConfig
from drumroll.models.division import in_files, problems

LLAMA = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48}
MIXTURE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 6, "intermediate_size": 10}


@pytest.mark.parametrize(
    ("facts", "sizes", "said"),
    [
        (LLAMA, {"tp": 4, "cp": 3, "shard": 2}, []),
        (LLAMA, {"tp": 8}, ["`parallel.critic.tp` is 8, which does not divide the model's 12 attention heads"]),
        (LLAMA, {"tp": 3}, ["does not divide the model's 4 key and value heads"]),
        ({**LLAMA, "intermediate_size": 50}, {"tp": 4}, ["does not divide the model's 50 inner numbers (`intermediate_size`)"]),
        (LLAMA, {"cp": 5}, ["`parallel.critic.cp` is 5, but 5 does not divide the model's 12 attention heads"]),
        (LLAMA, {"tp": 4, "cp": 2}, ["`parallel.critic.cp` is 2, but 4 (`parallel.critic.tp`) × 2 does not divide"]),
        (LLAMA, {"ep": 2}, ["has no experts to divide"]),
        (MIXTURE, {"tp": 4, "ep": 3}, []),
        ({**MIXTURE, "mlp_only_layers": [0]}, {"tp": 4}, ["does not divide the model's 10 inner numbers"]),
        (MIXTURE, {"ep": 4}, ["`parallel.critic.ep` is 4, which does not divide the model's 6 experts"]),
        (
            {**MIXTURE, "model_type": "mixtral"},
            {"ep": 2},
            ["type 'mixtral' cannot be divided that way; those of type qwen3_moe"],
        ),
        ({"model_type": "gpt2", "n_head": 4}, {"tp": 2, "cp": 2}, ["`parallel.critic.tp` is 2, but models of type 'gpt2'"]),
        ({"model_type": "gpt2", "n_head": 4}, {"cp": 4}, []),
        ({"model_type": "mamba"}, {"cp": 2}, ["models of type 'mamba' cannot be divided that way"]),
    ],
)
def test_what_does_not_divide_is_named(facts: dict[str, Any], sizes: dict[str, int], said: list[str]) -> None:
    found = list(problems("parallel.critic", ParallelConfig(**sizes), facts))
    assert len(found) == len(said)
    for problem, fragment in zip(found, said, strict=True):
        assert fragment in problem


def test_files_have_a_matrix_per_expert() -> None:
    stem = "model.layers.1.mlp.experts"
    parts = in_files("qwen3_moe", f"{stem}.gate_up_proj", (2, 6, 4))
    assert dict(parts) == {
        f"{stem}.0.gate_proj.weight": (0, slice(0, 3)),
        f"{stem}.0.up_proj.weight": (0, slice(3, 6)),
        f"{stem}.1.gate_proj.weight": (1, slice(0, 3)),
        f"{stem}.1.up_proj.weight": (1, slice(3, 6)),
    }
    assert in_files("qwen3_moe", f"{stem}.down_proj", (2, 4, 3)) == [(f"{stem}.{n}.down_proj.weight", (n,)) for n in range(2)]
    assert in_files("qwen3_moe", "model.norm.weight", (4,)) == [("model.norm.weight", ())]


def test_ranks_that_can_be_arranged() -> None:
    layout = ParallelConfig(tp=2, cp=2, ep=8)
    assert layout.least_devices == 8
    assert [number for number in range(1, 33) if layout.problem_with(number) is None] == [8, 16, 24, 32]
    hybrid = ParallelConfig(tp=2, shard=3)
    assert [number for number in range(1, 20) if hybrid.problem_with(number) is None] == [6, 12, 18]
