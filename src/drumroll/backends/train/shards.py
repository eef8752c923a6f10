"""A training state on disk: one safetensors file and one JSON index per rank, readable by any number of ranks.

    rank-00000-of-00002.safetensors    weight/NAME, exp_avg/NAME, exp_avg_sq/NAME, step/NAME: this rank's rows; rng/cpu, rng/cuda
    rank-00000-of-00002.json           which rows of which tensors these are; schedule, update, dtype

NAME is the parameter's name in the model's Hugging Face files. That the files are whole, and that they appear all at once, is the
business of whoever owns the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumroll.errors import CheckpointError, ModelError, RunFolderError
from drumroll.types import Schedule

What = Literal["weight", "exp_avg", "exp_avg_sq", "step"]
"""A parameter itself, or what AdamW keeps of it."""

_RANK_FILE = re.compile(r"rank-(\d{5})-of-(\d{5})\.json")

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the safetensors format calls them."""

SCORE = "score.weight"
"""The weights of a scalar head."""

_COPIED_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")
"""Files of a model folder besides weights: config, tokenizer, chat template, the model's own code and the like."""


class Extent(BaseModel):
    """What a rank holds of one tensor.

    Example: rows 0 to 16 of a matrix: `Extent(parameter="lm_head.weight", what="exp_avg", shape=(32, 8), rows=(0, 16))`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameter: str
    what: What
    shape: tuple[NonNegativeInt, ...]
    """Of the whole tensor."""
    rows: tuple[NonNegativeInt, NonNegativeInt] | None
    """Start and end along dim 0; None where every rank has the whole tensor, and rank 0 writes it."""

    @property
    def key(self) -> str:
        return f"{self.what}/{self.parameter}"

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of what is held."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])


@dataclass(frozen=True)
class RankState:
    """One rank's share of a training state, in host memory."""

    pieces: list[tuple[Extent, Tensor]]
    """Weights and persistent buffers, and AdamW's state of those that have been updated."""
    schedule: Schedule | None
    update: int
    rng: dict[str, Tensor]
    """State of torch's generators: `cpu`, and `cuda` where the rank has such a device."""


class _Index(BaseModel):
    """The JSON beside a rank's tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1]
    rank: NonNegativeInt
    world: PositiveInt
    dtype: str
    """What passes computed in; weights and moments are stored as they are held."""
    schedule: Schedule | None
    update: NonNegativeInt
    tensors: dict[str, Extent]


def write_rank(folder: Path, rank: int, world: int, dtype: str, state: RankState) -> None:
    """Write one rank's files, down to the disk. Needs nothing but its arguments, so any thread may do it."""
    pieces = [(extent, values) for extent, values in state.pieces if extent.rows is not None or rank == 0]
    index = _Index(
        format=1,
        rank=rank,
        world=world,
        dtype=dtype,
        schedule=state.schedule,
        update=state.update,
        tensors={extent.key: extent for extent, _ in pieces},
    )
    named = [*((extent.key, values) for extent, values in pieces), *((f"rng/{name}", values) for name, values in state.rng.items())]
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(rank, world)
    _write_safetensors(
        folder / f"{stem}.safetensors",
        [_Source(key, values.dtype, tuple(values.shape), values.detach) for key, values in named],
    )
    with (folder / f"{stem}.json").open("w", encoding="utf-8") as file:
        json.dump(index.model_dump(mode="json"), file)
        file.flush()
        os.fsync(file.fileno())


