from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from drumroll.errors import PlanError
from drumroll.plan import Node, Pool, gpu_label, local_pool, parse_pool
from drumroll.plan import pool as pool_module
from drumroll.plan.pool import parse_gpus, query_gpus, visible_gpus

SMI = """0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 80123
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 81559, 80123
2, GPU-bbcc-3, NVIDIA H100 80GB HBM3, 81920, 12
3, GPU-dddd-4, NVIDIA Broken, [N/A], [N/A]
"""


def test_one_kind() -> None:
    pool = parse_pool("4x8x80GiB")
    assert len(pool.nodes) == 4
    assert len(pool.devices) == 32
    assert {(node.kind, node.num_devices, node.memory_gib) for node in pool.nodes} == {("gpu", 8, 80.0)}
    assert pool.describe() == "4 nodes × 8 GPUs of 80 GiB"


def test_several_kinds_with_labels() -> None:
    pool = parse_pool("1x2x80GiB:H100, 2x4x47.5GiB:L40S,1x2xcpu")
    assert [node.id for node in pool.nodes] == ["node0", "node1", "node2", "node3"]
    assert [node.labels for node in pool.nodes] == [{"gpu": "H100"}, {"gpu": "L40S"}, {"gpu": "L40S"}, {}]
    assert pool.nodes[1].memory_gib == 47.5
    assert pool.nodes[3].kind == "cpu"
    assert pool.describe() == "1 node × 2 GPUs of 80 GiB (H100), 2 nodes × 4 GPUs of 47.5 GiB (L40S), 1 node × 2 CPU slots"


MALFORMED = ["", "8", "4x8", "4x8x80", "4x8xGiB", "4x8x80GiB,", "x8x80GiB", "-1x8x80GiB", "4x8x80GiB:"]
OUT_OF_BOUNDS = ["0x8x80GiB", "4x0x80GiB", "1x1x0GiB", "9999999x8xcpu"]


@pytest.mark.parametrize("text", [*MALFORMED, *OUT_OF_BOUNDS])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match=r"(?s)pool '.*4x8x80GiB:H100"):
        parse_pool(text)


def test_gpus_are_numbered_before_cpu_slots() -> None:
    pool = Pool((Node("head", 4, "cpu"), Node("worker", 2, "gpu")))
    assert [(device.index, device.node, device.local) for device in pool.devices[:3]] == [
        (0, "worker", 0),
        (1, "worker", 1),
        (2, "head", 0),
    ]
    assert [device.node for device in pool.candidates({})] == ["worker", "worker"]
    assert len(pool.candidates({"kind": "cpu"})) == 4
    assert len(pool.candidates({"node": "HEAD"})) == 4


def test_a_pool_needs_devices_and_distinct_nodes() -> None:
    with pytest.raises(PlanError, match=r"no devices.*ray\.cpu_slots"):
        Pool((Node("a", 0, "cpu"),))
    with pytest.raises(PlanError, match="names nodes twice: a"):
        Pool((Node("a", 1, "cpu"), Node("a", 2, "cpu"), Node("b", 2, "cpu")))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA", "NVIDIA"),
    ],
)
def test_gpu_label(name: str, label: str) -> None:
    assert gpu_label(name) == label


@pytest.mark.parametrize(
    ("setting", "ids"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("1,7,0", ["1"]),
        ("GPU-aaaa", ["GPU-aaaa"]),
        ("GPU-bb,0", []),
    ],
)
def test_cuda_visible_devices(setting: str | None, ids: list[str]) -> None:
    assert [gpu.id for gpu in visible_gpus(parse_gpus(SMI), setting)] == ids


def test_local_pool_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "query_gpus", lambda: parse_gpus(SMI))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    (node,) = local_pool(cpu_slots=3).nodes
    assert (node.kind, node.num_devices, node.labels) == ("gpu", 2, {"gpu": "H100"})
    assert node.memory_gib == pytest.approx(81559 / 1024)
    assert [node.device_id(local) for local in range(2)] == ["2", "1"]


def test_local_pool_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "query_gpus", list)
    assert local_pool(cpu_slots=3).describe() == "1 node × 3 CPU slots"
    assert local_pool().nodes[0].num_devices >= 1


@pytest.mark.parametrize(
    "failure", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20), subprocess.CalledProcessError(9, "")]
)
def test_a_machine_whose_nvidia_smi_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", fail)
    assert query_gpus() == []


@pytest.mark.parametrize(("limit", "gib"), [("8589934592\n", 8.0), ("max\n", None), (None, None)])
def test_a_container_has_no_more_memory_than_it_may_use(
    limit: str | None, gib: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(pool_module, "LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "other")))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert pool_module.host_gib() == (min(gib, whole) if gib is not None else whole)
