from __future__ import annotations

import json
from typing import Any

import pytest
from plan_configs import RL_ROLES, rl_config
from pydantic import ValidationError

from drumroll.errors import PlanError
from drumroll.plan import Node, Plan, Pool, make_plan, parse_pool


def indices(plan: Plan, role: Any) -> list[int]:
    return [device.index for device in plan.devices(role)]


def test_auto_colocates_on_every_gpu() -> None:
    plan = make_plan(rl_config(rollout={"num_env_workers": 3}), parse_pool("2x2x80GiB"), [*RL_ROLES, "reference"])
    assert plan.roles == ("actor_train", "actor_infer", "reference", "environment")
    assert indices(plan, "actor_train") == indices(plan, "actor_infer") == indices(plan, "reference") == [0, 1, 2, 3]
    assert [(w.rank, w.node, w.devices) for w in plan.workers("environment")] == [(0, "node0", ()), (1, "node0", ()), (2, "node1", ())]
    assert plan.conflicts("actor_train") == {"actor_infer": (0, 1, 2, 3), "reference": (0, 1, 2, 3)}
    assert plan.relation("actor_train", "actor_infer") == "colocated"
    for uses in plan.stage_table().values():
        assert uses == {
            "rollout": ("actor_infer",),
            "score": ("actor_train", "reference"),
            "update": ("actor_train",),
            "sync": ("actor_train", "actor_infer"),
        }


def test_auto_trains_on_one_kind_and_infers_on_all() -> None:
    plan = make_plan(rl_config(), parse_pool("2x2x48GiB:L40S,1x4x80GiB:H100,1x8xcpu"), RL_ROLES)
    assert {w.node for w in plan.workers("actor_train")} == {"node2"}
    assert indices(plan, "actor_infer") == list(range(8))
    assert plan.relation("actor_train", "actor_infer") == "overlapping"


def test_auto_takes_few_cpu_slots_unless_asked() -> None:
    pool = parse_pool("1x16xcpu")
    assert len(make_plan(rl_config(), pool, RL_ROLES).workers("actor_infer")) == 4
    asked = make_plan(rl_config(ray={"cpu_slots": 16}), pool, [*RL_ROLES, "reference"])
    assert len(asked.workers("actor_infer")) == 16
    assert indices(asked, "actor_train") == indices(asked, "reference") == [0]


def test_sft_has_one_role_and_one_stage() -> None:
    plan = make_plan(rl_config(), parse_pool("1x2x80GiB"), ["actor_train"])
    assert plan.roles == ("actor_train",)
    assert plan.stages == ("update",)
    assert plan.workers("actor_infer") == ()


def test_auto_leaves_over_what_is_too_few_for_an_instance() -> None:
    config = rl_config(parallel={"actor_infer": {"tp": 4}})
    plan = make_plan(config, parse_pool("2x6x80GiB,1x2x80GiB"), RL_ROLES)
    assert [[d.index for d in w.devices] for w in plan.workers("actor_infer")] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert len(plan.workers("actor_train")) == 14


@pytest.mark.parametrize(
    ("devices", "train", "infer", "relation"),
    [
        ({"actor_train": "0-3", "actor_infer": "0-3"}, [0, 1, 2, 3], [0, 1, 2, 3], "colocated"),
        ({"actor_train": 0, "actor_infer": 1}, [0], [1], "disjoint"),
        ({"actor_train": "0-3", "actor_infer": "0-7"}, [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], "overlapping"),
        ({"actor_train": "0, 2, 5-7", "actor_infer": [3, 1]}, [0, 2, 5, 6, 7], [3, 1], "disjoint"),
        ({"actor_train": {"take": 2}, "actor_infer": "all"}, [0, 1], [0, 1, 2, 3, 4, 5, 6, 7], "overlapping"),
        ({"actor_train": {"take": "2"}}, [2], [0, 1, 2, 3, 4, 5, 6, 7], "overlapping"),
    ],
)
def test_explicit_maps_are_obeyed(devices: Any, train: list[int], infer: list[int], relation: str) -> None:
    plan = make_plan(rl_config({**devices, "reward": "cpu"}), parse_pool("2x4xcpu"), RL_ROLES, num_parameters=10)
    # A role that the map does not name gets what `auto` would give it: on this pool, all eight slots.
    assert (indices(plan, "actor_train"), indices(plan, "actor_infer")) == (train, infer)
    assert plan.relation("actor_train", "actor_infer") == plan.relation("actor_infer", "actor_train") == relation
    assert "reward" not in plan.roles


