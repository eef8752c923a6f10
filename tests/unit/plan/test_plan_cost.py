from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_configs import RL_ROLES, PlainRl, rl_config

from drumroll.config.models import EngineConfig, ModelConfig, ParallelConfig, ScratchConfig
from drumroll.errors import PlanError
from drumroll.plan import Memory, Node, Pool, make_plan, parameter_count, parse_pool
from drumroll.plan.cost import compute_bytes, device_memory, known_shape

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# Counts of the models that transformers 5.19 builds from these configs.
@pytest.mark.parametrize(
    ("family", "plain", "tied", "untied_head_24"),
    [
        ("llama", 257472, 193472, 275904),
        ("mistral", 257472, 193472, 275904),
        ("qwen2", 257856, 193856, 276480),
        ("qwen3", 516288, 452288, 276048),
        ("qwen3_moe", 56813088, 56749088, 56831568),
        ("gemma", 746432, 746432, 275904),
        ("gemma2", 746816, 746816, 276288),
        ("gemma3_text", 748352, 748352, 276432),
    ],
)
def test_parameter_count(family: str, plain: int, tied: int, untied_head_24: int) -> None:
    config = {"model_type": family, **SHAPE}
    assert parameter_count(config) == plain
    assert parameter_count({**config, "tie_word_embeddings": True}) == tied
    assert parameter_count({**config, "tie_word_embeddings": False, "head_dim": 24}) == untied_head_24
    assert parameter_count({**config, "head_dim": None, "tie_word_embeddings": None}) == plain


def test_biases_count() -> None:
    config = {"model_type": "llama", **SHAPE}
    assert parameter_count({**config, "attention_bias": True}) == 257472 + 3 * (64 + 2 * 32 + 64)
    assert parameter_count({**config, "mlp_bias": True}) == 257472 + 3 * (2 * 160 + 64)


def test_experts_count() -> None:
    config = {"model_type": "qwen3_moe", **SHAPE, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}
    plain = parameter_count({**config, "model_type": "qwen3", "num_experts": 0})
    assert plain is not None
    mixture = 8 * 64 * (3 * 32 + 1)
    assert parameter_count(config) == plain + 3 * (mixture - 3 * 64 * 160)
    assert parameter_count({**config, "mlp_only_layers": [1]}) == plain + 2 * (mixture - 3 * 64 * 160)


def test_published_sizes() -> None:
    mixture = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    mixture |= {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768, "head_dim": 128}
    assert parameter_count(mixture) == 30_532_122_624
    qwen = {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    assert parameter_count({**qwen, "num_attention_heads": 28, "num_key_value_heads": 4}) == 7_615_616_512
    llama = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    assert parameter_count({**llama, "num_attention_heads": 32, "num_key_value_heads": 8}) == 8_030_261_248


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "rwkv", **SHAPE}, {"model_type": "llama"}, {**SHAPE, "model_type": "llama", "vocab_size": None}][:]
)
def test_unknown_models_have_no_count(config: dict[str, Any]) -> None:
    assert parameter_count(config) is None


def known_parameters(model: ModelConfig) -> int | None:
    shape = known_shape(model)
    return None if shape is None else shape.num_parameters


def test_known_parameters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    assert known_parameters(ModelConfig(path=str(tmp_path))) == 257472
    (tmp_path / "config.json").write_text("not JSON")
    assert known_parameters(ModelConfig(path=str(tmp_path))) is None
    assert known_parameters(ModelConfig(path="org/name")) is None
    scratch = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    assert known_parameters(ModelConfig(scratch=ScratchConfig(characters="ab", config=scratch))) == 257472 - 2 * 64 * 998


def test_what_each_device_holds() -> None:
    plain = ParallelConfig()
    assert device_memory("actor_train", 1000, 4, plain, 2) == Memory(weights=1000, gradients=1000, optimizer=2000)
    assert device_memory("actor_train", 1000, 1, plain, 2, adapters=True) == Memory(weights=2000)
    assert device_memory("actor_train", 1000, 4, plain, 2, adapters=True) == Memory(weights=1000)
    assert device_memory("actor_infer", 1000, 4, ParallelConfig(tp=2), 2) == Memory(weights=1000)
    assert device_memory("reference", 1000, 4, plain, 4) == Memory(weights=1000)
    every_axis = ParallelConfig(tp=2, cp=2, ep=4)
    assert device_memory("actor_train", 1000, 4, every_axis, 2) == device_memory("actor_train", 1000, 4, plain, 2)
    two_copies = ParallelConfig(tp=2, shard=1)
    assert device_memory("actor_train", 1000, 4, two_copies, 2) == Memory(weights=2000, gradients=2000, optimizer=4000)


