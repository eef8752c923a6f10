"""The arbiter: never two roles on one device, and nobody moves who need not."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.cluster.residency import Arbiter, Ranks
from drumroll.config.models import Role
from drumroll.plan import Device, Placement, Plan

ROLES: tuple[Role, ...] = ("actor_train", "actor_infer", "reference", "critic")


def plan(**devices: list[list[int]]) -> Plan:
    """Role → for each rank its devices."""
    return Plan(
        {
            role: tuple(  # type: ignore[misc]
                Placement(role, rank, "n", tuple(Device(index, "n", index, "cpu") for index in own), "cpu")  # type: ignore[arg-type]
                for rank, own in enumerate(ranks)
            )
            for role, ranks in devices.items()
        }
    )


class Devices:
    """Plays the workers: records moves and checks that nobody enters a device that is taken."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tenants: dict[int, tuple[str, int]] = {}
        self.moves: list[tuple[str, str, Ranks]] = []

    def register(self, arbiter: Arbiter, role: Role, background: bool = False) -> None:
        arbiter.register(role, give_up=partial(self.leave, role), take=partial(self.enter, role), background=background)

    def enter(self, role: Role, ranks: Ranks) -> None:
        self.moves.append(("take", role, ranks))
        for rank in ranks:
            for device in self.plan.workers(role)[rank].devices:
                assert device.index not in self.tenants, f"{role} enters device {device.index} of {self.tenants[device.index]}"
                self.tenants[device.index] = (role, rank)

    def leave(self, role: Role, ranks: Ranks) -> None:
        self.moves.append(("give up", role, ranks))
        for rank in ranks:
            for device in self.plan.workers(role)[rank].devices:
                assert self.tenants.pop(device.index) == (role, rank)


def test_only_conflicting_ranks_are_moved() -> None:
    placed = plan(actor_train=[[0], [1]], actor_infer=[[0], [1], [2], [3]])
    arbiter, devices = Arbiter(placed), Devices(placed)
    devices.register(arbiter, "actor_infer", background=True)
    devices.register(arbiter, "actor_train")
    with arbiter.grant("actor_train"):
        assert arbiter.residents("actor_train") == (0, 1)
        assert arbiter.residents("actor_infer") == (2, 3)
    assert arbiter.residents("actor_infer") == (0, 1, 2, 3)
    assert devices.moves == [
        ("take", "actor_infer", (0, 1, 2, 3)),
        ("give up", "actor_infer", (0, 1)),
        ("take", "actor_train", (0, 1)),
        ("give up", "actor_train", (0, 1)),
        ("take", "actor_infer", (0, 1)),
    ]


def test_a_role_stays_until_another_needs_the_device() -> None:
    placed = plan(actor_train=[[0]], reference=[[0]])
    arbiter, devices = Arbiter(placed), Devices(placed)
    devices.register(arbiter, "actor_train")
    devices.register(arbiter, "reference")
    for _ in range(2):
        with arbiter.grant("actor_train"):
            pass
    with arbiter.grant("reference"):
        pass
    assert devices.moves == [("take", "actor_train", (0,)), ("give up", "actor_train", (0,)), ("take", "reference", (0,))]


def test_inner_grant_borrows_from_the_outer_one() -> None:
    placed = plan(actor_train=[[0], [1]], reference=[[1]])
    arbiter = Arbiter(placed)
    with arbiter.grant("actor_train"), arbiter.grant("actor_train"):
        with arbiter.grant("reference"):
            assert arbiter.residents("actor_train") == (0,)
            assert arbiter.residents("reference") == (0,)
        assert arbiter.residents("actor_train") == (0, 1)


def test_disjoint_roles_and_hosts_move_nobody() -> None:
    placed = plan(actor_train=[[0]], actor_infer=[[1]], reward=[[]])
    arbiter, devices = Arbiter(placed), Devices(placed)
    devices.register(arbiter, "actor_infer", background=True)
    with arbiter.grant("actor_train"), arbiter.grant("reward"):
        assert arbiter.residents("actor_infer") == (0,)
    assert devices.moves == [("take", "actor_infer", (0,))]


def test_registration_inside_a_grant_finds_the_workers_in_place() -> None:
    placed = plan(actor_train=[[0]], actor_infer=[[0]])
    arbiter, devices = Arbiter(placed), Devices(placed)
    with arbiter.grant("actor_train"):
        devices.register(arbiter, "actor_train")
        devices.enter("actor_train", (0,))  # the launch put it there
    with arbiter.grant("actor_infer"):
        assert arbiter.residents("actor_train") == ()
    assert devices.moves == [("take", "actor_train", (0,)), ("give up", "actor_train", (0,))]


