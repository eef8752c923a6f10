"""What workers, and the controller before it starts any, may import: libraries that take seconds only where something needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drumroll.config.models import ScratchConfig
from drumroll.models.scratch import make_scratch

ROOT = Path(__file__).parents[3]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

HEAVY = ("matplotlib", "sympy", "torch", "torch._dynamo", "torch.distributed.tensor", "transformers")

CONTROLLER = """
from drumroll.config.load import load_config
from drumroll.pipelines import start
from drumroll.pipelines.job import prepare

prepare(load_config(["recipes/quickstart.yaml"], []))
"""

BESIDE = """
import asyncio
from drumroll.types import RankInfo
from drumroll.workers.environment import EnvironmentWorker
from drumroll.workers.recorder import RecorderWorker

rank = RankInfo("environment", 0, 1, "cpu")
domains = {"any": {"env": {"kind": "single_turn"}, "rewards": [{"kind": "exact_match"}]}}
worker = EnvironmentWorker(rank, model_folder="MODEL", domains=domains, max_turns=1, max_tokens=64)
asyncio.run(worker.connect([]))
RecorderWorker(rank, folder="MODEL/store").close()
"""

COMPUTE = """
from drumroll.types import RankInfo
from drumroll.workers.assembler import Assembler
from drumroll.workers.engine import EngineWorker

rank = RankInfo("actor_infer", 0, 1, "cpu")
Assembler(rank, num_shards=1, seed=0, algo={"advantage": {"kind": "grpo"}})
EngineWorker(rank, engine={"kind": "native", "num_slots": 4}, model_folder="MODEL", dtype="float32")
"""

TRAIN = """
from drumroll.types import RankInfo
from drumroll.workers.trainer import TrainWorker

rank = RankInfo("actor_train", 0, 1, "cpu")
TrainWorker(rank, trainer={"kind": "fsdp2"}, model_folder="MODEL", dtype="float32", seed=0, algo={"advantage": {"kind": "grpo"}})
"""


@pytest.mark.parametrize(
    ("code", "needed"),
    [(CONTROLLER, ["torch"]), (BESIDE, []), (COMPUTE, ["torch"]), (TRAIN, ["torch"])],
    ids=["run", "beside", "compute", "train"],
)
def test_only_what_is_needed_is_imported(tmp_path: Path, code: str, needed: list[str]) -> None:
    if "MODEL" in code:
        make_scratch(ScratchConfig(characters="abc", config=SIZES), tmp_path / "model", 0)
    code = code.replace("MODEL", str(tmp_path / "model")) + f"\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == str(needed)