def test_a_copy_that_cannot_fit_on_the_ranks_that_share_it_is_refused() -> None:
    config = rl_config(parallel={"actor_train": {"shard": 1}})
    with pytest.raises(PlanError, match=r"`parallel\.actor_train\.shard` out, or let 2 GPUs or more share a copy"):
        make_plan(config, parse_pool("1x4x80GiB"), RL_ROLES, num_parameters=7_615_616_512)


def test_number_types() -> None:
    assert (compute_bytes("auto", "gpu"), compute_bytes("auto", "cpu")) == (2, 4)
    assert (compute_bytes("bfloat16", "cpu"), compute_bytes("float32", "gpu")) == (2, 4)


def test_a_trainer_that_cannot_fit_is_refused_with_numbers() -> None:
    seven_billion = 7_615_616_512
    with pytest.raises(PlanError) as caught:
        make_plan(rl_config(), parse_pool("1x1x80GiB"), RL_ROLES, num_parameters=seven_billion)
    for fragment in (
        "`devices.actor_train`",
        "7.62 billion",
        "113.5 GiB",
        "optimizer 56.7",
        "80 GiB",
        "2 such GPUs or more",
        "`trainer.lora`",
    ):
        assert fragment in str(caught.value)
    assert make_plan(rl_config(), parse_pool("1x2x80GiB"), RL_ROLES, num_parameters=seven_billion).num_parameters == seven_billion


def test_an_engine_that_cannot_fit_is_refused_with_the_parallel_size_that_would() -> None:
    seventy_billion, pool = 70 * 10**9, parse_pool("8x8x80GiB")
    with pytest.raises(PlanError, match=r"`devices\.actor_infer`.*130\.4 GiB.*`parallel\.actor_infer\.tp` to 2 or more"):
        make_plan(rl_config(), pool, RL_ROLES, num_parameters=seventy_billion)
    halves = {"parallel": {"actor_infer": {"tp": 2}}}
    with pytest.raises(PlanError, match=r"its roles need at least 81\.5.*`engine\.offload: true` and `trainer\.offload: true`"):
        make_plan(rl_config(**halves), pool, RL_ROLES, num_parameters=seventy_billion)
    plan = make_plan(rl_config(**halves, engine={"offload": True}), pool, RL_ROLES, num_parameters=seventy_billion)
    assert plan.memory["actor_infer"].total == seventy_billion


def test_only_used_gpus_of_known_memory_are_checked() -> None:
    huge = 10**13
    assert make_plan(rl_config(), parse_pool("1x2xcpu"), RL_ROLES, num_parameters=huge).memory["actor_train"].total == 16 * huge
    ten_billion = 10**10
    small_and_large = parse_pool("1x1x8GiB:small,1x4x80GiB:large")
    with pytest.raises(PlanError, match=r"`devices\.actor_infer`.*node0's have 8 GiB"):
        make_plan(rl_config(), small_and_large, RL_ROLES, num_parameters=ten_billion)
    make_plan(rl_config({"actor_infer": {"where": {"gpu": "large"}}}), small_and_large, RL_ROLES, num_parameters=ten_billion)


def test_a_gpu_that_somebody_else_uses_is_refused_with_what_is_free() -> None:
    busy = Pool((Node("local", 2, "gpu", 80.0, free_gib=(79.0, 12.5)),))
    seven_billion = 7_615_616_512
    with pytest.raises(PlanError, match=r"need at least 56\.7 GiB.*GPU 1 of local has 12\.5 GiB free of its 80.*nvidia-smi"):
        make_plan(rl_config(), busy, RL_ROLES, num_parameters=seven_billion)
    one_billion = make_plan(rl_config({role: [0] for role in ("actor_train", "actor_infer")}), busy, RL_ROLES, num_parameters=10**9)
    assert one_billion.devices("actor_train")[0].local == 0


class OfAPackage(EngineConfig):
    memory_share: float = 0.85
    cache_tokens: int | None = None


class WithPackage(PlainRl):
    engine: OfAPackage = OfAPackage()


def test_an_engine_that_takes_its_share_beside_a_trainer_that_stays() -> None:
    """Other packages take most of a GPU by themselves, whatever the model."""
    pool, fields = parse_pool("1x1x80GiB"), rl_config().model_dump(exclude={"engine", "trainer", "env", "rewards", "algo"})

    def plan(**engine: Any) -> None:
        make_plan(WithPackage(**fields, engine=OfAPackage(**engine)), pool, RL_ROLES, num_parameters=1_500_000_000)

    with pytest.raises(PlanError, match=r"its roles need at least .*`engine\.memory_share`, `engine\.cache_tokens`"):
        plan()
    for engine in ({"offload": True, "memory_share": 0.7}, {"memory_share": 0.4}, {"cache_tokens": 100_000}):
        plan(**engine)