def test_two_background_roles_cannot_share() -> None:
    arbiter = Arbiter(plan(actor_infer=[[0]], environment=[[0]]))
    arbiter.register("actor_infer", background=True)
    with pytest.raises(ValueError, match="environment and actor_infer share devices"):
        arbiter.register("environment", background=True)


def test_a_failing_callback_fails_the_grant_and_undoes_the_rest() -> None:
    placed = plan(actor_train=[[0, 1]], actor_infer=[[0]], critic=[[1]])
    arbiter = Arbiter(placed)
    calls: list[str] = []

    def refuse(ranks: Ranks) -> None:
        raise RuntimeError("busy")

    arbiter.register("actor_infer", give_up=lambda _: calls.append("pause"), take=lambda _: calls.append("resume"), background=True)
    with arbiter.grant("critic"):
        arbiter.register("critic", give_up=refuse)
    with pytest.raises(RuntimeError, match="busy"), arbiter.grant("actor_train"):
        pytest.fail("the grant was refused")
    assert calls == ["resume", "pause", "resume"]
    assert arbiter.residents("actor_train") == ()
    with arbiter.grant("critic"):
        pass


def test_another_thread_waits_for_its_turn() -> None:
    placed = plan(actor_train=[[0]], reference=[[0]], critic=[[1]])
    arbiter = Arbiter(placed)
    order: list[str] = []

    def other() -> None:
        with arbiter.grant("critic"):
            order.append("critic")
        with arbiter.grant("reference"):
            order.append("reference")

    with arbiter.grant("actor_train"):
        thread = threading.Thread(target=other)
        thread.start()
        while not order:
            time.sleep(0.001)
        time.sleep(0.02)
        order.append("trained")
    thread.join(5)
    assert order == ["critic", "trained", "reference"]


def test_waiting_ends_with_an_error_that_names_the_holder() -> None:
    arbiter = Arbiter(plan(actor_train=[[0]], reference=[[0]]))
    with arbiter.grant("actor_train"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: arbiter.grant("reference", deadline_s=0.01).__enter__())
        with pytest.raises(TimeoutError, match="reference: its devices are still granted to actor_train"):
            waiting.result()


def test_coroutine_callbacks_run_on_their_loop() -> None:
    placed = plan(actor_train=[[0]], actor_infer=[[0]])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    names: list[str] = []

    async def note(ranks: Ranks) -> None:
        await asyncio.sleep(0)
        names.append(threading.current_thread().name)

    arbiter = Arbiter(placed)
    arbiter.register("actor_infer", give_up=note, take=note, background=True, loop=loop)
    with arbiter.grant("actor_train"):
        pass
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert names == [thread.name] * 3


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A role's ranks have devices of their own; roles overlap as they like."""
    chosen: dict[str, list[list[int]]] = {}
    for role in ROLES:
        order = draw(st.permutations(range(5)))
        sizes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        ranks, start = [], 0
        for size in sizes:
            ranks.append(list(order[start : start + size]))
            start += size
        chosen[role] = ranks
    return plan(**chosen)


@given(plans(), st.lists(st.one_of(st.sampled_from(ROLES), st.none()), max_size=12))
def test_no_device_ever_has_two_roles(placed: Plan, script: list[Role | None]) -> None:
    """A role enters a nested grant, None leaves the innermost one. `Devices` checks every move."""
    arbiter, devices = Arbiter(placed), Devices(placed)
    for role in ROLES:
        devices.register(arbiter, role, background=role == "actor_infer")
    grants: list[tuple[Role, ExitStack]] = []
    for role in script:
        if role is not None:
            stack = ExitStack()
            stack.enter_context(arbiter.grant(role))
            grants.append((role, stack))
        elif grants:
            grants.pop()[1].close()
        if grants:
            top = grants[-1][0]
            assert arbiter.residents(top) == tuple(range(len(placed.workers(top))))
        granted = {device.index for name, _ in grants for device in placed.devices(name)}
        free = [worker.rank for worker in placed.workers("actor_infer") if not granted & {device.index for device in worker.devices}]
        assert set(free) <= set(arbiter.residents("actor_infer"))
    while grants:
        grants.pop()[1].close()
    assert arbiter.residents("actor_infer") == tuple(range(len(placed.workers("actor_infer"))))
