from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from plan_configs import RL_ROLES, rl_config
from rich.console import Console

from drumroll.errors import PlanError
from drumroll.plan import Node, Pool, make_plan, parse_pool
from drumroll.plan.placement import Plan
from drumroll.plan.render import ranges, render


def printed(plan: Plan, pool: Pool, width: int = 200) -> list[list[str]]:
    """The lines, each as its cells: what stands at least two blanks apart."""
    console = Console(file=io.StringIO(), width=width)
    console.print(render(plan, pool))
    return [re.split(r"\s{2,}", line.strip()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([3, 1]) == "3,1"
    assert ranges([]) == ""


def test_a_large_cluster_prints_in_a_few_lines() -> None:
    pool = parse_pool("4x8x80GiB:H100,2x4x48GiB:L40S")
    config = rl_config(parallel={"actor_infer": {"tp": 2}}, rollout={"num_env_workers": 6})
    lines = printed(make_plan(config, pool, RL_ROLES, num_parameters=7_615_616_512), pool)
    assert lines[0] == ["Pool: 4 nodes × 8 GPUs of 80 GiB (H100), 2 nodes × 4 GPUs of 48 GiB (L40S) · 7,615.62 M parameters"]
    large, small = "node0 … node3 (4) H100", "node4 … node5 (2) L40S"
    for row in (
        ["actor_train", "0-31", large, "0-31 (gpu)", "dp 32", "≥ 3.5 GiB of 80 GiB", "actor_infer *"],
        ["actor_infer", "0-15", large, "0-31 (gpu)", "dp 20 × tp 2", "≥ 7.1 GiB of 80 GiB", "actor_train *"],
        ["16-19", small, "32-39 (gpu)", "≥ 7.1 GiB of 48 GiB"],
        ["environment", "0-5", "node0 … node5 (6)", "host", "6 workers", "–", "–"],
        ["0-31", "actor_infer", "actor_train", "actor_train", "actor_train, actor_infer"],
        ["32-39", "actor_infer", "idle", "idle", "actor_infer"],
        ["On host processors: environment"],
    ):
        assert row in lines


def test_a_layout_names_its_axes() -> None:
    pool = parse_pool("2x8x80GiB")
    config = rl_config(parallel={"actor_train": {"tp": 2, "cp": 2, "shard": 2, "ep": 4}})
    lines = printed(make_plan(config, pool, RL_ROLES, num_parameters=2**30), pool)
    assert any("dp 4 (2 copies) × cp 2 × tp 2, ep 4" in cell for line in lines for cell in line)
    assert any("≥ 2.0 GiB of 80 GiB" in cell for line in lines for cell in line)


def test_a_laptop_in_a_narrow_terminal() -> None:
    pool = parse_pool("1x2xcpu")
    lines = printed(make_plan(rl_config(), pool, RL_ROLES, num_parameters=2**20), pool, width=80)
    assert ["actor_train", "0", "node0", "0 (cpu)", "dp 1", "≥ 16.0 MiB", "actor_infer *"] in lines
    assert ["environment", "0", "node0", "host", "1 worker", "–", "–"] in lines


QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def test_memory_by_role_and_stage(tmp_path: Path) -> None:
    """Seven billion parameters on one H200: everything moves to the host when it is not its turn."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    config = rl_config(
        model={"path": str(tmp_path), "dtype": "bfloat16"},
        trainer={"offload": True, "gradient_checkpointing": True, "micro_batch_tokens": 8192},
        engine={"offload": True, "num_slots": 256},
    )
    pool = parse_pool("1x1x139.8GiB")
    plan = make_plan(config, pool, (*RL_ROLES, "reference"))
    use = plan.stage_memory
    p = 7_615_616_512
    assert (use["actor_train"]["rollout"].total, use["actor_train"]["rollout"].host) == (0, 12 * p)
    assert (use["reference"]["update"].total, use["reference"]["update"].host) == (0, 2 * p)
    assert use["actor_infer"]["sync"].cache == 0 < use["actor_infer"]["rollout"].cache
    assert plan.device_memory(0, "update") == use["actor_train"]["update"].total < 139.8 * 2**30
    assert plan.device_memory(0, "sync") == use["actor_train"]["sync"].total + use["actor_infer"]["sync"].total
    lines = printed(plan, pool)
    assert ["Memory of each device, estimated, in GiB"] in lines
    trainer = next(line for line in lines if line[0] == "actor_train" and "host" in line[1])
    assert trainer[1] == f"host {12 * p / 2**30:.1f}"
    assert any(line[0] == "device 0" and line[-1] == "of 139.8" for line in lines)


def test_a_host_that_cannot_hold_what_waits_is_refused(tmp_path: Path) -> None:
    """Masters and moments of seven billion parameters are 85.1 GiB, the engine's weights 14.2."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    model = {"path": str(tmp_path), "dtype": "bfloat16"}
    config = rl_config(model=model, trainer={"offload": True, "gradient_checkpointing": True}, engine={"offload": True, "num_slots": 64})
    make_plan(config, Pool((Node("local", 1, "gpu", 139.8, host_gib=126.0),)), RL_ROLES)
    with pytest.raises(PlanError, match=r"96\.0 GiB of host memory.*at least 99\.3 \(actor_train 85\.1, actor_infer 14\.2 GiB\)"):
        make_plan(config, Pool((Node("local", 1, "gpu", 139.8, host_gib=96.0),)), RL_ROLES)


def test_who_does_not_leave_counts_while_others_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 2}))
    plan = make_plan(rl_config(model={"path": str(tmp_path), "dtype": "bfloat16"}), parse_pool("1x1x80GiB"), RL_ROLES)
    use = plan.stage_memory
    waits = use["actor_infer"]["update"]
    assert waits.cache == use["actor_infer"]["rollout"].cache
    assert waits.activations == 0
    assert plan.device_memory(0, "update") == use["actor_train"]["update"].total + waits.total
