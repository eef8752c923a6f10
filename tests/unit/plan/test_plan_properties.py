"""What holds of every plan, whatever the pool and the map."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_configs import rl_config

from drumroll.plan import Node, Plan, Pool, make_plan
from drumroll.plan.placement import ROLES

COMPUTING = ("actor_train", "actor_infer", "reference", "critic")


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    def node(number: int) -> Node:
        kind = draw(st.sampled_from(["gpu", "cpu"]))
        labels = draw(st.sampled_from([{}, {kind: "A"}, {kind: "B"}]))
        return Node(f"n{number}", draw(st.integers(1, 9)), kind, draw(st.sampled_from([None, 48.0, 80.0])), labels)  # type: ignore[arg-type]

    return Pool(tuple(node(number) for number in range(draw(st.integers(1, 6)))))


def check(plan: Plan, pool: Pool) -> None:
    for role in plan.roles:
        workers = plan.workers(role)
        assert [worker.rank for worker in workers] == list(range(len(workers)))
        assert workers
        devices = plan.devices(role)
        assert len(set(devices)) == len(devices)
        for worker in workers:
            assert worker.role == role
            assert worker.node in pool.by_id
            for device in worker.devices:
                assert pool.devices[device.index] == device
                assert device.local < pool.by_id[device.node].num_devices
                assert (device.node, device.kind) == (worker.node, worker.kind)
    for role, other in combinations(plan.roles, 2):
        ranks, others = plan.conflicts(other).get(role, ()), plan.conflicts(role).get(other, ())
        assert ranks == tuple(w.rank for w in plan.workers(role) if plan.shares_devices(role, w.rank, other))
        assert bool(ranks) == bool(others) == (plan.relation(role, other) != "disjoint")
        for rank in ranks:
            assert all(rank in plan.shares_devices(other, mate, role) for mate in plan.shares_devices(role, rank, other))


@settings(max_examples=60, deadline=None)
@given(pool=pools(), roles=st.sets(st.sampled_from(ROLES), min_size=1), num_env_workers=st.integers(1, 7), data=st.data())
def test_auto_is_always_valid(pool: Pool, roles: set[str], num_env_workers: int, data: st.DataObject) -> None:
    most = max(len([d for d in pool.candidates({}) if d.node == node.id][:4]) for node in pool.nodes)
    tp = data.draw(st.integers(1, most))
    config = rl_config(
        parallel={"actor_train": {"tp": tp}, "actor_infer": {"tp": tp}},
        rollout={"num_env_workers": num_env_workers},
        reward_workers=num_env_workers,
    )
    plan = make_plan(config, pool, roles)  # type: ignore[arg-type]
    check(plan, pool)
    assert set(plan.roles) == roles
    for role in roles & {"environment", "reward"}:
        load = [sum(w.node == node.id for w in plan.workers(role)) for node in pool.nodes]  # type: ignore[arg-type]
        assert sum(load) == num_env_workers
        assert max(load) - min(load) <= 1


@settings(max_examples=60, deadline=None)
@given(pool=pools(), data=st.data())
def test_explicit_maps_are_obeyed_exactly(pool: Pool, data: st.DataObject) -> None:
    candidates = pool.candidates({})
    wanted = {role: data.draw(st.lists(st.integers(0, len(candidates) - 1), min_size=1, unique=True), label=role) for role in COMPUTING}
    spelling = data.draw(st.sampled_from([list, lambda numbers: ",".join(map(str, numbers))]))
    plan = make_plan(rl_config({role: spelling(numbers) for role, numbers in wanted.items()}), pool, [*COMPUTING, "environment"])  # type: ignore[list-item]
    check(plan, pool)
    for role, numbers in wanted.items():
        assert [device.index for device in plan.devices(role)] == [candidates[number].index for number in numbers]  # type: ignore[arg-type]
        assert len(plan.workers(role)) == len(numbers)  # type: ignore[arg-type]
    for device, uses in plan.stage_table().items():
        tenants = {role for role, numbers in wanted.items() if device in {candidates[number] for number in numbers}}
        assert set().union(*uses.values()) == tenants
