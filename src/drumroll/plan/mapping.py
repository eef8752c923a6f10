"""AutoDeviceMapping: which devices each role gets, and how they become ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import cast

from drumroll.config.models import ModelConfig, ParallelConfig, RlConfig, Role, RunConfig, SftRunConfig
from drumroll.errors import PlanError
from drumroll.plan.cost import (
    GIB,
    TRAINER_ROLES,
    Memory,
    Serving,
    Shape,
    Stage,
    Training,
    cache_bytes,
    compute_bytes,
    device_memory,
    devices_per_copy,
    engine_memory,
    known_shape,
    trainer_memory,
    waiting,
)
from drumroll.plan.placement import ROLES, STAGE_ROLES, Placement, Plan
from drumroll.plan.pool import Device, Pool
from drumroll.plan.request import Selection, hosts, select
from drumroll.registry import nearest

AUTO_CPU_SLOTS = 4
"""CPU slots of a node that are used unasked. A worker is a process of several hundred MB that takes seconds to import its
libraries, and the small models that CPUs can train gain nothing from more of them. `ray.cpu_slots` lifts the limit."""

HOST_ROLES: tuple[Role, ...] = ("environment", "reward")
"""Roles that run on host processors unless told otherwise, in as many workers as `rollout.num_env_workers` and `reward_workers` say."""

CACHE_PAGE = 64
"""Tokens in a page of the native engine's cache on a GPU."""
NATIVE_SHARE = 0.85
"""Of the memory beside the model, what its cache takes at most."""

INSTANCE_ROLES: tuple[Role, ...] = ("actor_infer", "reward")
"""Roles whose instance is one worker with `tp` devices; in the others every device is a rank of its own."""


def make_plan(config: RunConfig, pool: Pool, roles: Collection[Role], *, num_parameters: int | None = None) -> Plan:
    """Place every worker of the roles that the run needs. Starts nothing.

    `devices: auto`, and a role that an explicit map does not name, get:

    - `actor_infer`: all GPUs of the pool, or all its CPU slots (at most `AUTO_CPU_SLOTS` of a node unless `ray.cpu_slots` is
      set) where it has no GPU;
    - `actor_train`: all GPUs of one kind, the one with the most memory in all: ranks that compute together are as slow as the
      slowest. In a pool of one kind, training and inference so take turns on every GPU and none is idle. Of CPU slots the first
      alone: for models that CPUs can train, ranks wait for each other longer than they compute;
      With a `rollout.max_staleness` above 0 both work at the same time, and so on devices of their own where there are two or
      more: trainers on the first half of the GPUs or the first CPU slot, engines on the others;
    - `reference`, `teacher` and `critic`: the devices of `actor_train`;
    - `environment` and `reward`: host processors, workers dealt out over the nodes; but `reward` the devices of `actor_train` where
      it serves a model.

    Such a choice leaves devices over that `parallel.<role>` cannot arrange; an explicit map must fit exactly. A `tp` stays on one node.
    `num_parameters` is the model's size where the caller knows better than `config.model` and the files it names.
    """
    for role in roles:
        if role not in ROLES:
            raise PlanError(f"no role named '{role}'.{nearest(role, ROLES)} Roles: {', '.join(ROLES)}.")
    if isinstance(config.devices, dict):
        for role, spec in config.devices.items():  # a mistake in a role that this run does not have is still a mistake
            select(role, spec, pool)

    needed = [role for role in ROLES if role in roles]
    parallel = {role: _layout(role, config) for role in needed}
    selections = {role: _selection(role, config, pool) for role in needed}
    placements = {role: _place(role, selections[role], parallel[role], config, pool) for role in needed}

    shapes = {role: None if role in HOST_ROLES else _shape(role, config) for role in needed}
    memory: dict[Role, Memory] = {}
    for role in needed:
        shape = shapes[role]
        size = shape.num_parameters if shape is not None else None
        if num_parameters is not None and role != "teacher":
            size = num_parameters
        if size is not None and role not in HOST_ROLES:
            memory[role] = _estimate(role, placements[role], parallel[role], size, config, pool)
            _check_memory(role, selections[role].devices, memory[role], parallel[role], size, pool)
    own = known_shape(config.model)
    known = {role: shape for role, shape in shapes.items() if shape is not None and num_parameters is None}
    plan = Plan(placements, parallel, memory, num_parameters if own is None or num_parameters is not None else own.num_parameters)
    plan = replace(plan, stage_memory=stage_memory(plan, known, config, pool))
    _check_shared(plan, config, pool)
    _check_hosts(plan, pool)
    return plan