def test_partly_overlapping_conflicts() -> None:
    config = rl_config({"actor_train": "0-3", "actor_infer": "2-5"}, parallel={"actor_infer": {"tp": 2}})
    plan = make_plan(config, parse_pool("1x8x80GiB"), RL_ROLES)
    assert plan.conflicts("actor_train") == {"actor_infer": (0,)}
    assert plan.conflicts("actor_infer") == {"actor_train": (2, 3)}
    assert plan.shares_devices("actor_infer", 0, "actor_train") == (2, 3)
    assert plan.shares_devices("actor_infer", 1, "actor_train") == ()
    assert plan.shares_devices("actor_train", 3, "actor_infer") == (0,)
    table = {device.index: uses for device, uses in plan.stage_table().items()}
    assert table[0] == {"rollout": (), "score": ("actor_train",), "update": ("actor_train",), "sync": ("actor_train",)}
    assert table[5] == {"rollout": ("actor_infer",), "score": (), "update": (), "sync": ("actor_infer",)}


def test_selectors_count_over_the_matching_nodes() -> None:
    devices = {
        "actor_train": {"where": {"gpu": "H100"}},
        "actor_infer": {"where": {"gpu": "l40s"}, "take": "1-2"},
        "environment": {"where": {"kind": "cpu"}},
    }
    config = rl_config(devices, rollout={"num_env_workers": 2}, reward_workers=2)
    plan = make_plan(config, parse_pool("1x2x80GiB:H100,2x2x48GiB:L40S,1x4xcpu"), [*RL_ROLES, "reference", "reward"])
    assert indices(plan, "actor_train") == indices(plan, "reference") == [0, 1]
    assert [(d.index, d.node, d.local) for d in plan.devices("actor_infer")] == [(3, "node1", 1), (4, "node2", 0)]
    assert {w.node for w in plan.workers("environment")} == {"node3"}
    assert [w.node for w in plan.workers("reward")] == ["node0", "node1"]


def test_cpu_for_a_role_that_computes() -> None:
    on_gpus = make_plan(rl_config({"actor_train": "cpu"}), parse_pool("2x2x80GiB"), [*RL_ROLES, "reference"])
    for role in ("actor_train", "reference"):
        assert [(w.node, w.devices, w.kind) for w in on_gpus.workers(role)] == [("node0", (), "cpu")]
    assert on_gpus.relation("actor_train", "actor_infer") == "disjoint"
    assert on_gpus.conflicts("actor_train") == {}

    on_slots = make_plan(rl_config({"actor_train": "cpu"}), parse_pool("1x2xcpu"), RL_ROLES)
    assert indices(on_slots, "actor_train") == [0, 1]

    mixed = make_plan(rl_config({"reference": "cpu"}), parse_pool("1x2x80GiB,1x3xcpu"), [*RL_ROLES, "reference"])
    assert indices(mixed, "actor_train") == [0, 1]
    assert indices(mixed, "reference") == [2, 3, 4]

    host = make_plan(rl_config({"reference": {"where": {"kind": "gpu"}, "take": "cpu"}}), parse_pool("1x2xcpu,1x2x80GiB"), ["reference"])
    assert [(w.node, w.devices) for w in host.workers("reference")] == [("node1", ())]


def test_a_trainer_has_one_rank_per_device_and_an_engine_one_per_instance() -> None:
    config = rl_config(parallel={"actor_train": {"tp": 2}, "actor_infer": {"tp": 4}})
    plan = make_plan(config, parse_pool("2x4x80GiB"), RL_ROLES)
    assert [len(w.devices) for w in plan.workers("actor_train")] == [1] * 8
    assert [len(w.devices) for w in plan.workers("actor_infer")] == [4, 4]
    assert {role: plan.layout(role).tp for role in plan.roles} == {"actor_train": 2, "actor_infer": 4, "environment": 1}
    assert plan.num_shards("actor_train") == 4


def test_what_is_left_over_by_the_parallel_sizes_is_not_used_unasked() -> None:
    config = rl_config(parallel={"actor_train": {"tp": 2, "cp": 2, "shard": 3}})
    plan = make_plan(config, parse_pool("4x4x80GiB"), RL_ROLES)
    assert (len(plan.workers("actor_train")), plan.num_shards("actor_train")) == (12, 3)
    config = rl_config(parallel={"actor_train": {"cp": 2, "ep": 4}})
    assert len(make_plan(config, parse_pool("1x4xcpu"), RL_ROLES).workers("actor_train")) == 4


