"""A plan as people read it: a table of roles, one of stages, one of memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drumroll.config.models import Role
from drumroll.plan.cost import GIB, Memory
from drumroll.plan.placement import Placement, Plan
from drumroll.plan.pool import Node, Pool


def render(plan: Plan, pool: Pool) -> RenderableType:
    """The tables under one line that says what the pool is."""
    size = f" · {plan.num_parameters / 1e6:,.2f} M parameters" if plan.num_parameters is not None else ""
    memory = ("", memory_table(plan, pool)) if plan.stage_memory else ()
    return Group(f"Pool: {pool.describe()}{size}", "", role_table(plan, pool), "", stage_table(plan), *memory)


def role_table(plan: Plan, pool: Pool) -> Table:
    """Where each role's ranks stand; neighbouring nodes with the same layout share a line."""
    table = Table(title="Roles", title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("role", "ranks", "node", "devices", "parallel", "memory each", "shared with"):
        table.add_column(column, no_wrap=column in ("role", "shared with"))
    for role in plan.roles:
        for line, placements in enumerate(_alike(plan.workers(role), pool)):
            nodes = list(dict.fromkeys(placement.node for placement in placements))
            devices = [device for placement in placements for device in placement.devices]
            table.add_row(
                role if line == 0 else "",
                ranges([placement.rank for placement in placements]),
                _titles([pool.by_id[node] for node in nodes], with_label=bool(devices)),
                f"{ranges([device.index for device in devices])} ({devices[0].kind})" if devices else "host",
                _parallel(plan, role) if line == 0 else "",
                _memory(plan, role, pool.by_id[nodes[0]]),
                _shared(plan, role) if line == 0 else "",
            )
    if any(plan.relation(role, other) == "overlapping" for role in plan.roles for other in plan.conflicts(role)):
        table.caption, table.caption_justify = "* on some of the devices", "left"
    return table


def stage_table(plan: Plan) -> Table:
    """Who uses which device when; roles of one stage on one device take turns."""
    table = Table(title="Stages", title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("devices")
    for stage in plan.stages:
        table.add_column(stage)
    uses: dict[tuple[tuple[Role, ...], ...], list[int]] = {}
    for device, stages in plan.stage_table().items():
        uses.setdefault(tuple(stages.values()), []).append(device.index)
    for roles, indices in uses.items():
        table.add_row(ranges(indices), *(", ".join(names) if names else Text("idle", style="dim") for names in roles))
    at_host = [role for role in plan.roles if not plan.devices(role)]
    if at_host:
        table.caption, table.caption_justify = f"On host processors: {', '.join(at_host)}", "left"
    return table


def memory_table(plan: Plan, pool: Pool) -> Table:
    """What a device of each role is estimated to hold at each stage, with what that consists of where the role works; below it what all
    roles of a device hold together, and what the device has."""
    table = Table(title="Memory of each device, estimated, in GiB", title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("", *plan.stages, "at most"):
        table.add_column(column, no_wrap=column == "")
    for role, uses in plan.stage_memory.items():
        peak = max(uses.values(), key=lambda use: use.total)
        table.add_row(role, *(_held(uses[stage]) for stage in plan.stages), str(peak))
    table.add_section()
    seen: dict[tuple[str, ...], list[int]] = {}
    for index in plan.tenants:
        held = (f"{plan.device_memory(index, stage) / GIB:.1f}" for stage in plan.stages)
        seen.setdefault((*held, _room(pool, index)), []).append(index)
    for cells, indices in seen.items():
        too_much = any(_is_short(plan, pool, index) for index in indices)
        table.add_row(f"device {ranges(indices)}", *cells, style="bold red" if too_much else None)
    return table


def _held(use: Memory) -> str:
    """`40.3`, or `host 5.5` for what waits in host memory."""
    return f"host {use.host / GIB:.1f}" if use.host and not use.total else f"{use.total / GIB:.1f}"


def _room(pool: Pool, index: int) -> str:
    device = pool.devices[index]
    node = pool.by_id[device.node]
    available = node.available_gib(device.local)
    if available is None:
        return "–"
    return f"of {available:.1f} free" if node.free_gib else f"of {available:g}"


def _is_short(plan: Plan, pool: Pool, index: int) -> bool:
    """Whether the estimate is more than the device has."""
    device = pool.devices[index]
    available = pool.by_id[device.node].available_gib(device.local)
    return available is not None and any(plan.device_memory(index, stage) > available * GIB for stage in plan.stages)


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2,5`, in the order given."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _alike(placements: Sequence[Placement], pool: Pool) -> list[list[Placement]]:
    """The placements by node, and neighbouring nodes together where they have the same make and the same local devices.

    Host processors are all alike."""
    by_node = [list(group) for _, group in groupby(placements, key=lambda placement: placement.node)]

    def layout(group: list[Placement]) -> tuple[object, ...]:
        if not group[0].devices:
            return ()
        node = pool.by_id[group[0].node]
        return node.kind, node.memory_gib, node.labels.get(node.kind), tuple(tuple(d.local for d in p.devices) for p in group)

    return [[placement for group in groups for placement in group] for _, groups in groupby(by_node, key=layout)]


def _titles(nodes: Sequence[Node], with_label: bool) -> str:
    label = nodes[0].labels.get(nodes[0].kind) if with_label else None
    titles = nodes[0].title if len(nodes) == 1 else f"{nodes[0].title} … {nodes[-1].title} ({len(nodes)})"
    return f"{titles} {label}" if label else titles


def _parallel(plan: Plan, role: Role) -> str:
    layout, devices = plan.layout(role), plan.devices(role)
    if not devices:
        return f"{len(plan.workers(role))} worker{'' if len(plan.workers(role)) == 1 else 's'}"
    num_shards = len(devices) // layout.devices_per_shard
    hybrid = f" ({num_shards // layout.shard} copies)" if layout.shard and layout.shard < num_shards else ""
    sizes = [f"{name} {size}" for name, size in (("cp", layout.cp), ("tp", layout.tp)) if size > 1]
    return " × ".join([f"dp {num_shards}{hybrid}", *sizes]) + (f", ep {layout.ep}" if layout.ep > 1 else "")


def _memory(plan: Plan, role: Role, node: Node) -> str:
    if role not in plan.memory:
        return "–"
    need = plan.memory[role].total / GIB
    size = f"{need:.1f} GiB" if need >= 0.1 else f"{need * 1024:.1f} MiB"
    return f"≥ {size} of {node.memory_gib:g} GiB" if plan.devices(role) and node.memory_gib else f"≥ {size}"


def _shared(plan: Plan, role: Role) -> str:
    """Who else lives on the role's devices, a line each; a star where the two do not have all devices in common."""
    others = [other + ("" if plan.relation(role, other) == "colocated" else " *") for other in plan.conflicts(role)]
    return "\n".join(others) if others else "–"
