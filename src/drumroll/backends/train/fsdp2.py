"""Training backend `fsdp2`: a Hugging Face causal LM, or one with a scalar head, sharded over the ranks by torch's FSDP2.

    update ─► micro-batches of packed trajectories ─► forward, loss, backward each ─► clip ─► AdamW

The ranks are a grid (`grid`): trajectories are dealt out along some axes, and the work on the same trajectories is shared along others
(`division`), whose ranks all compute the loss of all their tokens. What a rank is left with is sharded by FSDP2. Gradients are sums over
the grid, so that they do not depend on its shape.

Master weights are float32; passes compute in the model's dtype. All ranks make the same number of passes, so that their
collectives match: one that has run out of trajectories passes a placeholder of weight 0. A single rank is not wrapped: it has
nothing to share, and keeps masters of its own where it computes in narrower numbers (`masters`), or none where the weights do not learn,
because it learns adapters or is a reference or a teacher: it holds them in the model's dtype alone. On the CPU it computes models of the
Llama family by itself (`plain_llama`); all others are transformers' own modules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from drumroll.algo.loss import Loss, needs_of
from drumroll.backends.attention import PACKED_ATTENTION, PackedLayout, register_packed_attention
from drumroll.backends.llama_folder import LlamaFolder
from drumroll.backends.offload import Shelf, settle
from drumroll.backends.sampling import processed_logp
from drumroll.backends.sharded import local
from drumroll.backends.train.adamw import AdamW
from drumroll.backends.train.base import Metrics, TrainBackend
from drumroll.backends.train.beginnings import computed
from drumroll.backends.train.division import divide
from drumroll.backends.train.fused_layers import use_fused_layers
from drumroll.backends.train.grid import Grid, HeadExchange
from drumroll.backends.train.group import RankGroup
from drumroll.backends.train.head import HeadQuestion, can_be_asked
from drumroll.backends.train.lora import Adapters, LoraOptions, plain_name
from drumroll.backends.train.masters import Masters
from drumroll.backends.train.mismatch import mismatch, spread_of
from drumroll.backends.train.plain_llama import PlainLlama
from drumroll.backends.train.schedule import learning_rate
from drumroll.backends.train.shards import Extent, RankState, Shards, copy_companions, new_folder, write_rank
from drumroll.config.models import TrainerConfig
from drumroll.errors import CheckpointError, ModelError
from drumroll.models.division import in_files
from drumroll.models.folder import CLASSIFIER_ENDING
from drumroll.models.loading import check_complete, load_model
from drumroll.plan.cost import LEARNERS
from drumroll.registry import register
from drumroll.text.packing import micro_batches, pack_demonstrations, select, token_indices
from drumroll.types import Batch, RankInfo, Schedule, TopLogp

_LOGITS_PER_CHUNK = 2**27
"""Logits whose float32 copies are held at the same time: half a GiB each."""

EXPORTED_FILE = "4GB"
"""Of weights in one file of a model folder. As much is held in host memory while it is written."""

_FILLED_IN = frozenset({"entropy", "top_logp"})
"""Fields of the batch that a pass fills in where the loss needs them."""


@register.train_backend("fsdp2")
class Fsdp2(TrainBackend):
    """PyTorch FSDP2 over gloo or NCCL, on packed sequences."""

    axes = frozenset({"tp", "cp", "ep", "shard"})

    class Config(TrainerConfig):
        """Options of `fsdp2`."""

        reshard_after_forward: bool = True
        """Free each layer's gathered weights after its forward pass and gather them again in the backward pass; false keeps them."""
        reduce_every_pass: bool = True
        """Reduce gradients over the ranks in every micro-batch; false does so once per update, and holds whole gradients until then."""
        timeout_s: PositiveFloat = 600.0
        """A rank that does not answer the others for this long is given up."""
        fused_layers: bool = True
        """On a GPU, compute norms, rotations and gated products of models that Liger knows with its kernels. Needs `drumroll[gpu]`; without
        it, or without a GPU, this changes nothing."""
        lora: LoraOptions | None = None
        """Learn low-rank adapters in place of the weights; null learns the weights."""

    config: Config

    def setup(self, rank: RankInfo) -> None:
        torch.manual_seed(self.seed)
        self._device = torch.device(rank.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(self.config.threads)
        self._sharded = rank.world > 1
        self._is_narrow = not self._sharded and (rank.role not in LEARNERS or self.config.lora is not None)
        """Whether the weights themselves are held in the numbers that passes compute in, because they do not learn."""
        self._shelf = Shelf()
        self._group = RankGroup(rank, self.config.timeout_s)
        self._grid = Grid(self._group, self.parallel)
        self._model = self._load()
        names = _file_names(self._model)
        self._adapters = Adapters(self._model, self.config.lora) if self.config.lora else None
        self._division = divide(self._model, self._grid)
        asked = self.head == "lm" and can_be_asked(self._model)
        self._question = HeadQuestion(self._model, self._division.vocabulary) if asked else None
        if self._sharded:
            self._shard()
        self._model.to(self._device)
        has_masters = not self._sharded and not self._is_narrow and self.dtype != "float32"
        self._masters = Masters(self._model, getattr(torch, self.dtype), exact=self._exact_part()) if has_masters else None
        own = dict(self._model.named_parameters(remove_duplicate=False))
        self._computing: dict[str, Tensor] = {**own, **dict(self._model.named_buffers())}
        """What passes compute with, by name."""
        if self._masters:
            own = {name: self._masters.of(parameter) for name, parameter in own.items()}
        tensors = {**{plain_name(name): tensor for name, tensor in own.items()}, **dict(self._model.named_buffers())}
        self._tensors = {name: tensors[name] for name in names}
        self._pieces = {**self._division.pieces, **{plain_name(name): piece for name, piece in self._division.pieces.items()}}
        self._learning = {name: tensor for name, tensor in own.items() if tensor.requires_grad} if self._adapters else self._tensors
        """What training changes, by name: all of `_tensors`, or the adapters."""
        trained = self._masters.all if self._masters else self._model.parameters()
        self._parameters = [parameter for parameter in trained if parameter.requires_grad]
        self._piece_of = {id(tensor): self._pieces[name] for name, tensor in {**tensors, **self._learning}.items()}
        self._schedule: Schedule | None = None
        self._num_updates = 0
        self._optimizer = self._fresh_optimizer()
        with torch.no_grad():  # refuses a model that cannot be trained before anything depends on it
            self._score(_placeholder())
        self._reshard()

    def logprobs(self, batch: Batch) -> Tensor:
        assert self.head == "lm", "a scalar head has values and no log-probabilities"
        return self._outputs(batch)

    def values(self, batch: Batch) -> Tensor:
        assert self.head == "scalar", "a language model has log-probabilities and no values"
        return self._outputs(batch)

    def top_logprobs(self, batch: Batch, k: int) -> TopLogp:
        assert self.head == "lm", "a scalar head has values and no log-probabilities"
        size = min(k, self._vocab_size)
        said = TopLogp(
            torch.zeros(batch.num_tokens),
            torch.zeros(batch.num_tokens, size, dtype=torch.int32),
            torch.zeros(batch.num_tokens, size),
        )

        def say(part: Batch, tokens: Tensor) -> None:
            rows = self._own_rows(part)
            targets, temperature = part.token_ids[rows].to(self._device), _compared_at(part)[rows].to(self._device)
            logits = self._logits(part, rows - 1)
            rows = rows.to(self._device)
            parts = _likeliest(logits, targets, temperature, size)
            for target, value in zip((said.logp, said.ids, said.top_logp), parts, strict=True):
                spread = value.new_zeros(part.num_tokens, *value.shape[1:])
                target[tokens] = self._spread_out(spread, rows, value).to("cpu", target.dtype)

        self._pass_forward(batch, say)
        return said

    def given_logprobs(self, batch: Batch) -> Tensor:
        assert self.head == "lm", "a scalar head has values and no log-probabilities"
        assert batch.teacher_top_ids is not None, "a teacher names the tokens before anybody is asked about them"
        outputs = torch.zeros(batch.teacher_top_ids.shape)

        def say(part: Batch, tokens: Tensor) -> None:
            outputs[tokens] = self._score(part, fills={"top_logp"})[1]["top_logp"].cpu()

        self._pass_forward(batch, say)
        return outputs

    def _outputs(self, batch: Batch) -> Tensor:
        """[T] what the head says of each token, on the CPU and without gradient."""
        outputs = torch.zeros(batch.num_tokens)

        def say(part: Batch, tokens: Tensor) -> None:
            outputs[tokens] = self._score(part)[0].cpu()

        self._pass_forward(batch, say)
        return outputs

    def _pass_forward(self, batch: Batch, say: Callable[[Batch, Tensor], None]) -> None:
        """`say(part, where its tokens lie in the batch)` for every micro-batch, without gradient."""
        plan = micro_batches(batch.lengths, self.config.micro_batch_tokens, batch.units)
        with torch.no_grad():
            for number in range(max(self._group.gather(len(plan)))):
                if number < len(plan):
                    say(select(batch, plan[number]), token_indices(batch, plan[number]))
                else:
                    self._score(_placeholder())
        self._reshard()

    def train(self, updates: Sequence[Batch], loss: Loss) -> list[Metrics]:
        plans = [micro_batches(batch.lengths, self.config.micro_batch_tokens, batch.units) for batch in updates]
        mine = [
            (len(plan), float(batch.weight[batch.loss_mask].abs().sum()), int(batch.loss_mask.sum()), batch.num_tokens)
            for plan, batch in zip(plans, updates, strict=True)
        ]
        metrics: list[Metrics] = []
        log_ratios: list[Tensor] = []
        for batch, plan, *shards in zip(updates, plans, *self._grid.gather(mine), strict=True):
            passes, weights, loss_tokens, tokens = zip(*shards, strict=True)
            is_first = not metrics and batch.advantages is not None and self.head == "lm"  # later ones have moved away from the engines
            update = self._update(batch, plan, max(passes), sum(weights), sum(loss_tokens), loss, log_ratios if is_first else None)
            metrics.append({**update, "num_tokens": float(sum(tokens)), "num_loss_tokens": float(sum(loss_tokens))})
        if metrics:
            metrics[0] |= mismatch(self._grid.gather(spread_of(log_ratios)))
        return metrics

    def _update(
        self,
        batch: Batch,
        plan: list[list[int]],
        num_passes: int,
        weight: float,
        num_tokens: int,
        loss: Loss,
        log_ratios: list[Tensor] | None,
    ) -> Metrics:
        """One optimizer update; `num_passes`, `weight` and `num_tokens` (of the loss) are those of all ranks together. `log_ratios` to what
        was sampled are added where they are wanted."""
        assert self._schedule is not None, "begin comes before train"
        lr = learning_rate(self._schedule, self._num_updates)
        metrics = {"loss": 0.0, "grad_norm": 0.0, "lr": lr, "skipped": 1.0, "nonfinite": 0.0}
        if weight == 0.0:
            return metrics
        self._optimizer.zero_grad()  # a loss that raised may have left some behind
        sums: dict[tuple[str, bool], Tensor] = {}
        for number in range(num_passes):
            self._reduce_gradients(self.config.reduce_every_pass or number == num_passes - 1)
            if number < len(plan):
                self._learn(select(batch, plan[number]), loss, sums, log_ratios)
            else:
                (self._score(_placeholder())[0].sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        names = list(sums)
        values = torch.stack([sums[name] for name in names]).tolist() if names else []
        totals: dict[tuple[str, bool], float] = {}
        for of_shard in self._grid.gather(dict(zip(names, values, strict=True))):
            for name, value in of_shard.items():
                totals[name] = totals.get(name, 0.0) + value
        metrics |= {name: value / num_tokens if is_mean else value for (name, is_mean), value in totals.items()}
        metrics["grad_norm"] = norm = self._clip()
        if math.isfinite(norm) and math.isfinite(metrics["loss"]):
            self._optimizer.step(lr)
            self._spread()
            self._num_updates += 1
            metrics["skipped"] = 0.0
        else:
            metrics["nonfinite"] = 1.0
        self._optimizer.zero_grad()
        return metrics

    def _learn(self, part: Batch, loss: Loss, sums: dict[tuple[str, bool], Tensor], log_ratios: list[Tensor] | None) -> None:
        """Forward, loss and backward of one micro-batch; adds what is to be reported to `sums`, by name and whether a mean over the loss
        mask is to be made of it."""
        fills = _FILLED_IN & set(needs_of(loss))
        output, about = self._score(part, fills=fills)
        part = part.to(self._device).with_fields(**{name: about[name] for name in fills})
        if part.old_logp is None and self.head == "lm":
            part = part.with_fields(old_logp=output.detach())
        if log_ratios is not None:
            log_ratios.append((output.detach() - part.behaviour_logp).masked_fill(~part.loss_mask, math.nan))
        outcome = loss(output, part)
        total = (outcome.loss * part.weight).masked_fill(~part.loss_mask, 0.0).sum()
        total.backward()  # type: ignore[no-untyped-call]
        entropy = {name: value for name, value in about.items() if name == "entropy"}
        means = {(name, True): value for name, value in {**outcome.metrics, **entropy}.items()}
        weighted = {(name, False): value * part.weight for name, value in outcome.weighted.items()}
        reported = {key: value.masked_fill(~part.loss_mask, 0.0).sum() for key, value in {**means, **weighted}.items()}
        for key, value in {("loss", False): total, **reported}.items():
            sums[key] = sums.get(key, 0.0) + value.detach().double()

    def _score(self, batch: Batch, *, fills: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] what the head says of each token in the loss mask, and what else it says by the names of the batch's fields.

        An `lm` head gives log-probabilities under each trajectory's sampling settings, and `entropy`, [T]; a `scalar` head gives values.
        With a gradient come the fields in `fills`; `top_logp`, [T, K], comes only then. `batch` is on the CPU, so that nothing here waits
        for the device."""
        rows = self._own_rows(batch)
        spread = torch.zeros(batch.num_tokens, device=self._device)
        places = rows if self.reads == "through" and self.head == "scalar" else rows - 1
        if self.head == "scalar":
            values = self._logits(batch, places).squeeze(-1).float()
            return self._spread_out(spread, rows.to(self._device), values), {}
        trajectory = torch.arange(batch.num_trajectories).repeat_interleave(batch.offsets.diff())[rows]
        settings = [value[trajectory].to(self._device) for value in (batch.temperature, batch.top_p, batch.top_k)]
        truncates = bool(((batch.top_p < 1.0) | (batch.top_k > 0)).any())
        targets = batch.token_ids[rows].to(self._device)
        rows = rows.to(self._device)
        if self._question and not truncates and "top_logp" not in fills and self._question.pays(len(rows), self._vocab_size):
            with self._question.of(targets, settings[0], "entropy" in fills):
                logp, entropy = self._logits(batch, places).unbind(-1)
            return self._spread_out(spread, rows, logp), {"entropy": self._spread_out(spread, rows, entropy)}
        logits = self._logits(batch, places)
        logp, entropy = _chosen(logits, targets, settings, truncates, "entropy" in fills)
        about = {"entropy": self._spread_out(spread, rows, entropy)}
        if "top_logp" in fills:
            assert batch.teacher_top_ids is not None, "a teacher names the tokens before anybody is asked about them"
            ids, temperature = batch.teacher_top_ids.to(self._device)[rows].long(), _compared_at(batch).to(self._device)[rows]
            given = _in_chunks(_given, logits, ids, temperature)[0]
            about["top_logp"] = self._spread_out(spread.new_zeros(len(spread), ids.shape[1]), rows, given)
        return self._spread_out(spread, rows, logp), about

    def _own_rows(self, batch: Batch) -> Tensor:
        """[R] the tokens in the loss mask that this rank's head speaks of: all, unless other ranks have some of the tokens."""
        rows = batch.loss_mask.nonzero().squeeze(1)
        places = rows if self.head == "scalar" and self.reads == "through" else rows - 1
        return rows[self._grid.tokens(batch.num_tokens).holds(places)]

    def _spread_out(self, spread: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """What the ranks that share the batch's tokens say of their rows, at its place among all tokens."""
        return self._grid.cp.summed(spread.index_copy(0, rows, values))

    def _logits(self, batch: Batch, places: Tensor) -> Tensor:
        """[R, V] what the model puts out at these places of the batch, which are this rank's; a scalar head has a V of 1. Both are on the
        CPU."""
        if self._grid.cp.size > 1:
            tokens = self._grid.tokens(batch.num_tokens)
            lengths = [*batch.lengths, tokens.padding] if tokens.padding else batch.lengths
            layout = PackedLayout(lengths, self._device, HeadExchange(self._grid.cp))
            token_ids, position_ids, asked = tokens.of(batch.token_ids), tokens.of(batch.position_ids), places - tokens.start
        else:
            needed = computed(batch, places)
            layout = PackedLayout(needed.lengths, self._device, source=needed.source)
            token_ids, position_ids, asked = batch.token_ids[needed.rows], batch.position_ids[needed.rows], needed.asked
        logits: Tensor = self._model(
            input_ids=token_ids[None].to(self._device),
            position_ids=position_ids[None].to(self._device),
            logits_to_keep=asked.to(self._device),
            use_cache=False,
            packed=layout,
        ).logits[0]
        layout.check(self._num_layers, self._model_type)
        return logits if len(logits) == len(asked) else logits[asked]  # where a model does not know `logits_to_keep`

    def _clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`; their norm before that, over all ranks."""
        self._complete_gradients()
        norm = self._gradient_norm()
        scale = self.config.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_([local(parameter.grad) for parameter in self._parameters if parameter.grad is not None], scale)
        return norm

    def _complete_gradients(self) -> None:
        """Add up the gradients of what the ranks of `tp` have whole, and each used for its own heads."""
        learners = [each for each in self._parameters if each.grad is not None and self._piece_of[id(each)].is_partial]
        if learners and self._grid.tp.size > 1:
            gradients = [local(each.grad) for each in learners if each.grad is not None]
            total = self._grid.tp.total(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, summed in zip(gradients, torch.split(total, [each.numel() for each in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _gradient_norm(self) -> float:
        """Of all ranks' gradients together, each value of which counts once, however many ranks hold it."""
        gradients = [(self._piece_of[id(each)], local(each.grad)) for each in self._parameters if each.grad is not None]
        if not self._sharded:
            return float(get_total_norm([gradient for _, gradient in gradients]))
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients])).double()
        copies = torch.tensor([float(piece.num_copies) for piece, _ in gradients], device=norms.device)
        return math.sqrt(self._group.total((norms**2 / copies).sum()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._whole_weights():
            for in_file, index in in_files(self._model_type, name, tensor.shape):
                yield in_file, tensor[index]

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. Whole tensors by their names in the model, in the dtype that passes compute in."""
        dtype = getattr(torch, self.dtype)
        for name, tensor in self._tensors.items():
            if self._adapters:
                merged = self._adapters.merged(name, self._whole(name, tensor), self._whole)
                yield name, merged.to(dtype) if merged.is_floating_point() else merged
            else:  # of masters, the same numbers that were rounded already
                yield name, self._whole(name, self._computing[name] if self._masters else tensor, dtype)

    def _whole(self, name: str, held: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Collective. All of a tensor, of which this rank holds a part."""
        return self._pieces[name].whole(held, dtype)

    def snapshot(self, *, alone: bool = False) -> RankState:
        pieces = []
        for parameter, tensor in self._learning.items():
            piece = self._pieces[parameter]
            if not alone and not piece.is_first_copy(tensor):
                continue
            box = piece.box(tensor)
            for what, value in {"weight": tensor, **self._optimizer.state.get(tensor, {})}.items():
                if value.ndim:
                    extent = Extent(parameter=parameter, what=what, shape=piece.shape, box=box)
                elif alone or all(start == 0 for start, _ in box):
                    extent = Extent(parameter=parameter, what=what, shape=(), box=())
                else:
                    continue
                pieces.append((extent, local(value.detach()).to("cpu", copy=not alone)))
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return RankState(pieces, self._schedule, self._num_updates, rng)

    def state_bytes(self) -> int:
        weights = (local(tensor.detach()) for tensor in self._learning.values())
        return 3 * sum(weight.numel() * weight.element_size() for weight in weights)  # AdamW has two moments of each

    def save(self, state: RankState, folder: Path) -> None:
        write_rank(folder, self._group.rank, self._group.world, self.dtype, state)

    def load(self, folder: Path) -> None:
        state: RankState | None = None
        failure: Exception | None = None
        try:
            state = self._share_of(folder)
        except Exception as error:  # every rank must hear of it, or they would go on from different states
            failure = error
        failure = next((each for each in self._group.gather(failure) if each is not None), None)
        if failure is not None:
            raise failure
        assert state is not None
        self.restore(state)

    def _share_of(self, folder: Path) -> RankState:
        """What this rank will hold of a saved state."""
        with Shards(folder) as shards:
            stored = {extent.parameter: extent.shape for extent in shards.tensors.values() if extent.what == "weight"}
            own = {name: self._pieces[name].shape for name in self._learning}
            for name in sorted({*own, *stored}):
                if own.get(name) != stored.get(name):
                    raise CheckpointError(
                        f"'{folder}' is the state of another model: '{name}' has shape {stored.get(name, 'nothing')} there "
                        f"and {own.get(name, 'nothing')} in '{self.model_folder}'."
                    )
            pieces = []
            for key, whole in shards.tensors.items():
                tensor = self._learning[whole.parameter]
                box = self._pieces[whole.parameter].box(tensor) if whole.shape else ()
                values = shards.read(key, box)
                expected = torch.float32 if whole.what == "step" else tensor.dtype
                if values.dtype != expected:
                    raise CheckpointError(f"'{folder}': '{key}' is stored as {values.dtype}, and is {expected} in training.")
                pieces.append((whole.model_copy(update={"box": box}), values))
            return RankState(pieces, shards.schedule, shards.update, shards.rng(self._group.rank))

    def restore(self, state: RankState) -> None:
        self._schedule, self._num_updates = state.schedule, state.update
        self._optimizer = self._fresh_optimizer()
        for extent, value in state.pieces:
            target = tensor = self._learning[extent.parameter]
            if extent.what != "weight":
                target = self._optimizer.state.setdefault(tensor, {})[extent.what] = _blank(tensor, value)
            local(target.detach()).copy_(value)
        self._spread()
        torch.set_rng_state(state.rng["cpu"])
        if self._device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    def reschedule(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def begin(self, schedule: Schedule) -> None:
        self._schedule, self._num_updates = schedule, 0
        self._optimizer = self._fresh_optimizer()

    def _fresh_optimizer(self) -> AdamW:
        return AdamW(self._parameters, betas=self.config.betas, eps=self.config.eps, weight_decay=self.config.weight_decay)

    def export(self, folder: Path, *, replace: bool = False) -> None:
        state: dict[str, Tensor] = {}
        for name, tensor in self._whole_weights():
            if self._group.rank == 0:  # of weights that no other rank holds a part of, a copy would be one too many
                state[name] = tensor.to("cpu", copy=True) if self._sharded else tensor.detach()
        adapters: dict[str, Tensor] = {}
        for name, tensor in self._learning.items() if self._adapters else ():
            adapters[name] = self._whole(name, tensor).to("cpu", copy=True)
        failure: Exception | None = None
        if self._group.rank == 0:
            try:
                self._write(folder, state, adapters, replace)
            except Exception as error:  # every rank must hear of it, or the others would wait for rank 0
                failure = error
        failure = self._group.gather(failure)[0]
        if failure is not None:
            raise failure

    def _write(self, folder: Path, state: dict[str, Tensor], adapters: dict[str, Tensor], replace: bool) -> None:
        with new_folder(folder, replace=replace) as aside:
            self._model.save_pretrained(aside, state_dict=state, max_shard_size=EXPORTED_FILE)
            if self._adapters:
                self._adapters.write(aside / "adapter", adapters, str(self.model_folder))
            self._write_config(aside)
            copy_companions(self.model_folder, aside)

    def to(self, where: Literal["device", "host"]) -> None:
        device = self._device if where == "device" else torch.device("cpu")
        if where == "host":
            self._shelf.clear()
        move = partial(self._shelf.moved, device=device)
        if self._masters:
            self._masters.to(where, move)
        self._model._apply(move)
        for moments in self._optimizer.state.values():
            moments.update({name: move(value) for name, value in moments.items()})
        settle(self._device)

    def close(self) -> None:
        self._group.leave()
        del self._model, self._masters, self._optimizer, self._parameters, self._tensors, self._computing, self._learning
        del self._division, self._question
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Any:
        """The model on the CPU, without dropout, attending to packed sequences."""
        is_plain = self._device.type == "cpu" and self.head == "lm" and not self._sharded
        if is_plain and self.config.lora is None and not self.config.gradient_checkpointing:
            found = LlamaFolder.open(self.model_folder)
            if found is not None:
                model = PlainLlama(found, self._held_dtype)
                self._note(model.config.model_type, model.config, partial(model.write_config, dtype=self.dtype))
                return model
        return self._load_with_transformers()

    @property
    def _held_dtype(self) -> torch.dtype:
        """Of the weights that this rank keeps."""
        dtype: torch.dtype = getattr(torch, self.dtype) if self._is_narrow else torch.float32
        return dtype

    def _note(self, model_type: str, config: Any, write: Callable[[Path], Any]) -> None:
        """What kind of model it is, and how its config is written beside its weights."""
        self._model_type, self._vocab_size, self._num_layers = model_type, int(config.vocab_size), int(config.num_hidden_layers)
        self._write_config = write

    def _load_with_transformers(self) -> Any:
        from transformers import AutoConfig

        register_packed_attention()
        try:
            source = AutoConfig.from_pretrained(self.model_folder, local_files_only=True, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"'{self.model_folder}' cannot be loaded for training: {type(error).__name__}: {error}") from error
        fresh = self._fit_scalar_head(source) if self.head == "scalar" else set()
        config = copy.deepcopy(source)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)  # log-probabilities must be those that the engine sampled at
        model, missing = load_model(
            self.model_folder,
            "lm" if self.head == "lm" else "classifier",
            trust_remote_code=self.trust_remote_code,
            config=config,
            dtype=self._held_dtype,
            attn_implementation=PACKED_ATTENTION,
        )
        check_complete(self.model_folder, [name for name in missing if name not in fresh])
        if self._device.type == "cuda" and self.config.fused_layers:
            use_fused_layers(model)
        if self.head == "scalar":
            _score_every_token(model)
            if fresh:
                torch.nn.init.zeros_(model.score.weight)
            source.architectures = [type(model).__name__]
        source.dtype = self.dtype
        self._note(source.model_type, source.get_text_config(), source.save_pretrained)
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train(self.config.gradient_checkpointing)  # transformers checkpoints only in training mode

    def _fit_scalar_head(self, source: Any) -> set[str]:
        """Make the `source` config one of a classifier with one label; names of the weights that the folder is allowed not to have."""
        is_classifier = any(name.endswith(CLASSIFIER_ENDING) for name in source.architectures or ())
        if is_classifier and source.num_labels != 1:
            raise ModelError(
                f"'{self.model_folder}' is a classifier with {source.num_labels} labels; one with a single label, or a "
                f"causal language model, was expected."
            )
        source.num_labels = 1
        return set() if is_classifier else {"score.weight"}

    def _shard(self) -> None:
        """Every decoder layer is a unit of its own, its experts another, and what remains the last; gradients are summed, not averaged."""
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, self.dtype), reduce_dtype=torch.float32)
        mesh = self._grid.mesh()
        if self._division.experts:
            among = self._grid.mesh(of_experts=True)
            by = partial(_expert_shards, ranks=self._grid.experts_sharded.size)
            for experts in self._division.experts:
                fully_shard(
                    experts, mesh=among, mp_policy=policy, reshard_after_forward=self.config.reshard_after_forward, shard_placement_fn=by
                )
        for module in self._model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=self.config.reshard_after_forward)
        if (score := self._exact_part()) is not None:
            exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            fully_shard(score, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
        fully_shard(self._model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def _exact_part(self) -> nn.Module | None:
        """What computes in float32: a score, because rewards are told apart by less than what narrower numbers round to."""
        return self._model.score if self.head == "scalar" else None

    def _spread(self) -> None:
        """Passes compute with what was learnt."""
        if self._masters:
            self._masters.spread()

    def _reshard(self) -> None:
        """After passes without gradient the root's gathered weights would outlive the next change of its shards."""
        if self._sharded:
            from torch.distributed.fsdp import FSDPModule

            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass ends in a reduction over the ranks."""
        if self._sharded:
            self._model.set_requires_gradient_sync(now)


def _chosen(
    logits: Tensor, targets: Tensor, settings: Sequence[Tensor], truncates: bool, entropy_learns: bool = False
) -> tuple[Tensor, Tensor]:
    """[R] log-probability of each row's target and [R] entropy of each row, in float32, a bounded number of logits at a time."""

    def chosen(logits: Tensor, targets: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
        logp = processed_logp(logits, temperature, top_p, top_k, keep=targets, truncates=truncates)
        with torch.set_grad_enabled(entropy_learns):
            entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)  # 0 × -inf is not 0
        return logp.gather(-1, targets[:, None]).squeeze(-1), entropy

    logp, entropy = _in_chunks(chosen, logits, targets, *settings)
    return logp, entropy


def _given(logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor]:
    """[R, K] log-probability of each row's `ids` in the whole vocabulary."""
    return (_plain_logp(logits, temperature).gather(-1, ids),)


def _likeliest(logits: Tensor, targets: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, ...]:
    """[R] log-probability of each row's target, [R, k] its likeliest tokens, [R, k] log-probabilities of these."""

    def likeliest(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        logp = _plain_logp(logits, temperature)
        top = logp.topk(k, dim=-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), top.indices, top.values

    return _in_chunks(likeliest, logits, targets, temperature)


def _plain_logp(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] in float32, of the whole vocabulary; a temperature of 0 counts as 1."""
    off = torch.ones_like(temperature)
    return processed_logp(logits, temperature, off, torch.zeros_like(off, dtype=torch.int64), truncates=False)


def _compared_at(batch: Batch) -> Tensor:
    """[T] the temperature at which teacher and student are compared."""
    temperature = batch.temperature if batch.teacher_temperature is None else batch.teacher_temperature
    return temperature.repeat_interleave(batch.offsets.diff())


def _in_chunks(function: Callable[..., tuple[Tensor, ...]], logits: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """What a function says of every row of logits, and of the values that belong to it, a bounded number of logits at a time."""
    size = max(1, _LOGITS_PER_CHUNK // logits.shape[-1])
    if len(logits) <= size:
        return function(logits, *rows)
    chunks = zip(*(torch.split(value, size) for value in (logits, *rows)), strict=True)
    said = (checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks)
    return tuple(torch.cat(parts) for parts in zip(*said, strict=True))


def _score_every_token(model: Any) -> None:
    """Change a classifier's forward pass, which scores the last token of a row, into one that scores all that are asked for."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear layer named `score`, so its tokens cannot be scored one by one. Use a model whose "
            f"classifier has one, such as llama, qwen2, qwen3 or gpt2."
        )

    def forward(input_ids: Tensor, logits_to_keep: Tensor, **inputs: Any) -> Any:
        hidden = model.base_model(input_ids=input_ids, **inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden[:, logits_to_keep]))

    model.forward = forward


def _expert_shards(parameter: Tensor, ranks: int) -> Any:
    """Along which dim experts are sharded: the second where there are fewer of them than ranks."""
    from torch.distributed.tensor import Shard

    return Shard(1 if len(parameter) < ranks and parameter.shape[1] % ranks == 0 else 0)


def _placeholder() -> Batch:
    """Two tokens for a pass that only has to happen."""
    return pack_demonstrations([([0], [0])])


def _blank(parameter: Tensor, value: Tensor) -> Tensor:
    """Optimizer state to copy `value` into: a scalar step, or a moment that is sharded like its parameter."""
    return torch.zeros_like(value, device=parameter.device) if value.ndim == 0 else torch.zeros_like(parameter)


def _file_names(model: Any) -> list[str]:
    """Names that the model's safetensors files use, in a fixed order: of several names of one tensor, the one that others are tied to."""
    aliases = model.all_tied_weights_keys
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in names or names[id(tensor)] in aliases:
            names[id(tensor)] = name
    return list(names.values())
