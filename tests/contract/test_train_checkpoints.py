"""What every registered training backend's saved state must be good for, and the format of its files.

Run as a script, this file is one of two ranks (see `test_another_number_of_ranks_goes_on`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_train_backends import FAULTY, LOSSES, LR, VOCABULARY, make_backend, make_batch, run_two_ranks, shards_of, weights_of
from torch import Tensor

from drumroll.algo.loss import ppo_clip
from drumroll.backends.train.base import Head, TrainBackend
from drumroll.backends.train.shards import Extent, RankState, Shards, export_folder, write_rank
from drumroll.errors import CheckpointError, ModelError, RunFolderError
from drumroll.registry import REGISTRY
from drumroll.text.packing import select
from drumroll.types import RankInfo, Schedule
from drumroll.workers.trainer import TrainWorker

Make = Callable[..., TrainBackend]
DECAY: dict[str, Any] = {"schedule": "cosine", "total_updates": 6, "weight_decay": 0.1}


def contents(folder: Path) -> dict[str, Tensor]:
    """Every whole tensor of a saved state."""
    with Shards(folder) as shards:
        return {key: shards.read(key) for key in sorted(shards.tensors)}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def assert_same_state(got: RankState, expected: RankState) -> None:
    assert (got.schedule, got.update) == (expected.schedule, expected.update)
    assert [extent for extent, _ in got.pieces] == [extent for extent, _ in expected.pieces]
    assert_same({extent.key: values for extent, values in got.pieces}, {extent.key: values for extent, values in expected.pieces})
    assert_same(got.rng, expected.rng)


@pytest.mark.parametrize(
    ("name", "dtype", "head"),
    [
        ("qwen2", "float32", "lm"),
        ("gpt2", "float32", "lm"),
        ("llama", "bfloat16", "lm"),
        ("qwen2", "float32", "scalar"),
        ("gpt2_scalar", "bfloat16", "scalar"),
    ],
)
def test_a_loaded_state_goes_on_bit_for_bit(name: str, dtype: str, head: Head, models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    loss = LOSSES[head]
    backend = make(models[name], dtype=dtype, head=head, **DECAY)
    backend.save(backend.snapshot(), tmp_path / "start")
    backend.train([make_batch(0), make_batch(1)], loss)
    torch.rand(5)  # so that the generator is not where every backend starts
    here = backend.snapshot()
    expected_draw = torch.rand(3)
    at_save = weights_of(backend)
    metrics = backend.train([make_batch(2)], loss)
    saving = threading.Thread(target=backend.save, args=(here, tmp_path / "here"))
    saving.start()
    metrics += backend.train([make_batch(3)], loss)
    saving.join()
    end = weights_of(backend)
    stem = "rank-00000-of-00001"
    for folder in ("start", "here"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [f"{stem}.json", f"{stem}.safetensors"]

    fresh = make(models[name], dtype=dtype, head=head, weight_decay=0.1)
    fresh.load(tmp_path / "here")
    assert_same_state(fresh.snapshot(), here)
    assert torch.equal(torch.rand(3), expected_draw), "random states"
    assert_same(weights_of(fresh), at_save)
    assert [update for seed in (2, 3) for update in fresh.train([make_batch(seed)], loss)] == metrics
    assert_same(weights_of(fresh), end)

    fresh.load(tmp_path / "start")
    fresh.train([make_batch(seed) for seed in range(4)], loss)
    assert_same(weights_of(fresh), end)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "reduce_every_pass": False}])
def test_an_update_that_is_not_finite_leaves_the_state_as_it_was(options: dict[str, Any], models: dict[str, Path], make: Make) -> None:
    backend = make(models["llama"], micro_batch_tokens=40, **DECAY, **options)
    backend.train([make_batch(0)], ppo_clip)
    here = backend.snapshot()
    for loss in FAULTY:
        metrics = backend.train([make_batch(1)], loss)[0]
        assert (metrics["skipped"], metrics["nonfinite"]) == (1.0, 1.0)
        assert_same_state(backend.snapshot(), here)
    after = backend.train([make_batch(1)], ppo_clip)[0]
    assert (after["skipped"], after["nonfinite"]) == (0.0, 0.0)
    assert all(values.isfinite().all() for _, values in backend.snapshot().pieces)


@pytest.mark.parametrize("kind", REGISTRY.names("train_backend"))
def test_a_worker_saves_beside_its_training_and_keeps_no_snapshot(
    kind: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = RankInfo("actor_train", 0, 1, "cpu")
    worker = TrainWorker(place, trainer={"kind": kind}, model_folder=str(models["llama"]), dtype="float32", seed=0)
    worker.begin(Schedule(LR, 9))
    worker.imitate([make_batch(0)])
    worker.snapshot()
    here, kept = worker.backend.snapshot(), weakref.ref(worker._snapshot)
    writing, trained = threading.Event(), threading.Event()
    write = worker.backend.save

    def write_once_trained(state: RankState, folder: Path) -> None:
        writing.set()
        assert trained.wait(60), "training waits for the disk"
        write(state, folder)

    async def train_meanwhile() -> None:
        saving = asyncio.create_task(worker.save(str(tmp_path / "state")))
        await asyncio.to_thread(writing.wait)
        worker.imitate([make_batch(1)])
        trained.set()
        await saving

    with monkeypatch.context() as patch:
        patch.setattr(worker.backend, "save", write_once_trained)
        asyncio.run(train_meanwhile())
    gc.collect()
    assert kept() is None
    worker.load(str(tmp_path / "state"))
    assert_same_state(worker.backend.snapshot(), here)

    worker.snapshot()
    kept = weakref.ref(worker._snapshot)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        asyncio.run(worker.save(str(tmp_path / "file")))
    gc.collect()
    assert kept() is None
    with pytest.raises(AssertionError, match="snapshot comes before save"):
        asyncio.run(worker.save(str(tmp_path / "state")))
    worker.close()


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "float32"), ("gpt2", "bfloat16")])
def test_a_saved_state_becomes_a_model_without_a_backend(
    name: str, dtype: str, models: dict[str, Path], make: Make, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    backend = make(models[name], dtype=dtype)
    backend.train([make_batch()], ppo_clip)
    backend.save(backend.snapshot(), tmp_path / "state")
    backend.export(tmp_path / "expected")
    export_folder(tmp_path / "state", models[name], tmp_path / "out" / "whole")
    export_folder(tmp_path / "state", models[name], tmp_path / "out" / "split", max_file_bytes=6000)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["split", "whole"], "nothing is left beside them"
    assert len(list((tmp_path / "out" / "split").glob("model-*-of-*.safetensors"))) > 2
    assert_same(load_file(tmp_path / "out" / "whole" / "model.safetensors"), load_file(tmp_path / "expected" / "model.safetensors"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "expected").state_dict()
    settings = AutoConfig.from_pretrained(tmp_path / "expected").to_dict()
    for layout in ("whole", "split"):
        out = tmp_path / "out" / layout
        assert_same(AutoModelForCausalLM.from_pretrained(out).state_dict(), expected)
        assert {**AutoConfig.from_pretrained(out).to_dict(), "_name_or_path": ""} == {**settings, "_name_or_path": ""}
        assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(models[name]).get_vocab()
        assert {path.name for path in out.iterdir()} >= {path.name for path in (tmp_path / "expected").iterdir() if path.suffix == ".json"}
    with pytest.raises(RunFolderError, match="not empty"):
        export_folder(tmp_path / "state", models[name], tmp_path / "expected")
    with pytest.raises(ModelError, match=r"no config\.json"):
        export_folder(tmp_path / "state", tmp_path / "state", tmp_path / "out" / "other")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "rank-00000-of-00001.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "rank-00000-of-00001.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_both(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_tensors(folder, change)
    edit_index(folder, lambda index: change(index["tensors"]))


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


NORM = "weight/model.norm.weight"
DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no folder": ("holds no training state", shutil.rmtree),
    "no tensors": (
        r"incomplete: 1 ranks wrote it, and rank-00000-of-00001\.safetensors is not there",
        lambda folder: (folder / "rank-00000-of-00001.safetensors").unlink(),
    ),
    "a rank too few": (
        r"incomplete: 2 ranks wrote it, and rank-00001-of-00002\.json",
        lambda folder: [path.rename(str(path).replace("of-00001", "of-00002")) for path in list(folder.iterdir())],
    ),
    "other files": ("different runs: of 1 and of 3 ranks", lambda folder: (folder / "rank-00002-of-00003.json").write_text("{}")),
    "cut tensors": (r"rank-00000-of-00001\.safetensors' is missing or damaged", lambda f: cut(f / "rank-00000-of-00001.safetensors", 0.9)),
    "cut header": (r"rank-00000-of-00001\.safetensors' is missing or damaged", lambda f: cut(f / "rank-00000-of-00001.safetensors", 0.001)),
    "cut index": (r"rank-00000-of-00001\.json' is damaged", lambda folder: cut(folder / "rank-00000-of-00001.json", 0.5)),
    "another format": ("not an index of this format: format", lambda folder: edit_index(folder, lambda index: index.update(format=1))),
    "renamed": ("rank 1 of 2: it was renamed", lambda folder: edit_index(folder, lambda index: index.update(rank=1, world=2))),
    "a tensor not stored": (f"'{NORM}' has shape nothing", lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(NORM))),
    "a tensor not listed": ("speaks of nothing", lambda folder: edit_tensors(folder, lambda tensors: tensors.update(x=torch.ones(2)))),
    "rows not stored": (
        r"some values of 'weight/model\.norm\.weight' are in no rank's file, or in two",
        lambda folder: edit_index(folder, lambda index: index["tensors"][NORM].update(box=[[0, 16]])),
    ),
    "a moment missing": (
        r"of 'model\.norm\.weight' it holds",
        lambda folder: edit_both(folder, lambda tensors: tensors.pop("exp_avg/model.norm.weight")),
    ),
    "no random state": ("lacks the state of the random", lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("rng/cpu"))),
    "a wrong random state": (
        "'rng/cpu' is no state of that generator",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update({"rng/cpu": torch.zeros(8, dtype=torch.uint8)})),
    ),
    "another dtype": (
        f"'{NORM}' is stored as torch.bfloat16",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()})),
    ),
}


def test_damaged_incomplete_and_foreign_states_are_refused(models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    backend = make(models["llama"])
    backend.train([make_batch(0)], ppo_clip)
    here = backend.snapshot()
    backend.save(here, tmp_path / "good")
    for name, (message, damage) in DAMAGES.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(CheckpointError, match=message) as raised:
            backend.load(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value), name
        assert_same_state(backend.snapshot(), here)
    other = make(models["gpt2"])
    before = other.snapshot()
    with pytest.raises(CheckpointError, match=r"state of another model: 'lm_head\.weight' has shape \(40, 32\) there and nothing in"):
        other.load(tmp_path / "good")
    assert_same_state(other.snapshot(), before)
    critic = make(models["llama"], head="scalar")
    with pytest.raises(CheckpointError, match=r"state of another model: 'lm_head\.weight'"):
        critic.load(tmp_path / "good")
    after = backend.train([make_batch(1)], ppo_clip)
    backend.load(tmp_path / "good")
    assert backend.train([make_batch(1)], ppo_clip) == after, "a refused state leaves everything as it was"


def state_of(tensors: dict[str, Tensor], rank: int, world: int, update: int = 3) -> RankState:
    """What `rank` holds of whole tensors, cut as FSDP2 cuts them."""
    pieces = []
    for name, tensor in tensors.items():
        chunk = -(-len(tensor) // world)
        rows = (min(rank * chunk, len(tensor)), min((rank + 1) * chunk, len(tensor)))
        extent = Extent(parameter=name, what="weight", shape=tuple(tensor.shape), box=(rows, *((0, size) for size in tensor.shape[1:])))
        pieces.append((extent, tensor[slice(*rows)]))
    rng = {"cpu": torch.Generator().manual_seed(rank).get_state()}
    return RankState(pieces, Schedule(0.1 + 0.2, 7, "linear", 2, 1 / 3), update, rng)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: int, writers: int, readers: int, dtype: torch.dtype
) -> None:
    """Also where the last ranks hold less, or nothing."""
    folder = tmp_path_factory.mktemp("state")
    tensors = {"α.weight": torch.arange(rows * 6).reshape(rows, 2, 3).to(dtype), "bias": torch.arange(rows).float() + 0.5}
    for rank in range(writers):
        write_rank(folder, rank, writers, "float32", state_of(tensors, rank, writers))
    with Shards(folder) as shards:
        assert shards.schedule == Schedule(0.1 + 0.2, 7, "linear", 2, 1 / 3)
        assert (shards.update, shards.dtype) == (3, "float32")
        for reader in range(readers):
            assert torch.equal(shards.rng(reader)["cpu"], torch.Generator().manual_seed(reader % writers).get_state())
            for extent, expected in state_of(tensors, reader, readers).pieces:
                got = shards.read(extent.key, extent.box)
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)


def test_ranks_that_wrote_different_states_are_noticed(tmp_path: Path) -> None:
    tensors = {"bias": torch.arange(5.0)}
    write_rank(tmp_path, 0, 2, "float32", state_of(tensors, 0, 2))
    write_rank(tmp_path, 1, 2, "float32", state_of(tensors, 1, 2, update=4))
    with pytest.raises(CheckpointError, match=r"mixes different states: rank 0 wrote update 3 .* rank 1 update 4"):
        Shards(tmp_path)
    write_rank(tmp_path, 1, 2, "float32", state_of({"bias": torch.arange(6.0)}, 1, 2))
    with pytest.raises(CheckpointError, match="rank 1 describes 'weight/bias'"):
        Shards(tmp_path)


def make_uneven(folder: Path) -> None:
    """A model of whose matrices the second of two ranks holds less than the first (the embedding), or nothing (in the MLP)."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 1, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCABULARY + 1, **size, num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def as_rank(rank: int, kind: str, root: Path, port: str) -> None:
    """What each of the two processes does: save its own, go on from that of a single rank, from its own, after updates that the other
    rank broke, and after a state that the other rank cannot read."""
    torch.set_num_threads(1)
    place = RankInfo("actor_train", rank, 2, "cpu", rendezvous=f"127.0.0.1:{port}")
    backend = make_backend(kind, root / "model", place, **DECAY)
    shards = [select(make_batch(seed), shards_of(make_batch(seed), seed)[rank]) for seed in range(3)]
    backend.train(shards[:2], ppo_clip)
    backend.save(backend.snapshot(), root / "two")
    seen = {"two": backend.train(shards[2:], ppo_clip)}
    expected = weights_of(backend)  # collective: by now both ranks have written their files

    backend.load(root / "one")
    backend.save(backend.snapshot(), root / "again")
    seen["one"] = backend.train(shards[2:], ppo_clip)
    save_file(weights_of(backend), root / f"one{rank}.safetensors")

    backend.load(root / "two")
    here = backend.snapshot()
    for loss in FAULTY:
        metrics = backend.train(shards[:1], loss if rank == 1 else ppo_clip)[0]
        assert (metrics["skipped"], metrics["nonfinite"]) == (1.0, 1.0)
        assert_same_state(backend.snapshot(), here)
    assert backend.train(shards[2:], ppo_clip) == seen["two"]
    assert_same(weights_of(backend), expected)
    save_file(expected, root / f"two{rank}.safetensors")

    # A file that only one of the two can read: both refuse, and both stay where they are.
    damaged = root / f"seen by rank {rank}"
    shutil.copytree(root / "two", damaged)
    if rank == 1:
        cut(damaged / "rank-00000-of-00002.safetensors", 0.5)
    here = backend.snapshot()
    try:
        backend.load(damaged)
    except CheckpointError as error:
        seen["refused"] = str(error).split("'")[1].replace(str(root), "")
    assert_same_state(backend.snapshot(), here)
    (root / f"rank{rank}.json").write_text(json.dumps(seen))
    backend.close()