def test_to_dict_is_json() -> None:
    plan = make_plan(rl_config(), parse_pool("1x2x80GiB"), RL_ROLES, num_parameters=10**9)
    loaded = json.loads(json.dumps(plan.to_dict()))
    assert loaded["roles"]["actor_infer"]["workers"][1]["devices"] == [{"index": 1, "local": 1}]
    memory = loaded["roles"]["actor_train"]["memory_bytes"]
    assert {name: value for name, value in memory.items() if value} == {
        "weights": 2 * 10**9,
        "gradients": 2 * 10**9,
        "optimizer": 4 * 10**9,
    }
    assert loaded["relations"] == [{"roles": ["actor_train", "actor_infer"], "relation": "colocated"}]


MIXED = "1x2x80GiB:H100,1x2x48GiB:L40S"


@pytest.mark.parametrize(
    ("devices", "pool", "fragments"),
    [
        ({"actor_infer": "0-9"}, "1x8x80GiB", ["`devices.actor_infer`", "'0-9'", "device 9", "8 GPUs (0-7)", "ray.address"]),
        ({"actor_train": "0-7"}, "1x2xcpu", ["`devices.actor_train`", "(0-1)", "`drumroll plan … --pool 1x8x80GiB` plans for a pool that"]),
        ({"actor_infer": [0, -1]}, "1x2xcpu", ["`devices.actor_infer`", "[0, -1]", "device -1", "2 CPU slots (0-1)", "ray.cpu_slots"]),
        ({"actor_train": 2}, "1x2xcpu", ["`devices.actor_train`", "device 2"]),
        ({"actor_train": 0, "critic": "0-99"}, "1x2xcpu", ["`devices.critic`", "device 99"]),
        ({"actor_infer": "5-2"}, "1x8x80GiB", ["`devices.actor_infer`", "5-2 is empty", "Write 2-5"]),
        ({"actor_infer": []}, "1x8x80GiB", ["`devices.actor_infer`", "names no device", "`0,2,5-7`"]),
        ({"actor_infer": ""}, "1x8x80GiB", ["`devices.actor_infer`", "cannot read ''"]),
        ({"actor_infer": "0..3"}, "1x8x80GiB", ["`devices.actor_infer`", "cannot read '0..3'", "`0-3`"]),
        ({"actor_infer": "gpu"}, "1x8x80GiB", ["`devices.actor_infer`", "cannot read 'gpu'"]),
        ({"actor_infer": "0-3,2"}, "1x8x80GiB", ["`devices.actor_infer`", "device 2 more than once"]),
        ({"actor_infer": {"take": 9}}, "1x8x80GiB", ["`devices.actor_infer`", "takes 9", "1 to 8"]),
        ({"actor_infer": {"take": 0}}, "1x8x80GiB", ["`devices.actor_infer`", "takes 0"]),
        ({"actor_infer": {"where": {"gpu": "L40"}}}, MIXED, ["`devices.actor_infer`", "gpu: L40.", "Did you mean 'L40S'?", "H100, L40S"]),
        ({"actor_infer": {"where": {"gpus": "L40S"}}}, MIXED, ["label 'gpus'", "Did you mean 'gpu'?", "gpu, kind, node"]),
        ({"actor_infer": {"where": {"gpu": "L40S", "node": "node0"}}}, MIXED, ["no single node", "gpu: L40S, node: node0"]),
        ({"actor_infer": {"where": {"gpu": "L40S"}, "take": "2"}}, MIXED, ["device 2", "2 GPUs that match {gpu: L40S} (0-1)"]),
        ({"environment": "0-1"}, "1x8x80GiB", ["`devices.environment`", "'0-1'", "host processors", "Write `cpu`"]),
    ],
)
def test_requests_that_cannot_be_met(devices: Any, pool: str, fragments: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(rl_config(devices), parse_pool(pool), RL_ROLES)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "parallel", "fragments"),
    [
        ({"actor_infer": "0-2"}, {"actor_infer": 2}, ["`devices.actor_infer` has 3", "`parallel.actor_infer.tp` = 2", "2 or 4 devices"]),
        ({"actor_infer": 0}, {"actor_infer": 2}, ["has 1 devices", "Give it 2 devices"]),
        ({"actor_infer": "2-5"}, {"actor_infer": 4}, ["span nodes", "2 on node0, 3 on node0, 4 on node1, 5 on node1", "smaller"]),
        ("auto", {"actor_train": 8}, ["`parallel.actor_train.tp` is 8", "at most 4 devices on a node"]),
        ("auto", {"environment": 2}, ["`parallel.environment.tp` is 2", "host processors"]),
        ({"actor_train": "cpu"}, {"actor_train": 2}, ["`parallel.actor_train.tp` is 2", "host processors"]),
        (
            {"actor_train": "0-2"},
            {"actor_train": {"cp": 2}},
            ["`devices.actor_train` has 3 devices: `parallel.actor_train.tp` × `cp` = 2 does not divide them", "Give it 2 or 4 devices"],
        ),
        (
            {"actor_train": "0-3"},
            {"actor_train": {"cp": 2, "shard": 3}},
            ["`parallel.actor_train.shard` = 3 does not divide the 2 that get different trajectories", "Give it 6 or 12 devices"],
        ),
        (
            {"actor_train": "0-3"},
            {"actor_train": {"shard": 2, "ep": 4}},
            ["`parallel.actor_train.ep` = 4 does not divide the 2 that share one copy", "Change `parallel.actor_train`"],
        ),
        ("auto", {"actor_train": {"tp": 4, "cp": 4}}, ["`devices.actor_train` has 8 devices: `parallel.actor_train.tp` × `cp` = 16"]),
        ("auto", {"environment": {"cp": 2}}, ["`parallel.environment.cp` is 2", "host processors"]),
    ],
)
def test_parallel_sizes_that_do_not_fit(devices: Any, parallel: dict[str, Any], fragments: list[str]) -> None:
    config = rl_config(devices, parallel={role: {"tp": each} if isinstance(each, int) else each for role, each in parallel.items()})
    with pytest.raises(PlanError) as caught:
        make_plan(config, parse_pool("2x4x80GiB"), RL_ROLES)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no role named 'actor_trian'\. Did you mean 'actor_train'"):
        make_plan(rl_config(), parse_pool("1x2xcpu"), ["actor_trian"])  # type: ignore[list-item]
    with pytest.raises(ValidationError):
        rl_config({"actor_trian": 0})


