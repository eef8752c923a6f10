"""The devices there are: nodes of GPUs, or of CPU slots where there are no GPUs.

A pool is made from text (`parse_pool`), from this machine (`local_pool`), or from the facts of a live cluster
(`Pool(tuple(Node(...) for ...))`). Devices are numbered over the nodes in order, all GPUs before all CPU slots.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from drumroll.errors import PlanError
from drumroll.registry import nearest

Kind = Literal["gpu", "cpu"]

MAX_DEVICES = 1_000_000
"""A pool beyond this is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine and the devices on it that a run may use.

    Example: `Node("node0", num_devices=8, kind="gpu", memory_gib=80.0, labels={"gpu": "H100"})`.
    """

    id: str
    num_devices: int
    kind: Kind
    memory_gib: float | None = None
    """Memory of each device; None where nobody knows or where devices share the host's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What selectors match. Every node also answers to `kind` and `node`."""
    address: str = ""
    name: str = ""
    """What tables call the node; its id otherwise."""
    device_ids: tuple[str, ...] = ()
    """What `CUDA_VISIBLE_DEVICES` calls each device; its local number otherwise."""
    free_gib: tuple[float, ...] = ()
    """Memory of each device that nobody has in use, where somebody has looked."""
    host_gib: float | None = None
    """Memory of the machine itself, where somebody has looked."""

    @property
    def title(self) -> str:
        return self.name or self.id

    @property
    def selectors(self) -> dict[str, str]:
        return {**self.labels, "kind": self.kind, "node": self.title}

    def device_id(self, local: int) -> str:
        """The name by which `CUDA_VISIBLE_DEVICES` makes a device visible."""
        return self.device_ids[local] if self.device_ids else str(local)

    def available_gib(self, local: int) -> float | None:
        """Memory of a device that a run can have; None where nobody knows."""
        return self.free_gib[local] if self.free_gib else self.memory_gib

    def matches(self, where: Mapping[str, str]) -> bool:
        own = self.selectors
        return all(key in own and own[key].casefold() == value.casefold() for key, value in where.items())


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One GPU or CPU slot."""

    index: int
    """Number in the pool."""
    node: str
    """Id of its node."""
    local: int
    """Number on its node."""
    kind: Kind


@dataclass(frozen=True)
class Pool:
    """All nodes that a plan may use. Example: `Pool((Node("a", 2, "gpu"), Node("b", 4, "cpu")))`."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not any(node.num_devices > 0 for node in self.nodes):
            raise PlanError("the pool has no devices: no GPU was found and no CPU slot is given. Set `ray.cpu_slots`, or pass `--pool`.")
        if len(self.by_id) < len(self.nodes):
            repeated = sorted({node.id for node in self.nodes if sum(other.id == node.id for other in self.nodes) > 1})
            raise PlanError(f"the pool names nodes twice: {', '.join(repeated)}. Give each node its own id.")

    @cached_property
    def by_id(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, GPUs first, at the position of its index."""
        ordered = sorted(self.nodes, key=lambda node: node.kind != "gpu")
        places = [(node, local) for node in ordered for local in range(node.num_devices)]
        return tuple(Device(index, node.id, local, node.kind) for index, (node, local) in enumerate(places))

    def matching(self, where: Mapping[str, str], kind: Kind) -> tuple[Device, ...]:
        """The devices of one kind on the nodes that a selector matches."""
        chosen = {node.id for node in self.nodes if node.kind == kind and node.matches(where)}
        return tuple(device for device in self.devices if device.node in chosen)

    def candidates(self, where: Mapping[str, str]) -> tuple[Device, ...]:
        """The devices that numbers count over: the GPUs of the matching nodes, or their CPU slots where they have no GPU."""
        return self.matching(where, "gpu") or self.matching(where, "cpu")

    def describe(self) -> str:
        """One line, for example `4 nodes × 8 GPUs of 80 GiB (H100)`."""
        kinds: dict[tuple[int, str, float | None, str], int] = {}
        for node in self.nodes:
            key = (node.num_devices, node.kind, node.memory_gib, node.labels.get(node.kind, ""))
            kinds[key] = kinds.get(key, 0) + 1
        return ", ".join(_describe_kind(count, *key) for key, count in kinds.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": [
                {
                    "id": node.id,
                    "name": node.title,
                    "address": node.address,
                    "kind": node.kind,
                    "num_devices": node.num_devices,
                    "memory_gib": node.memory_gib,
                    "free_gib": list(node.free_gib),
                    "labels": dict(node.labels),
                }
                for node in self.nodes
            ]
        }


def _describe_kind(count: int, num_devices: int, kind: str, memory_gib: float | None, label: str) -> str:
    noun = {"gpu": "GPU", "cpu": "CPU slot"}[kind] + ("" if num_devices == 1 else "s")
    memory = f" of {memory_gib:g} GiB" if memory_gib else ""
    suffix = f" ({label})" if label else ""
    return f"{count} node{'' if count == 1 else 's'} × {num_devices} {noun}{memory}{suffix}"


POOL_PART = re.compile(
    r"(?P<nodes>\d+)x(?P<devices>\d+)x(?:(?P<memory>\d+(?:\.\d+)?)GiB|(?P<cpu>cpu))(?::(?P<label>[\w.+-]+))?",
    re.IGNORECASE,
)


def parse_pool(text: str) -> Pool:
    """A pool that need not exist: `4x8x80GiB` is 4 nodes of 8 GPUs of 80 GiB.

    A label may follow (`:H100`), several kinds are separated by commas, and `1x2xcpu` is one node of two CPU slots:
    `4x8x80GiB:H100,2x4x48GiB:L40S,1x2xcpu`.
    """
    shape = "Write NODESxDEVICESxMEMORY such as '4x8x80GiB', '4x8x80GiB:H100,2x4x48GiB:L40S', or '1x2xcpu' for CPU slots."
    nodes: list[Node] = []
    for part in text.split(","):
        match = POOL_PART.fullmatch(part.strip())
        if match is None:
            raise PlanError(f"pool '{text}': cannot read '{part.strip()}'. {shape}")
        num_nodes, num_devices = int(match["nodes"]), int(match["devices"])
        memory_gib = float(match["memory"]) if match["memory"] else None
        if num_nodes == 0 or num_devices == 0 or memory_gib == 0:
            raise PlanError(f"pool '{text}': '{part.strip()}' holds a zero, and so no device. {shape}")
        if num_nodes * num_devices > MAX_DEVICES:
            raise PlanError(f"pool '{text}': '{part.strip()}' is more than {MAX_DEVICES:,} devices. {shape}")
        kind: Kind = "cpu" if match["cpu"] else "gpu"
        labels: dict[str, str] = {kind: match["label"]} if match["label"] else {}
        nodes += [Node(f"node{len(nodes) + i}", num_devices, kind, memory_gib, labels) for i in range(num_nodes)]
    return Pool(tuple(nodes))


def local_pool(cpu_slots: int | None = None) -> Pool:
    """This machine: its GPUs as far as `CUDA_VISIBLE_DEVICES` shows them, else `cpu_slots` (its cores when None) CPU slots."""
    gpus = visible_gpus(query_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        labels = {gpu_label(gpu.name) for gpu in gpus}
        return Pool(
            (
                Node(
                    "local",
                    num_devices=len(gpus),
                    kind="gpu",
                    memory_gib=min(gpu.memory_gib for gpu in gpus),
                    labels={"gpu": labels.pop()} if len(labels) == 1 else {},
                    address="127.0.0.1",
                    device_ids=tuple(gpu.id for gpu in gpus),
                    free_gib=tuple(gpu.free_gib for gpu in gpus),
                    host_gib=host_gib(),
                ),
            )
        )
    return Pool((Node("local", num_devices=cpu_slots or num_cores(), kind="cpu", address="127.0.0.1"),))


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says how much memory a container may have, in the second and the first version of its control groups."""


def host_gib() -> float:
    """Memory of this machine, or of the container that this process is in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in LIMITS:
        with suppress(OSError, ValueError):  # another version, or "max"
            found.append(int(Path(path).read_text()))
    return min(found) / 2**30


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of `nvidia-smi`."""

    id: str
    """What `CUDA_VISIBLE_DEVICES` calls it."""
    uuid: str
    name: str
    memory_gib: float
    free_gib: float


def query_gpus() -> list[Gpu]:
    """The machine's GPUs as `nvidia-smi` lists them; none where it is missing, fails or hangs."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(answer)


def parse_gpus(answer: str) -> list[Gpu]:
    """Lines such as `0, GPU-5c1f..., NVIDIA H200, 143771, 143150`; others (a GPU that reports no memory) are skipped."""
    gpus = []
    for line in answer.splitlines():
        fields = [value.strip() for value in line.split(",")]
        if len(fields) == 5 and fields[3].isdigit() and fields[4].isdigit():
            total, free = (int(value) / 1024 for value in fields[3:])
            gpus.append(Gpu(id=fields[0], uuid=fields[1], name=fields[2], memory_gib=total, free_gib=free))
    return gpus


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """What CUDA shows under `CUDA_VISIBLE_DEVICES=setting`: the named GPUs in that order, up to the first name it does not know."""
    if setting is None:
        return list(gpus)
    visible: list[Gpu] = []
    for name in (part.strip() for part in setting.split(",")):
        named = [gpu for gpu in gpus if name == gpu.id or (name.startswith("GPU-") and gpu.uuid.startswith(name))]
        if len(named) != 1:
            break
        visible.append(replace(named[0], id=name))
    return visible


def gpu_label(name: str) -> str:
    """The model within a device name: `NVIDIA H100 80GB HBM3` → `H100`, `NVIDIA GeForce RTX 4090` → `RTX4090`."""
    words = [word for word in re.split(r"[\s-]+", name) if word.casefold() not in {"nvidia", "tesla", "geforce", "quadro"}]
    if not words:
        return name
    return words[0] + words[1] if words[0] in {"RTX", "GTX"} and len(words) > 1 else words[0]


def no_match(pool: Pool, where: Mapping[str, str]) -> str:
    """Why a selector matches no node: the label that no node has, and the nearest that one has."""
    for key, value in where.items():
        known = sorted({node.selectors[key] for node in pool.nodes if key in node.selectors})
        if not known:
            labels = sorted({label for node in pool.nodes for label in node.selectors})
            return f"no node has a label '{key}'.{nearest(key, labels)} The pool's labels: {', '.join(labels)}"
        if value.casefold() not in {label.casefold() for label in known}:
            return f"no node has {key}: {value}.{nearest(value, known)} The pool has {key}: {', '.join(known)}"
    wanted = ", ".join(f"{key}: {value}" for key, value in where.items())
    return f"no single node has all of {{{wanted}}}. The pool: {pool.describe()}"
