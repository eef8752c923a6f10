"""From what a config asks for (`devices.<role>`) to devices of the pool, or to a message that says what is wrong with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumroll.config.models import DeviceRequest, DeviceSpec, Role
from drumroll.errors import PlanError
from drumroll.plan.pool import Device, Pool, no_match

NUMBERS = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")
ACCEPTED = "Write a number (`2`), a range (`0-3`), both (`0,2,5-7`), a list (`[0, 2]`), `all`, `cpu`, or `{where: {gpu: L40S}, take: 0-3}`."


@dataclass(frozen=True, slots=True)
class Selection:
    """What a role gets: devices, or the host processors of nodes. Exactly one of the two is not empty."""

    devices: tuple[Device, ...] = ()
    hosts: tuple[str, ...] = ()
    """Ids of nodes."""


def hosts(pool: Pool, where: Mapping[str, str]) -> Selection:
    """The host processors of the matching nodes."""
    return Selection(hosts=tuple(node.id for node in pool.nodes if node.matches(where)))


def select(role: Role, spec: DeviceSpec, pool: Pool) -> Selection:
    """What `devices.<role>` asks for.

    Numbers count over the devices of the matching nodes in order, and ranks follow the order in which they are written.
    `cpu` is the pool's CPU slots for a role that computes, where it has any; for the others, and in a pool of GPUs alone,
    it is the host processor.
    """
    key = f"`devices.{role}`"
    if isinstance(spec, DeviceRequest):
        where, take = spec.where, spec.take
    else:
        where, take = {}, (spec,) if isinstance(spec, int) else spec
    if not any(node.matches(where) for node in pool.nodes):
        raise PlanError(f"{key}: {no_match(pool, where)}.")

    if role == "environment":
        if take not in (None, "cpu"):
            advice = "Write `cpu`, or `{where: {...}}` for the hosts of some nodes."
            raise PlanError(f"{key}: got {_show(take)}, but environments run on host processors. {advice}")
        return hosts(pool, where)
    if take == "cpu":
        slots = () if role == "reward" else pool.matching(where, "cpu")
        return Selection(devices=slots) if slots else hosts(pool, where)

    candidates = pool.candidates(where)
    if not candidates:
        raise PlanError(f"{key}: the matching nodes have no devices. Write `cpu` to use their host processors.")
    if take is None or take == "all":
        return Selection(devices=candidates)
    if isinstance(take, int):
        if not 0 < take <= len(candidates):
            raise PlanError(f"{key}: takes {take} devices of {_extent(candidates, where)}. Take 1 to {len(candidates)}.")
        return Selection(devices=candidates[:take])
    numbers = _numbers(key, take, candidates, where)
    repeated = sorted(number for number, times in Counter(numbers).items() if times > 1)
    if repeated:
        names = ", ".join(map(str, repeated))
        raise PlanError(f"{key}: got {_show(take)}, which names device {names} more than once. Name each device once.")
    return Selection(devices=tuple(candidates[number] for number in numbers))


def _numbers(key: str, take: str | Sequence[int], candidates: Sequence[Device], where: Mapping[str, str]) -> list[int]:
    """The device numbers that a text or list names, each within the candidates."""
    if isinstance(take, str):
        if not NUMBERS.fullmatch(take):
            raise PlanError(f"{key}: cannot read {_show(take)}. {ACCEPTED}")
        bounds = [[int(number) for number in part.split("-")] for part in take.split(",")]
    else:
        bounds = [[number] for number in take]
    if not bounds:
        raise PlanError(f"{key}: names no device. {ACCEPTED}")
    for first, last in ((bound[0], bound[-1]) for bound in bounds):
        if first > last:
            raise PlanError(f"{key}: got {_show(take)}, but the range {first}-{last} is empty. Write {last}-{first}.")
        outside = last if last >= len(candidates) else first
        if not 0 <= outside < len(candidates):
            hint = "set `ray.cpu_slots`" if candidates[0].kind == "cpu" else "join a larger cluster (`ray.address`)"
            elsewhere = f"; `drumroll plan … --pool 1x{outside + 1}x80GiB` plans for a pool that is not there" if outside > 0 else ""
            raise PlanError(
                f"{key}: got {_show(take)}, but device {outside} is outside {_extent(candidates, where)}. "
                f"Choose among these, or {hint}{elsewhere}."
            )
    return [number for bound in bounds for number in range(bound[0], bound[-1] + 1)]


def _extent(candidates: Sequence[Device], where: Mapping[str, str]) -> str:
    """`the pool's 8 GPUs (0-7)`."""
    noun = {"gpu": "GPU", "cpu": "CPU slot"}[candidates[0].kind] + ("" if len(candidates) == 1 else "s")
    scope = " that match {" + ", ".join(f"{key}: {value}" for key, value in where.items()) + "}" if where else ""
    numbers = "0" if len(candidates) == 1 else f"0-{len(candidates) - 1}"
    return f"the pool's {len(candidates)} {noun}{scope} ({numbers})"


def _show(take: object) -> str:
    return f"'{take}'" if isinstance(take, str) else str(list(take)) if isinstance(take, tuple) else str(take)
