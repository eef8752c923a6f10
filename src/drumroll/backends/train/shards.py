"""A training state on disk: one safetensors file and one JSON index per rank, readable by ranks of any number and layout.

    rank-00000-of-00002.safetensors    weight/NAME, exp_avg/NAME, exp_avg_sq/NAME, step/NAME: this rank's parts; rng/cpu, rng/cuda
    rank-00000-of-00002.json           which parts of which tensors these are; schedule, update, dtype

NAME is the parameter's name in the model. Of several ranks with the same part of a tensor, one writes it. That the files are whole, and
that they appear all at once, is the business of whoever owns the folder.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumroll.errors import CheckpointError, ModelError, RunFolderError
from drumroll.models.division import in_files
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


Box = tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
"""Start and end along each dim: a part of a tensor."""


class Extent(BaseModel):
    """What a rank holds of one tensor.

    Example: rows 0 to 16 of a matrix: `Extent(parameter="lm_head.weight", what="exp_avg", shape=(32, 8), box=((0, 16), (0, 8)))`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameter: str
    what: What
    shape: tuple[NonNegativeInt, ...]
    """Of the whole tensor."""
    box: Box

    @property
    def key(self) -> str:
        return f"{self.what}/{self.parameter}"

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of what is held."""
        return tuple(end - start for start, end in self.box)


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


@dataclass(frozen=True)
class RankState:
    """One rank's share of a training state, in host memory."""

    pieces: list[tuple[Extent, Tensor]]
    """Weights and persistent buffers, and AdamW's state of those that have been updated; of what other ranks hold as well, on one of
    them."""
    schedule: Schedule | None
    update: int
    rng: dict[str, Tensor]
    """State of torch's generators: `cpu`, and `cuda` where the rank has such a device."""


class _Index(BaseModel):
    """The JSON beside a rank's tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2]
    rank: NonNegativeInt
    world: PositiveInt
    dtype: str
    """What passes computed in; weights and moments are stored as they are held."""
    schedule: Schedule | None
    update: NonNegativeInt
    tensors: dict[str, Extent]


def write_rank(folder: Path, rank: int, world: int, dtype: str, state: RankState) -> None:
    """Write one rank's files, down to the disk. Needs nothing but its arguments, so any thread may do it."""
    index = _Index(
        format=2,
        rank=rank,
        world=world,
        dtype=dtype,
        schedule=state.schedule,
        update=state.update,
        tensors={extent.key: extent for extent, _ in state.pieces},
    )
    named = [*((extent.key, values) for extent, values in state.pieces), *((f"rng/{name}", values) for name, values in state.rng.items())]
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

    Example: `with Shards(folder) as shards: tensor = shards.read("weight/lm_head.weight", ((0, 16), (0, 8)))`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._indices = _read_indices(folder)
        first = self._indices[0]
        self.dtype, self.schedule, self.update = first.dtype, first.schedule, first.update
        self.tensors: dict[str, Extent] = {}
        """Every whole tensor by its key."""
        self._parts: dict[str, list[tuple[Box, int]]] = {}
        """What ranks hold of a tensor, and which ranks."""
        for index in self._indices:
            if (index.dtype, index.schedule, index.update) != (self.dtype, self.schedule, self.update):
                raise CheckpointError(
                    f"'{folder}' mixes different states: rank 0 wrote update {self.update} ({self.dtype}, {self.schedule}), "
                    f"rank {index.rank} update {index.update} ({index.dtype}, {index.schedule})."
                )
            for key, extent in index.tensors.items():
                self._add(key, extent, index.rank)
        for key in self.tensors:
            self._check_complete(key)

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
        whole = extent.model_copy(update={"box": whole_box(extent.shape)})
        fits = len(extent.box) == len(extent.shape) and all(
            start <= end <= size for (start, end), size in zip(extent.box, extent.shape, strict=True)
        )
        if key != extent.key or self.tensors.setdefault(key, whole) != whole or not fits:
            raise CheckpointError(f"'{self._folder}': rank {rank} describes '{key}' as {extent}; {self.tensors.get(key)} was expected.")
        if math.prod(extent.held):
            self._parts.setdefault(key, []).append((extent.box, rank))

    def _check_complete(self, key: str) -> None:
        """Raise unless the parts make up the whole tensor, each of its values once. Ranks cut along straight lines: whatever the layout,
        their parts are the cells of a lattice."""
        boxes = [box for box, _ in self._parts.get(key, ())]
        shape = self.tensors[key].shape
        starts = [sorted({0, *(box[dim][0] for box in boxes)}) for dim in range(len(shape))]
        cells = [list(zip(first, [*first[1:], size], strict=True)) for first, size in zip(starts, shape, strict=True)]
        if math.prod(map(len, cells)) != len(boxes) or sorted(boxes) != sorted(itertools.product(*cells)):
            raise CheckpointError(f"'{self._folder}': some values of '{key}' are in no rank's file, or in two.")

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

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, or all of it, in memory of its own."""
        wanted = whole_box(self.tensors[key].shape) if box is None else box
        shared = [(part, rank, common) for part, rank in self._parts.get(key, ()) if (common := overlap(part, wanted)) is not None]
        pieces = [(common, self._slice(key, rank, part, common)) for part, rank, common in shared]
        if len(pieces) == 1 and pieces[0][0] == wanted:
            return pieces[0][1].clone()
        result = torch.empty([end - start for start, end in wanted], dtype=self.value_dtype(key))
        for common, values in pieces:
            result[_within(common, wanted)] = values
        return result

    def _slice(self, key: str, rank: int, part: Box, common: Box) -> Tensor:
        """What a rank's file has of a part that lies within its own."""
        if not part:
            return self._files[rank].get_tensor(key)  # type: ignore[no-any-return]
        return self._files[rank].get_slice(key)[_within(common, part)]  # type: ignore[no-any-return]

    def value_dtype(self, key: str) -> torch.dtype:
        """What a tensor's values are stored as."""
        stored = self._files[self._parts[key][0][1]].get_slice(key).get_dtype()
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
        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        weights = [extent for extent in shards.tensors.values() if extent.what == "weight"]
        sources = [source for extent in weights for source in _weight_sources(shards, extent, str(config.get("model_type")))]
        files = _split(sources, max_file_bytes)
        for name, content in files.items():
            _write_safetensors(aside / name, content)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(source.num_bytes for source in sources)},
                "weight_map": {source.name: name for name, content in files.items() for source in content},
            }
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
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


def _weight_sources(shards: Shards, extent: Extent, model_type: str) -> Iterator[_Source]:
    """A weight as the model's files name and cut it."""
    stored = shards.value_dtype(extent.key)
    dtype: torch.dtype = getattr(torch, shards.dtype) if stored.is_floating_point else stored
    for name, index in in_files(model_type, extent.parameter, extent.shape):
        given = [(place, place + 1) if isinstance(place, int) else (place.start, place.stop) for place in index]
        box = (*given, *whole_box(extent.shape)[len(given) :])
        shape = tuple(end - start for start, end in box[sum(isinstance(place, int) for place in index) :])
        yield _Source(name, dtype, shape, partial(_read_as, shards, extent.key, box, dtype, shape))


def _read_as(shards: Shards, key: str, box: Box, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return shards.read(key, box).to(dtype).view(shape)


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


def overlap(one: Box, other: Box) -> Box | None:
    """What two parts of a tensor have in common, if anything; a scalar has itself."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < end for start, end in common) else None


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where in a tensor that holds `outer` the part `inner` lies."""
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(inner, outer, strict=True))


def _stem(rank: int, world: int) -> str:
    return f"rank-{rank:05}-of-{world:05}"