def _layout(role: Role, config: RunConfig) -> ParallelConfig:
    return config.parallel.get(role, ParallelConfig())


def _selection(role: Role, config: RunConfig, pool: Pool) -> Selection:
    """The role's devices or hosts: as the map says, or the default."""
    if isinstance(config.devices, dict) and role in config.devices:
        return select(role, config.devices[role], pool)
    serves_model = role == "reward" and isinstance(config, RlConfig) and _rewards_need_devices(config)
    if role in HOST_ROLES and not serves_model:
        return hosts(pool, {})
    if role in ("reference", "teacher", "critic", "reward"):
        beside = _selection("actor_train", config, pool)
        return Selection(_fitting(role, beside.devices, config)) if beside.devices else beside
    layout = _layout(role, config)
    devices = _whole_instances(role, _share(role, _accelerators(config, pool), config), layout.tp)
    if role == "actor_train":
        devices = _one_kind(devices, pool)
        devices = devices if devices[0].kind == "gpu" else devices[: layout.least_devices]
    return Selection(_fitting(role, devices, config))


def _fitting(role: Role, devices: Sequence[Device], config: RunConfig) -> tuple[Device, ...]:
    """The devices less those at the end of each node, and of all, that cannot be arranged as the role's parallel sizes say."""
    layout = _layout(role, config)
    kept = _whole_instances(role, devices, layout.tp)
    fitting = (
        [number for number in range(len(kept), 0, -1) if layout.problem_with(number) is None] if role in TRAINER_ROLES else [len(kept)]
    )
    if not fitting:
        raise PlanError(_misfit(role, len(devices), layout))
    return kept[: fitting[0]]


def _misfit(role: Role, num_devices: int, layout: ParallelConfig) -> str:
    """That a number of devices cannot be arranged, and which can."""
    numbers = [number for number in range(1, 2 * num_devices + layout.least_devices) if layout.problem_with(number) is None]
    nearest_ones = sorted(numbers, key=lambda number: (abs(number - num_devices), number))[:2]
    advice = f"Give it {' or '.join(map(str, sorted(nearest_ones)))} devices, or change" if nearest_ones else "Change"
    problem = layout.problem_with(num_devices, f"parallel.{role}")
    return f"`devices.{role}` has {num_devices} device{'' if num_devices == 1 else 's'}: {problem}. {advice} `parallel.{role}`."


def _rewards_need_devices(config: RlConfig) -> bool:
    return any(reward.seat == "device" for domain in config.mixture.values() for reward in domain.rewards)


def _host_workers(role: Role, config: RunConfig) -> int:
    """Workers of a role that runs on host processors."""
    if not isinstance(config, RlConfig) or role not in HOST_ROLES:
        return 1
    return config.reward_workers if role == "reward" else config.rollout.num_env_workers


def _accelerators(config: RunConfig, pool: Pool) -> tuple[Device, ...]:
    """The devices that are used unasked."""
    limited = config.ray.cpu_slots is None
    return tuple(device for device in pool.candidates({}) if device.kind == "gpu" or not limited or device.local < AUTO_CPU_SLOTS)


def _share(role: Role, devices: tuple[Device, ...], config: RunConfig) -> tuple[Device, ...]:
    """All of them, or the role's part where trainers and engines work at the same time."""
    if not isinstance(config, RlConfig) or config.rollout.max_staleness == 0 or len(devices) < 2:
        return devices
    border = len(devices) // 2 if devices[0].kind == "gpu" else 1
    return devices[:border] if role == "actor_train" else devices[border:]


def _one_kind(devices: Sequence[Device], pool: Pool) -> tuple[Device, ...]:
    """The devices of the kind of node that has the most memory in all; the most devices where memory is not known."""
    kinds: dict[tuple[str, float | None], list[Device]] = {}
    for device in devices:
        node = pool.by_id[device.node]
        kinds.setdefault((node.labels.get(node.kind, ""), node.memory_gib), []).append(device)
    _, largest = max(kinds.items(), key=lambda kind: len(kind[1]) * (kind[0][1] or 1.0))
    return tuple(largest)


