"""Which role computes on which device. Pure logic: no ray, no torch.

A role wants its devices in the background (always) or while it is granted (`with arbiter.grant(role)`). Where several want
one device, the newest grant wins, then older grants, then the background. After every change the arbiter lets those go that
are in the way, and only then lets in those who come: at no time do two roles hold one device.

    arbiter.register("actor_infer", give_up=pause, take=resume, background=True)
    with arbiter.grant("actor_train"):     # engines on the trainers' devices are paused, the others go on
        trainers.all("train", ...)
                                           # the paused engines go on

A role that is no longer granted stays until somebody else needs the device, so that nothing moves back and forth in vain.
CPU slots obey the same rules. A worker without devices shares none and is never asked to leave.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from drumroll.config.models import Role
from drumroll.plan import Plan

Ranks = tuple[int, ...]
Callback = Callable[[Ranks], Awaitable[None] | None]
"""Told which ranks are to give up, or may take, their devices; returns when they have."""

Worker = tuple[Role, int]


@dataclass
class _Grant:
    role: Role
    thread: int


@dataclass
class _Tenant:
    give_up: Callback | None = None
    take: Callback | None = None
    background: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    resident: set[int] = field(default_factory=set)


class Arbiter:
    """Grants devices to roles, one role at a time on each device.

    A grant waits while another thread's grant holds one of its devices; a grant inside another one of the same thread takes
    the devices over until it ends. Safe to use from several threads, but not from the event loop that callbacks run on.
    """

    def __init__(self, plan: Plan, callback_deadline_s: float = 600.0) -> None:
        self._plan = plan
        self._callback_deadline_s = callback_deadline_s
        self._tenants: dict[Role, _Tenant] = {role: _Tenant() for role in plan.roles}
        self._grants: list[_Grant] = []
        self._changed = threading.Condition()

    def register(
        self,
        role: Role,
        *,
        give_up: Callback | None = None,
        take: Callback | None = None,
        background: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Say how a role's workers leave and enter their devices.

        Coroutine callbacks run on `loop`. A `background` role takes its devices at once, and again whenever no grant is in
        its way; two background roles must not share a device. A role that is registered inside its own grant is taken to be
        on its devices already, so `with arbiter.grant(role)` can surround the launch of its workers.
        """
        with self._changed:
            if background:
                rivals = [other for other in self._plan.conflicts(role) if self._tenants[other].background]
                if rivals:
                    raise ValueError(f"{role} and {rivals[0]} share devices and cannot both run in the background")
            tenant = self._tenants[role]
            tenant.give_up, tenant.take, tenant.background, tenant.loop = give_up, take, background, loop
            self._settle()

    @contextmanager
    def grant(self, role: Role, deadline_s: float = 3600.0) -> Iterator[None]:
        """The role has all its devices inside the block. Afterwards those who had to leave come back."""
        grant = _Grant(role, threading.get_ident())
        with self._changed:
            if not self._changed.wait_for(lambda: not self._blockers(grant), deadline_s):
                raise TimeoutError(f"{role}: its devices are still granted to {', '.join(self._blockers(grant))} after {deadline_s:g} s")
            self._grants.append(grant)
            try:
                self._settle()
            except BaseException:
                self._withdraw(grant)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._withdraw(grant)

    def residents(self, role: Role) -> Ranks:
        """Ranks of the role that hold their devices now."""
        with self._changed:
            return tuple(sorted(self._tenants[role].resident))

    def _blockers(self, wanted: _Grant) -> list[str]:
        """Roles of other threads' grants that share a device with the wanted one."""
        rivals = self._plan.conflicts(wanted.role)
        return sorted({grant.role for grant in self._grants if grant.thread != wanted.thread and grant.role in rivals})

    def _withdraw(self, grant: _Grant) -> None:
        self._grants = [other for other in self._grants if other is not grant]
        try:
            self._settle()
        finally:
            self._changed.notify_all()

    def _wanted(self) -> set[Worker]:
        """The workers that should be on their devices: by priority, each unless one before it has a device of its."""
        background = [role for role, tenant in self._tenants.items() if tenant.background]
        chosen: set[Worker] = set()
        taken: set[int] = set()
        for role in [*(grant.role for grant in reversed(self._grants)), *background]:
            for placement in self._plan.workers(role):
                devices = {device.index for device in placement.devices}
                if (role, placement.rank) not in chosen and not devices & taken:
                    chosen.add((role, placement.rank))
                    taken |= devices
        return chosen

    def _settle(self) -> None:
        """Let those leave who are in the way of a wanted worker, then let the wanted ones in."""
        wanted = self._wanted()
        needed = {device.index for role, rank in wanted for device in self._plan.workers(role)[rank].devices}
        for role, tenant in self._tenants.items():
            in_the_way = {
                rank
                for rank in tenant.resident
                if (role, rank) not in wanted and any(device.index in needed for device in self._plan.workers(role)[rank].devices)
            }
            if in_the_way:
                self._tell(tenant, tenant.give_up, in_the_way)
                tenant.resident -= in_the_way
        for role, tenant in self._tenants.items():
            coming = {rank for wanted_role, rank in wanted if wanted_role == role} - tenant.resident
            if coming:
                tenant.resident |= coming  # before the call: one that fails half-way may hold something
                self._tell(tenant, tenant.take, coming)

    def _tell(self, tenant: _Tenant, callback: Callback | None, ranks: set[int]) -> None:
        if callback is None:
            return
        answer = callback(tuple(sorted(ranks)))
        if answer is None:
            return
        if tenant.loop is None:
            asyncio.run(_awaited(answer))
        else:
            asyncio.run_coroutine_threadsafe(_awaited(answer), tenant.loop).result(self._callback_deadline_s)


async def _awaited(answer: Awaitable[None]) -> None:
    await answer
