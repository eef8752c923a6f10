"""The result of planning: which worker of which role stands where. Plain data and questions about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, Literal, cast, get_args

from drumroll.config.models import ParallelConfig, Role
from drumroll.plan.cost import Memory, Stage
from drumroll.plan.pool import Device, Kind

ROLES: tuple[Role, ...] = get_args(Role)

Helper = Literal["assembler", "recorder", "reader"]
"""Workers that compute on no device and stand in no plan."""

STAGE_ROLES: dict[Stage, tuple[Role, ...]] = {
    "rollout": ("actor_infer", "environment", "reward"),
    "score": ("actor_train", "reference", "teacher", "critic"),
    "update": ("actor_train", "critic"),
    "sync": ("actor_train", "actor_infer"),
}
"""Which roles work at which stage of a step. Those of one stage that share a device take turns there; but both work at a sync."""

Relation = Literal["colocated", "overlapping", "disjoint"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker: a rank of a role on a node, with the devices it computes on.

    Example: `Placement("actor_infer", 0, "node0", (Device(0, "node0", 0, "gpu"), Device(1, "node0", 1, "gpu")), "gpu")`,
    an engine over two GPUs.
    """

    role: Role | Helper
    rank: int
    node: str
    """Id of its node; all its devices are there."""
    devices: tuple[Device, ...]
    """Empty: it runs on the node's host processor and shares no device with anybody."""
    kind: Kind


@dataclass(frozen=True)
class Plan:
    """Where every worker of every role stands.

    Example: one colocated GPU: `actor_train` and `actor_infer` have one placement each, both on device 0;
    `plan.conflicts("actor_train")` is `{"actor_infer": (0,)}`.
    """

    placements: Mapping[Role, tuple[Placement, ...]]
    """By role; a placement stands at the position of its rank."""
    parallel: Mapping[Role, ParallelConfig] = field(default_factory=dict)
    """How a role's devices share the work. An engine is one worker with `tp` devices; a trainer's ranks have a device each."""
    memory: Mapping[Role, Memory] = field(default_factory=dict)
    """What each device of a role has to hold at least; empty when the model's size is not known."""
    num_parameters: int | None = None
    stage_memory: Mapping[Role, Mapping[Stage, Memory]] = field(default_factory=dict)
    """What each device of a role is estimated to hold at each stage, working or waiting; empty where the model's shape is not known."""

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in ROLES if role in self.placements)

    def workers(self, role: Role) -> tuple[Placement, ...]:
        """The role's placements by rank; none for a role that the run does not have."""
        return self.placements.get(role, ())

    def layout(self, role: Role) -> ParallelConfig:
        return self.parallel.get(role, ParallelConfig())

    def num_shards(self, role: Role) -> int:
        """How many ranks of a trainer get different trajectories; the others share their work."""
        return len(self.workers(role)) // self.layout(role).devices_per_shard

    def devices(self, role: Role) -> tuple[Device, ...]:
        """The role's devices in the order of its ranks."""
        return tuple(device for placement in self.workers(role) for device in placement.devices)

    @cached_property
    def tenants(self) -> dict[int, tuple[Placement, ...]]:
        """Device index → the workers that live on it, at most one of each role."""
        found: dict[int, list[Placement]] = {}
        for role in self.roles:
            for placement in self.placements[role]:
                for device in placement.devices:
                    found.setdefault(device.index, []).append(placement)
        return {index: tuple(placements) for index, placements in sorted(found.items())}

    def shares_devices(self, role: Role, rank: int, other: Role) -> tuple[int, ...]:
        """Ranks of `other` that live on a device of this worker; they must not compute while it does."""
        devices = self.workers(role)[rank].devices
        return tuple(sorted({tenant.rank for device in devices for tenant in self.tenants[device.index] if tenant.role == other}))

    def conflicts(self, role: Role) -> dict[Role, tuple[int, ...]]:
        """Other role → its ranks that live on any of this role's devices: who has to make room before the role computes."""
        found: dict[str, set[int]] = {}
        for device in self.devices(role):
            for tenant in self.tenants[device.index]:
                if tenant.role != role:
                    found.setdefault(tenant.role, set()).add(tenant.rank)
        return {other: tuple(sorted(found[other])) for other in ROLES if other in found}

    def relation(self, role: Role, other: Role) -> Relation:
        """`colocated`: the same devices; `overlapping`: some in common; `disjoint`: none, and both may compute at once."""
        own, others = {d.index for d in self.devices(role)}, {d.index for d in self.devices(other)}
        if not own & others:
            return "disjoint"
        return "colocated" if own == others else "overlapping"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a step of this run; without rollouts there are only the update and, before it, what a frozen model says."""
        if "actor_infer" in self.placements:
            return ("rollout", "score", "update", "sync")
        return ("score", "update") if self.placements.keys() & {"reference", "teacher"} else ("update",)

    def stage_table(self) -> dict[Device, dict[Stage, tuple[Role, ...]]]:
        """Device → stage → the roles that use it then, in the order of `roles`; an empty tuple where it is idle."""
        devices = {device for role in self.roles for device in self.devices(role)}
        return {
            device: {
                stage: tuple(tenant.role for tenant in self.tenants[device.index] if tenant.role in STAGE_ROLES[stage])
                for stage in self.stages
            }
            for device in sorted(devices)
        }

    def device_memory(self, device: int, stage: Stage) -> int:
        """Bytes that a device is estimated to have in use at a stage, at the moment when it has most: roles of one stage take turns on it,
        and while one works the others wait."""
        present = [tenant.role for tenant in self.tenants[device] if tenant.role in self.stage_memory]
        memory = {role: self.stage_memory[cast(Role, role)] for role in present}
        working = [role for role in present if role in STAGE_ROLES[stage]]
        if stage == "sync":
            return sum(memory[role][stage].total for role in present)
        idle = {role: min(memory[role].values(), key=lambda use: use.total).total for role in present}
        moments = [memory[role][stage].total + sum(idle[other] for other in present if other != role) for role in working]
        return max(moments, default=sum(idle.values()))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON holds it."""
        return {
            "num_parameters": self.num_parameters,
            "roles": {
                role: {
                    "parallel": self.layout(role).model_dump(),
                    "memory_bytes": asdict(self.memory[role]) if role in self.memory else None,
                    "stage_memory_bytes": {stage: asdict(use) for stage, use in self.stage_memory.get(role, {}).items()},
                    "workers": [
                        {
                            "rank": placement.rank,
                            "node": placement.node,
                            "kind": placement.kind,
                            "devices": [{"index": device.index, "local": device.local} for device in placement.devices],
                        }
                        for placement in self.placements[role]
                    ],
                }
                for role in self.roles
            },
            "relations": [
                {"roles": [role, other], "relation": self.relation(role, other)}
                for role, other in combinations([role for role in self.roles if self.devices(role)], 2)
            ],
        }