def test_nodes_without_devices_still_host_environments() -> None:
    pool = Pool((Node("head", 0, "cpu"), Node("worker", 2, "gpu", 80.0)))
    plan = make_plan(rl_config(rollout={"num_env_workers": 2}), pool, RL_ROLES)
    assert [w.node for w in plan.workers("environment")] == ["head", "worker"]
    with pytest.raises(PlanError, match=r"`devices\.actor_train`: the matching nodes have no devices"):
        make_plan(rl_config({"actor_train": {"where": {"node": "head"}}}), pool, RL_ROLES)


@pytest.mark.parametrize(
    ("pool", "trainers", "engines"),
    [("1x4x80GiB", (0, 1), (2, 3)), ("1x3x80GiB", (0,), (1, 2)), ("1x1x80GiB", (0,), (0,))],
)
def test_asynchronous_training_keeps_trainers_and_engines_apart(pool: str, trainers: tuple[int, ...], engines: tuple[int, ...]) -> None:
    config = rl_config(rollout={"max_staleness": 1}, algo={"correction": "truncated_is"})
    plan = make_plan(config, parse_pool(pool), RL_ROLES)
    assert tuple(device.index for device in plan.devices("actor_train")) == trainers
    assert tuple(device.index for device in plan.devices("actor_infer")) == engines


def test_reward_workers_stand_on_hosts_unless_they_serve_a_model() -> None:
    roles = [*RL_ROLES, "reward"]
    pool = parse_pool("2x4x80GiB")
    pooled = make_plan(rl_config(rewards=[{"kind": "exact_match", "pooled": True}], reward_workers=3), pool, roles)
    assert [(worker.node, worker.devices) for worker in pooled.workers("reward")] == [("node0", ()), ("node0", ()), ("node1", ())]
    serving = rl_config(rewards=[{"kind": "reward_model"}])
    assert make_plan(serving, pool, roles).devices("reward") == make_plan(serving, pool, roles).devices("actor_train")
    apart = make_plan(rl_config({"reward": "6-7"}, rewards=[{"kind": "reward_model"}]), pool, roles)
    assert [device.index for device in apart.devices("reward")] == [6, 7]