def _whole_instances(role: Role, devices: Sequence[Device], tp: int) -> tuple[Device, ...]:
    """The devices less those at the end of each node that are too few for an instance."""
    by_node = [list(group) for _, group in groupby(devices, key=lambda device: device.node)]
    kept = [device for group in by_node for device in group[: len(group) // tp * tp]]
    if not kept:
        most = max(len(group) for group in by_node)
        raise PlanError(
            f"`parallel.{role}.tp` is {tp}, but an instance must fit on one node, and {role} finds at most {most} "
            f"device{'' if most == 1 else 's'} on a node. Choose at most {most}."
        )
    return tuple(kept)


def _place(role: Role, selection: Selection, layout: ParallelConfig, config: RunConfig, pool: Pool) -> tuple[Placement, ...]:
    """Devices or hosts become ranks."""
    tp = layout.tp
    if selection.hosts:
        for name, size in layout.model_dump(exclude_none=True).items():
            if size > 1:
                raise PlanError(
                    f"`parallel.{role}.{name}` is {size}, but {role} runs on host processors, without devices to span. Leave it out."
                )
        wanted = _host_workers(role, config)
        # Dealt out in turn, then ordered by node, so that neighbouring ranks stand on one node.
        nodes = sorted(rank % len(selection.hosts) for rank in range(wanted))
        return tuple(Placement(role, rank, selection.hosts[node], (), "cpu") for rank, node in enumerate(nodes))

    devices = selection.devices
    if role in TRAINER_ROLES and layout.problem_with(len(devices)) is not None and len(devices) % tp == 0:
        raise PlanError(_misfit(role, len(devices), layout))
    if len(devices) % tp:
        fitting = len(devices) // tp * tp
        raise PlanError(
            f"`devices.{role}` has {len(devices)} devices, which `parallel.{role}.tp` = {tp} does not divide. "
            f"Give it {f'{fitting} or ' if fitting else ''}{fitting + tp} devices, or change `parallel.{role}.tp`."
        )
    instances = [devices[start : start + tp] for start in range(0, len(devices), tp)]
    for instance in instances:
        if len({device.node for device in instance}) > 1:
            spread = ", ".join(f"{device.index} on {pool.by_id[device.node].title}" for device in instance)
            raise PlanError(
                f"`devices.{role}`: an instance of `parallel.{role}.tp` = {tp} would span nodes (devices {spread}). "
                f"Give it devices in runs of {tp} from each node, or choose a smaller `parallel.{role}.tp`."
            )
    workers: Iterable[tuple[Device, ...]] = instances if role in INSTANCE_ROLES else ((device,) for device in devices)
    return tuple(Placement(role, rank, own[0].node, own, own[0].kind) for rank, own in enumerate(workers))


def _shape(role: Role, config: RunConfig) -> Shape | None:
    """The model of a role as far as it is known: a teacher is one of its own, and a critic may begin with another than the policy."""
    if role == "teacher":
        teacher = config.teacher if isinstance(config, RlConfig | SftRunConfig) else None
        return known_shape(ModelConfig(path=teacher.path)) if teacher is not None else None
    if role == "critic":
        own = config.critic.path if isinstance(config, RlConfig) and config.critic is not None else None
        return known_shape(config.model if own is None else ModelConfig(path=own), has_scalar_head=True)
    return known_shape(config.model)


def _estimate(
    role: Role, placements: Sequence[Placement], layout: ParallelConfig, num_parameters: int, config: RunConfig, pool: Pool
) -> Memory:
    num_devices = sum(max(1, len(placement.devices)) for placement in placements)
    weight_bytes = compute_bytes(config.model.dtype, placements[0].kind)
    least = device_memory(
        role, num_parameters, num_devices, layout, weight_bytes, adapters=getattr(config.trainer, "lora", None) is not None
    )
    share, gib = _share_taken(role, config), pool.by_id[placements[0].node].memory_gib
    return least if share is None or gib is None else replace(least, cache=max(0, int(share * gib * GIB) - least.weights))


def _share_taken(role: Role, config: RunConfig) -> float | None:
    """Of a GPU's memory, what an engine of another package takes whether it needs it or not; None where it takes what it needs."""
    if role != "actor_infer" or not isinstance(config, RlConfig) or getattr(config.engine, "cache_tokens", None) is not None:
        return None
    return getattr(config.engine, "memory_share", None)


def _check_memory(role: Role, devices: Sequence[Device], memory: Memory, layout: ParallelConfig, num_parameters: int, pool: Pool) -> None:
    """Refuse what cannot fit on a GPU, by itself."""
    for device in devices:
        node = pool.by_id[device.node]
        available = node.available_gib(device.local)
        if node.kind != "gpu" or available is None or memory.total <= available * GIB:
            continue
        divided_by = devices_per_copy(role, len(devices), layout)
        needs = f"{num_parameters / 1e9:.2f} billion parameters, divided by {divided_by}, need at least {memory.total / GIB:.1f} GiB"
        if node.memory_gib is not None and memory.total <= node.memory_gib * GIB:
            raise PlanError(
                f"`devices.{role}`: {needs} of a GPU ({memory}), and GPU {device.local} of {node.title} has {available:.1f} GiB free "
                f"of its {node.memory_gib:g}: somebody else is using it (`nvidia-smi` says who). End that, or choose another device."
            )
        least = math.ceil(memory.total * divided_by / (available * GIB))
        if role == "actor_infer":
            advice = f"Set `parallel.{role}.tp` to {least} or more"
        elif layout.shard and least <= len(devices):
            advice = f"Leave `parallel.{role}.shard` out, or let {least} GPUs or more share a copy"
        else:
            advice = f"Give `devices.{role}` {least} such GPUs or more"
            if memory.optimizer:
                advice += ", learn adapters alone (`trainer.lora`)"
        raise PlanError(
            f"`devices.{role}`: {needs} of a GPU ({memory}), and {node.title}'s have {available:g} GiB. "
            f"{advice}, or choose a smaller model."
        )


def _check_shared(plan: Plan, config: RunConfig, pool: Pool) -> None:
    """Refuse roles that cannot be on one GPU together, where those that wait do not leave it."""
    for index, tenants in plan.tenants.items():
        device = pool.devices[index]
        node = pool.by_id[device.node]
        available = node.available_gib(device.local)
        roles = [cast(Role, tenant.role) for tenant in tenants if tenant.role in plan.memory]
        if node.kind != "gpu" or available is None or len(roles) < 2:
            continue
        stays = {
            role: 0 if offloads(role, config) else plan.memory[role].weights + plan.memory[role].optimizer + plan.memory[role].cache
            for role in roles
        }
        worst = max(roles, key=lambda role: plan.memory[role].total - stays[role])
        need = plan.memory[worst].total - stays[worst] + sum(stays.values())
        if need > available * GIB:
            parts = ", ".join(f"{role} {(plan.memory[role].total if role == worst else stays[role]) / GIB:.1f}" for role in roles)
            keys = sorted({"engine.offload" if role == "actor_infer" else "trainer.offload" for role in roles if stays[role]})
            advice = f"Set {' and '.join(f'`{key}: true`' for key in keys)}, so that whoever waits leaves it" if keys else "Use more GPUs"
            if any(plan.memory[role].cache for role in roles):
                advice += ", have the engine take less (`engine.memory_share`, `engine.cache_tokens`)"
            raise PlanError(
                f"GPU {device.local} of {node.title} has {available:.1f} GiB, and its roles need at least {need / GIB:.1f} while {worst} "
                f"works ({parts} GiB). {advice}, or give them devices of their own (`devices`)."
            )


def _check_hosts(plan: Plan, pool: Pool) -> None:
    """Refuse what cannot wait in a machine's own memory. What a role once took there it keeps for the next time."""
    for node in pool.nodes:
        needs = {
            role: max(use.host for use in uses.values()) * sum(device.node == node.id for device in plan.devices(role))
            for role, uses in plan.stage_memory.items()
        }
        if node.host_gib is not None and sum(needs.values()) > node.host_gib * GIB:
            parts = ", ".join(f"{role} {need / GIB:.1f}" for role, need in needs.items() if need)
            raise PlanError(
                f"{node.title} has {node.host_gib:.1f} GiB of host memory, and what waits there while others use its GPUs needs at least "
                f"{sum(needs.values()) / GIB:.1f} ({parts} GiB). Let fewer roles leave (`trainer.offload`, `engine.offload`), learn "
                f"adapters alone (`trainer.lora`), or use more machines."
            )


def offloads(role: Role, config: RunConfig) -> bool:
    """Whether a role that waits leaves its device for host memory."""
    if role == "actor_infer":
        return isinstance(config, RlConfig) and config.engine.offload
    return config.trainer.offload


def stage_memory(plan: Plan, shapes: Mapping[Role, Shape], config: RunConfig, pool: Pool) -> dict[Role, dict[Stage, Memory]]:
    """What each device of every role whose model is known holds at each stage: working, or waiting for its turn."""
    found: dict[Role, dict[Stage, Memory]] = {}
    for role, shape in shapes.items():
        is_shared = bool(plan.conflicts(role))
        leaves = is_shared and offloads(role, config)
        uses: dict[Stage, Memory] = {}
        for stage in plan.stages:
            use = _use(role, stage, shape, plan, config, pool)
            if not _works(role, stage, config):
                use = waiting(use, offloads=leaves, keeps_cache=not leaves)
                if role == "actor_infer" and isinstance(config, RlConfig) and hasattr(config.engine, "memory_share"):
                    use = replace(use, host=2 * use.host)  # packages have each piece rounded up to a power of two
            elif stage == "sync" and role == "actor_infer" and leaves:
                use = replace(use, cache=0)  # which comes back when generation goes on
            uses[stage] = use
        found[role] = uses
    return found


def _works(role: Role, stage: Stage, config: RunConfig) -> bool:
    if role == "actor_train" and stage == "score":  # where a step's later updates have to know where the first one began
        return isinstance(config, RlConfig) and config.algo.updates_per_step * config.algo.epochs_per_step > 1
    return role in STAGE_ROLES[stage]


def _use(role: Role, stage: Stage, shape: Shape, plan: Plan, config: RunConfig, pool: Pool) -> Memory:
    """What a role would hold of its device at a stage if it worked then."""
    workers = plan.workers(role)
    weight_bytes = compute_bytes(config.model.dtype, workers[0].kind)
    if role == "actor_infer":
        assert isinstance(config, RlConfig), "only RL has engines"
        return engine_memory(stage, shape, _serving(shape, plan, config, pool, weight_bytes))
    layout, lora = plan.layout(role), getattr(config.trainer, "lora", None)
    training = Training(
        num_ranks=devices_per_copy(role, len(workers), layout) // layout.tp,
        weight_bytes=weight_bytes,
        tokens=-(-config.trainer.micro_batch_tokens // layout.cp),
        checkpointing=config.trainer.gradient_checkpointing,
        fused_layers=workers[0].kind == "gpu" and getattr(config.trainer, "fused_layers", True),
        lora_rank=None if lora is None else lora.rank,
        has_scalar_head=role == "critic",
        tp=layout.tp,
    )
    return trainer_memory(role, stage, shape.divided(layout.tp), training)


def _serving(shape: Shape, plan: Plan, config: RlConfig, pool: Pool, weight_bytes: int) -> Serving:
    """The engine's own settings, and what it makes of those that are left out."""
    engine, tp = config.engine, plan.layout("actor_infer").tp
    context = engine.context_tokens or shape.context or 0
    tokens = getattr(engine, "cache_tokens", None)
    first = plan.workers("actor_infer")[0]
    if tokens is None:
        pages = -(-context // CACHE_PAGE) * CACHE_PAGE
        tokens = engine.num_slots * pages
        gib = pool.by_id[first.node].memory_gib
        if first.kind == "gpu" and gib is not None:
            share = _share_taken("actor_infer", config)
            each, weights = cache_bytes(shape, weight_bytes), shape.num_parameters * weight_bytes
            if share is not None:  # packages take all that they may have
                tokens = max(0, int(share * gib * GIB * tp) - weights) // each
            else:
                tokens = min(tokens, int(NATIVE_SHARE * max(0.0, gib * GIB * tp - weights)) // each)
    prefill = getattr(engine, "prefill_tokens", None) or (8192 if first.kind == "gpu" else 256)
    return Serving(tp, weight_bytes, engine.num_slots, tokens, prefill)