@pytest.mark.parametrize("kind", REGISTRY.names("train_backend"))
def test_another_number_of_ranks_goes_on(kind: str, tmp_path: Path) -> None:
    make_uneven(tmp_path / "model")
    alone = make_backend(kind, tmp_path / "model", **DECAY)
    alone.train([make_batch(0), make_batch(1)], ppo_clip)
    alone.save(alone.snapshot(), tmp_path / "one")
    one = alone.train([make_batch(2)], ppo_clip)
    weights = {"one": weights_of(alone)}

    seen = run_two_ranks(__file__, kind, tmp_path, 1)
    assert seen[0] == seen[1]
    assert seen[0]["refused"] == "/seen by rank 1/rank-00000-of-00002.safetensors"

    assert_same(contents(tmp_path / "again"), contents(tmp_path / "one"))
    alone.load(tmp_path / "two")
    alone.save(alone.snapshot(), tmp_path / "back")
    assert_same(contents(tmp_path / "back"), contents(tmp_path / "two"))
    two = alone.train([make_batch(2)], ppo_clip)
    weights["two"] = weights_of(alone)
    for name, metrics in (("one", one), ("two", two)):
        assert seen[0][name][0] == pytest.approx(metrics[0], rel=1e-3, abs=1e-6)
        for rank in range(2):
            after = load_file(tmp_path / f"{name}{rank}.safetensors")
            for key, tensor in weights[name].items():
                torch.testing.assert_close(after[key], tensor, rtol=0, atol=LR * 0.02)
    export_folder(tmp_path / "two", tmp_path / "model", tmp_path / "exported")
    alone.load(tmp_path / "two")
    assert_same(load_file(tmp_path / "exported" / "model.safetensors"), weights_of(alone))
    alone.close()


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