class Shards:
    """All ranks' files of a training state, as whole tensors. Everything but the values themselves is checked at once.

    Example: `with Shards(folder) as shards: tensor = shards.read("weight/lm_head.weight", rows=(0, 16))`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._indices = _read_indices(folder)
        first = self._indices[0]
        self.dtype, self.schedule, self.update = first.dtype, first.schedule, first.update
        self.tensors: dict[str, Extent] = {}
        """Every whole tensor by its key."""
        self._parts: dict[str, list[tuple[int, int, int]]] = {}
        """Start row, end row and rank of what each rank holds of a tensor, in order; a scalar counts as one row."""
        for index in self._indices:
            if (index.dtype, index.schedule, index.update) != (self.dtype, self.schedule, self.update):
                raise CheckpointError(
                    f"'{folder}' mixes different states: rank 0 wrote update {self.update} ({self.dtype}, {self.schedule}), "
                    f"rank {index.rank} update {index.update} ({index.dtype}, {index.schedule})."
                )
            for key, extent in index.tensors.items():
                self._add(key, extent, index.rank)
        for key, parts in self._parts.items():
            parts.sort()
            ends = [0, *(end for _, end, _ in parts)]
            starts = [*(start for start, _, _ in parts), _num_rows(self.tensors[key])]
            for end, start in zip(ends, starts, strict=True):
                if end != start:
                    raise CheckpointError(
                        f"'{folder}': rows {min(start, end)} to {max(start, end)} of '{key}' are in no rank's file, or in two."
                    )

        parameters: dict[str, dict[str, tuple[int, ...]]] = {}
        for extent in self.tensors.values():
            parameters.setdefault(extent.parameter, {})[extent.what] = extent.shape
        for parameter, found in parameters.items():
            shape = found.get("weight")
            if found not in ({"weight": shape}, {"weight": shape, "exp_avg": shape, "exp_avg_sq": shape, "step": ()}):
                raise CheckpointError(
                    f"'{folder}': of '{parameter}' it holds {found}; a weight was expected, alone or with all of AdamW's state of it."
                )

    def _add(self, key: str, extent: Extent, rank: int) -> None:
        whole = extent.model_copy(update={"rows": None})
        if key != extent.key or self.tensors.setdefault(key, whole) != whole:
            raise CheckpointError(f"'{self._folder}': rank {rank} describes '{key}' as {extent}; {self.tensors.get(key)} was expected.")
        start, end = extent.rows or (0, _num_rows(extent))
        self._parts.setdefault(key, []).append((start, end, rank))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = [self._open(index, stack) for index in self._indices]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, index: _Index, stack: ExitStack) -> Any:
        path = self._folder / f"{_stem(index.rank, index.world)}.safetensors"
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.offset_keys() if not key.startswith("rng/")}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"'{path}' is missing or damaged: {error}") from error
        if "rng/cpu" not in file.offset_keys():
            raise CheckpointError(f"'{path}' is damaged: it lacks the state of the random generator.")
        listed = {key: extent.held for key, extent in index.tensors.items()}
        for key in sorted({*stored, *listed}):
            if stored.get(key) != listed.get(key):
                raise CheckpointError(
                    f"'{path}': '{key}' has shape {stored.get(key, 'nothing')}; its index speaks of {listed.get(key, 'nothing')}."
                )
        return file

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Some rows of a tensor, or all of it, in memory of its own."""
        extent = self.tensors[key]
        if not extent.shape:
            return self._files[self._parts[key][0][2]].get_tensor(key).clone()  # type: ignore[no-any-return]
        first, last = rows or (0, extent.shape[0])
        parts = [
            self._files[rank].get_slice(key)[max(start, first) - start : min(end, last) - start]
            for start, end, rank in self._parts[key]
            if max(start, first) < min(end, last)
        ]
        if parts:
            return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return torch.empty((0, *extent.shape[1:]), dtype=self.value_dtype(key))

    def value_dtype(self, key: str) -> torch.dtype:
        """What a tensor's values are stored as."""
        stored = self._files[self._parts[key][0][2]].get_slice(key).get_dtype()
        return next(dtype for dtype, name in _DTYPES.items() if name == stored)

    def rng(self, rank: int) -> dict[str, Tensor]:
        """States of torch's generators for a rank; ranks that the saving run did not have share those of the ones it had."""
        file = self._files[rank % len(self._files)]
        states = {key.removeprefix("rng/"): file.get_tensor(key).clone() for key in file.offset_keys() if key.startswith("rng/")}
        for device, state in states.items():
            if device == "cpu" or torch.cuda.is_available():
                try:
                    torch.Generator(device).set_state(state)
                except (RuntimeError, TypeError) as error:
                    raise CheckpointError(f"'{self._folder}': 'rng/{device}' is no state of that generator: {error}") from error
        return states


