from __future__ import annotations

import io
import re

from plan_configs import RL_ROLES, rl_config
from rich.console import Console

from drumroll.plan import Pool, make_plan, parse_pool
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
        ["0-31", "actor_infer", "actor_train", "actor_train"],
        ["32-39", "actor_infer", "idle", "idle"],
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
