"""Run by test_nodes.py in a process of its own: the tiny run on a Ray cluster of two nodes with separate temporary folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiny import run_tiny
from two_nodes import two_nodes

from drumroll.cluster.weights import SyncReport, WeightSync
from drumroll.types import Version


def main(folder: Path) -> None:
    reports: list[SyncReport] = []
    push = WeightSync.push

    def noted(sync: WeightSync, version: Version, **kwargs: Any) -> SyncReport:
        reports.append(push(sync, version, **kwargs))
        return reports[-1]

    WeightSync.push = noted  # type: ignore[method-assign]
    with two_nodes() as (simulated, _):
        devices = {"actor_train": 0, "actor_infer": [0, 2]}
        run_tiny(folder, ray={"address": simulated.address}, devices=devices, warmup={"compare": False})
    print(json.dumps([list(report.transports.values()) for report in reports]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