def export_folder(checkpoint_folder: Path, model_folder: Path, out: Path, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Join the weights of a training state into a Hugging Face folder, whole or not at all, one tensor in memory at a time.

    Weights come in the dtype that passes computed in; everything else is taken from `model_folder`."""
    if not (model_folder / "config.json").is_file():
        raise ModelError(f"'{model_folder}' is not a model folder: it has no config.json, so it cannot say what model the weights are of.")
    with Shards(checkpoint_folder) as shards, new_folder(out) as aside:
        sources = [_weight_source(shards, extent) for extent in shards.tensors.values() if extent.what == "weight"]
        files = _split(sources, max_file_bytes)
        for name, content in files.items():
            _write_safetensors(aside / name, content)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(source.num_bytes for source in sources)},
                "weight_map": {source.name: name for name, content in files.items() for source in content},
            }
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        if any(source.name == SCORE for source in sources):
            config |= _classifier_facts(config)
        (aside / "config.json").write_text(json.dumps({**config, "dtype": shards.dtype}, indent=2))
        copy_companions(model_folder, aside)


def _classifier_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the config of a language model that of the same model with a scalar head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    return {"architectures": [NAMES[config["model_type"]]], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write a model into, which becomes `folder` when all went well; with `replace`, in the place of what is there."""
    if not replace and folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"'{folder}' is not empty: a model is never written over something else. Choose another folder.")
    aside, old = (folder.with_name(f".{folder.name}.{part}") for part in ("partial", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            os.rename(folder, old)  # at once, where removing it would leave half a model for a while
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def copy_companions(model_folder: Path, folder: Path) -> None:
    """Copy what belongs to a model besides its weights, unless it is there already."""
    for file in sorted(model_folder.iterdir()):
        if file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json") and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


class _Source(NamedTuple):
    """A tensor that is to be written, and how to get at its values when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def _weight_source(shards: Shards, extent: Extent) -> _Source:
    stored = shards.value_dtype(extent.key)
    dtype: torch.dtype = getattr(torch, shards.dtype) if stored.is_floating_point else stored
    return _Source(extent.parameter, dtype, extent.shape, lambda: shards.read(extent.key).to(dtype))


def _split(sources: Sequence[_Source], max_file_bytes: int) -> dict[str, list[_Source]]:
    """Which tensors go into which file, in their order."""
    groups: list[list[_Source]] = [[]]
    for source in sources:
        if groups[-1] and sum(each.num_bytes for each in groups[-1]) + source.num_bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(source)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _write_safetensors(path: Path, sources: Sequence[_Source]) -> None:
    """The format's own writer takes all tensors at once and holds the interpreter until the last byte is written: training would
    stand still. This one asks for one tensor at a time and lets other threads run."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)  # every tensor begins at a multiple of its item size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for source in ordered:
        end = offset + source.num_bytes
        header[source.name] = {"dtype": _DTYPES[source.dtype], "shape": source.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for source in ordered:
            file.write(source.read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _read_indices(folder: Path) -> list[_Index]:
    """The indices of all ranks, in the order of the ranks."""
    present = {path.name: match for path in sorted(folder.glob("rank-*.json")) if (match := _RANK_FILE.fullmatch(path.name))}
    if not present:
        raise CheckpointError(f"'{folder}' holds no training state: files named like {_stem(0, 1)}.json were expected.")
    worlds = {int(match[2]) for match in present.values()}
    if len(worlds) > 1:
        raise CheckpointError(f"'{folder}' mixes the states of different runs: of {' and of '.join(map(str, sorted(worlds)))} ranks.")
    world = worlds.pop()
    stems = [_stem(rank, world) for rank in range(world)]
    missing = [f"{stem}.json" for stem in stems if f"{stem}.json" not in present]
    missing += [f"{stem}.safetensors" for stem in stems if not (folder / f"{stem}.safetensors").is_file()]
    if missing:
        raise CheckpointError(f"'{folder}' is incomplete: {world} ranks wrote it, and {', '.join(missing[:3])} is not there.")
    return [_read_index(folder / f"{stem}.json", rank, world) for rank, stem in enumerate(stems)]


def _read_index(path: Path, rank: int, world: int) -> _Index:
    try:
        index = _Index.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"'{path}' is not an index of this format: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' is damaged: {error}") from error
    if (index.rank, index.world) != (rank, world):
        raise CheckpointError(f"'{path}' says that it is of rank {index.rank} of {index.world}: it was renamed.")
    return index


def _num_rows(extent: Extent) -> int:
    return extent.shape[0] if extent.shape else 1


def _stem(rank: int, world: int) -> str:
    return f"rank-{rank:05}-of-{world:05}"
