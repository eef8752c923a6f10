"""A run that has passed every check and started nothing: config, tasks, demonstrations, model, plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from drumroll.agents.process import Agent
from drumroll.algo.algorithm import build_algorithm
from drumroll.backends.infer.base import InferBackend
from drumroll.backends.train.base import TrainBackend
from drumroll.config.models import (
    ANY,
    DataConfig,
    Domain,
    DomainData,
    ModelConfig,
    PreferenceRunConfig,
    RewardConfig,
    RlConfig,
    Role,
    RunConfig,
    SftConfig,
    SftRunConfig,
    SourceConfig,
    TeacherConfig,
)
from drumroll.data.pairs import load_judgements, load_pairs
from drumroll.data.tasks import Needs, load_demonstrations, load_tasks
from drumroll.envs.base import Env
from drumroll.errors import ConfigError, DataError, ModelError
from drumroll.hub import resolve_folder
from drumroll.models.division import problems
from drumroll.models.folder import CLASSIFIER_ENDING, check_classifier_folder, check_folder
from drumroll.models.prepare import check_model, resolve_model
from drumroll.models.scratch import scratch_vocabulary
from drumroll.plan.cost import TRAINER_ROLES
from drumroll.plan.mapping import HOST_ROLES, make_plan
from drumroll.plan.placement import Plan
from drumroll.plan.pool import Pool, local_pool, parse_pool
from drumroll.record.metrics import check_sinks
from drumroll.registry import REGISTRY
from drumroll.rewards.place import ChatModel, ScoreModel
from drumroll.rewards.reward import Reward
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Task


@dataclass(frozen=True)
class RlJob:
    """Everything that the `rl` pipeline needs before workers start."""

    cfg: RlConfig
    tasks: Mapping[str, Sequence[Task]]
    """To train on, by domain."""
    heldout: Mapping[str, Sequence[Task]]
    """To evaluate on, by domain."""
    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()
    """What the user may not expect."""

    def describe(self) -> str:
        roles = ", ".join(self.roles)
        return f"{_count(self.tasks)} training tasks, {_count(self.heldout)} held-out tasks, {self.cfg.max_steps} steps, roles {roles}"


@dataclass(frozen=True)
class EvalJob:
    """Everything that an evaluation needs before workers start: no tasks to train on, and nobody who learns."""

    cfg: RlConfig
    heldout: Mapping[str, Sequence[Task]]
    """By domain."""
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class SftJob:
    """Everything that the `sft` pipeline needs before workers start."""

    cfg: SftRunConfig
    num_demonstrations: int
    roles: tuple[Role, ...] = ("actor_train",)
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        roles = f", roles {', '.join(self.roles)}" if len(self.roles) > 1 else ""
        return f"{self.num_demonstrations} demonstrations, {self.cfg.sft.steps} updates{roles}"


@dataclass(frozen=True)
class PreferenceJob:
    """Everything that the `preference` pipeline needs before workers start."""

    cfg: PreferenceRunConfig
    num_rows: int
    num_heldout: int
    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        section, roles = self.cfg.preference, ", ".join(self.roles)
        noun = "pairs" if "pairs" in section.needs else "judged replies"
        return f"{section.kind}: {self.num_rows} {noun}, {self.num_heldout} held-out ones, {section.steps} updates, roles {roles}"


Job = RlJob | SftJob | PreferenceJob

UNSEEN_CLUSTER = (
    "`ray.address` is set: the device map is checked when the run starts; `drumroll plan … --pool 4x8x80GiB` plans for such a cluster."
)
"""What `check` and `plan` say of a cluster that they do not join."""


def prepare(cfg: RunConfig) -> Job:
    """Check all that can be known beforehand; raises a `UserError` that says what to put right."""
    check_sinks(cfg.record)
    check_model(cfg.model)
    _check_parallel(cfg)
    if isinstance(cfg, RlConfig):
        _check_engine(cfg)
    job: Job
    if isinstance(cfg, RlConfig):
        job = _prepare_rl(cfg)
    elif isinstance(cfg, PreferenceRunConfig):
        job = _prepare_preference(cfg)
    else:
        job = _prepare_sft(cast(SftRunConfig, cfg))
    plan = make_plan(cfg, local_pool(cfg.ray.cpu_slots), job.roles) if cfg.ray.address is None else None
    return replace(job, notes=tuple(_notes(cfg, plan)))


def prepare_evaluation(cfg: RunConfig) -> EvalJob:
    """The same of an evaluation, which takes a config of RL."""
    if not isinstance(cfg, RlConfig):
        raise ConfigError("only a config of `pipeline: rl` says how replies are judged. Evaluate with such a one.")
    check_sinks(cfg.record)
    check_model(cfg.model)
    _check_parallel(cfg)
    _check_engine(cfg)
    needs = {name: _needs(domain, cfg) for name, domain in cfg.mixture.items()}
    heldout = _load(cfg, needs, "heldout", lambda data: data.heldout)
    if not any(heldout.values()):
        raise DataError("there are no held-out tasks to evaluate on. Name some: data.heldout.path=FILE")
    for name, domain in cfg.mixture.items():
        _check_tasks(domain, heldout[name])
    roles = tuple(role for role in roles_of(cfg) if role not in TRAINER_ROLES)
    if cfg.ray.address is None:
        make_plan(cfg, local_pool(cfg.ray.cpu_slots), roles)
    return EvalJob(cfg, heldout, roles)


def _notes(cfg: RunConfig, plan: Plan | None) -> Iterator[str]:
    """`plan` is None where the devices are not known yet."""
    if plan is None:
        yield UNSEEN_CLUSTER
    if not isinstance(cfg, RlConfig):
        return
    if plan is not None and cfg.rollout.max_staleness and plan.relation("actor_infer", "actor_train") == "colocated":
        yield (
            f"`rollout.max_staleness` is {cfg.rollout.max_staleness}, but engines and trainers share all their devices: they take turns "
            f"there, and what carries over from step to step is unfinished samples alone. `devices` can keep them apart."
        )
    room = _text_facts(cfg.model).get("max_position_embeddings")
    for name, domain in cfg.mixture.items():
        if isinstance(room, int) and domain.sampling.max_new_tokens > room:
            where = "rollout.sampling" if name == ANY or cfg.domains[name].sampling.max_new_tokens is None else f"domains.{name}.sampling"
            yield (
                f"`{where}.max_new_tokens` is {domain.sampling.max_new_tokens}, but the model has positions for {room} tokens, prompt and "
                f"reply together: longer replies are cut off there."
            )
            return


def plan_for(cfg: RunConfig, pool: str | None = None) -> tuple[Plan, Pool]:
    """The plan on this machine, or on a pool that is only described."""
    described = parse_pool(pool) if pool is not None else local_pool(cfg.ray.cpu_slots)
    return make_plan(cfg, described, roles_of(cfg)), described


def roles_of(cfg: RunConfig) -> tuple[Role, ...]:
    """A role exists only when something needs it."""
    if isinstance(cfg, PreferenceRunConfig) and "ref_logp" in cfg.preference.needs:
        return ("actor_train", "reference")
    teacher: tuple[Role, ...] = ("teacher",) if isinstance(cfg, RlConfig | SftRunConfig) and cfg.teacher is not None else ()
    if not isinstance(cfg, RlConfig):
        return ("actor_train", *teacher)
    needs = build_algorithm(cfg.algo).needs
    reference: tuple[Role, ...] = ("reference",) if "ref_logp" in needs else ()
    critic: tuple[Role, ...] = ("critic",) if "values" in needs else ()
    pooled = any(reward.seat != "inline" for domain in cfg.mixture.values() for reward in domain.rewards)
    reward: tuple[Role, ...] = ("reward",) if pooled else ()
    return ("actor_train", "actor_infer", *reference, *teacher, *critic, *reward, "environment")


def _check_parallel(cfg: RunConfig) -> None:
    """Sizes that nobody computes with, and those that do not divide the model, are refused."""
    for role, parallel in cfg.parallel.items():
        key = f"parallel.{role}"
        sizes = {name: size for name, size in parallel.model_dump(exclude_none=True).items() if size > 1 or name == "shard"}
        if not sizes:
            continue
        if role in HOST_ROLES:
            name, size = next(iter(sizes.items()))
            raise ConfigError(f"`{key}.{name}` is {size}, but a {role} worker computes by itself. Leave it out.")
        if role == "actor_infer" and isinstance(cfg, RlConfig):
            _check_engine_sizes(key, sizes, cfg)
        else:
            trainer = cast(type[TrainBackend], REGISTRY.lookup("train_backend", cfg.trainer.kind).target)
            for name, size in sizes.items():
                if name not in trainer.axes:
                    advice = "Set `trainer.kind: fsdp2`, or leave it out."
                    raise ConfigError(f"`{key}.{name}` is {size}, but the trainer '{cfg.trainer.kind}' cannot compute that way. {advice}")
            for problem in problems(key, parallel, _facts_of(role, cfg)):
                raise ConfigError(problem)


def _check_engine_sizes(key: str, sizes: Mapping[str, int], cfg: RlConfig) -> None:
    for name, size in sizes.items():
        if name != "tp":
            raise ConfigError(f"`{key}.{name}` is {size}, but engines span devices by `{key}.tp` alone. Leave it out.")
        backend = cast(type[InferBackend], REGISTRY.lookup("infer_backend", cfg.engine.kind).target)
        if not backend.spans_devices:
            advice = "Set `engine.kind` to vllm or sglang, or leave it out."
            raise ConfigError(f"`{key}.tp` is {size}, but the engine '{cfg.engine.kind}' computes on one device. {advice}")
        facts = _text_facts(cfg.model)
        num_heads, num_kv_heads = facts.get("num_attention_heads"), facts.get("num_key_value_heads")
        if num_heads is not None and num_heads % size:
            raise ConfigError(f"`{key}.tp` is {size}, which does not divide the model's {num_heads} attention heads. Choose a divisor.")
        if num_kv_heads and num_kv_heads % size and size % num_kv_heads:  # devices may each hold a copy of one
            raise ConfigError(
                f"`{key}.tp` is {size}, which is neither a divisor nor a multiple of the model's {num_kv_heads} key-value heads."
            )


def _facts_of(role: Role, cfg: RunConfig) -> Mapping[str, Any]:
    """What the config of the role's model says."""
    if role == "teacher" and isinstance(cfg, RlConfig | SftRunConfig) and cfg.teacher is not None:
        return _facts(resolve_model(cfg.teacher.path, cfg.teacher.revision))
    if role == "critic" and isinstance(cfg, RlConfig) and cfg.critic is not None and cfg.critic.path is not None:
        return _facts(resolve_folder(cfg.critic.path, cfg.critic.revision, "model", ModelError))
    return _model_facts(cfg.model)


def _check_engine(cfg: RlConfig) -> None:
    """A model that the engine is known not to serve is refused."""
    backend = cast(type[InferBackend], REGISTRY.lookup("infer_backend", cfg.engine.kind).target)
    facts = _text_facts(cfg.model)
    if cfg.model.scratch is not None:
        facts = {**facts, "model_type": cfg.model.scratch.architecture}
    refusal = backend.refusal(cfg.engine, facts)
    if refusal:
        raise ModelError(f"`engine.kind: {cfg.engine.kind}` cannot serve this model: {refusal}. `engine.kind: native` serves it.")


def _text_facts(model: ModelConfig) -> Mapping[str, Any]:
    """What a model's config says of its text part, which is all of it unless it has several modalities."""
    facts = _model_facts(model)
    text = facts.get("text_config")
    return {**facts, **text} if isinstance(text, dict) else facts


def _prepare_rl(cfg: RlConfig) -> RlJob:
    needs = {name: _needs(domain, cfg) for name, domain in cfg.mixture.items()}
    tasks = _load(cfg, needs, "train", lambda data: data.train)
    heldout = _load(cfg, needs, "heldout", lambda data: data.heldout)
    for name, domain in cfg.mixture.items():
        if domain.share and not tasks[name]:
            raise DataError(f"domain '{name}' has a share of {domain.share:g} and no training task: no row of `data.train` says {name}.")
        _check_tasks(domain, [*tasks[name], *heldout[name]])
    if cfg.warmup:
        _check_demonstrations("warmup.data", cfg.warmup, cfg.warmup.data)
    if cfg.critic is not None and cfg.critic.path is not None:
        _check_critic(cfg.critic.path, cfg.critic.revision, cfg.model)
    if cfg.teacher is not None:
        _check_teacher(cfg.teacher, cfg.model)
    return RlJob(cfg, tasks, heldout, roles_of(cfg))


def _check_critic(path: str, revision: str | None, model: ModelConfig) -> None:
    """The folder that a critic starts from: a language model or a reward model, with as many tokens as the policy's."""
    folder = resolve_folder(path, revision, "model", ModelError)
    facts = _facts(folder)
    scores = any(str(name).endswith(CLASSIFIER_ENDING) for name in facts.get("architectures") or ())
    check = check_classifier_folder if scores else check_folder
    check(folder, trust_remote_code=model.trust_remote_code)
    own, policys = _num_tokens(facts), _num_model_tokens(model)
    if own != policys:
        raise ModelError(
            f"`critic.path`: '{path}' has {own} tokens and `model` has {policys}: a critic reads the policy's tokens. Give a model with "
            f"the same tokenizer, or leave `critic.path` out to start from the policy's own weights."
        )


def _check_teacher(teacher: TeacherConfig, model: ModelConfig) -> None:
    """The folder of a teacher: a language model with exactly the student's tokens, because it speaks of them by their numbers."""
    folder = resolve_model(teacher.path, teacher.revision)
    check_folder(folder, trust_remote_code=teacher.trust_remote_code)
    advice = "A teacher speaks of the student's tokens: give one with the same tokenizer."
    own_size, size = _num_tokens(_facts(folder)), _num_model_tokens(model)
    if own_size != size:
        raise ModelError(f"`teacher.path`: '{teacher.path}' has {own_size} tokens and `model` has {size}. {advice}")
    own, students = Tokenizer(folder, trust_remote_code=teacher.trust_remote_code).vocabulary, _vocabulary(model)
    other = min(own.items() ^ students.items(), key=lambda entry: entry[1], default=None)
    if other is not None:
        there, here = (next((repr(token) for token, number in known.items() if number == other[1]), "none") for known in (own, students))
        raise ModelError(
            f"`teacher.path`: '{teacher.path}' has as many tokens as `model`, but not the same ones: number {other[1]} is {there} there "
            f"and {here} in `model`. {advice}"
        )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """Every token of the model's tokenizer and its number."""
    if model.scratch is not None:
        return scratch_vocabulary(model.scratch.characters, model.scratch.words)
    assert model.path is not None, "ModelConfig has either `path` or `scratch`"
    folder = resolve_model(model.path, model.revision)
    return Tokenizer(folder, trust_remote_code=model.trust_remote_code).vocabulary


def _facts(folder: Path) -> dict[str, Any]:
    """What a model's config.json says; nothing where there is none that can be read, which a check of the folder explains."""
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _model_facts(model: ModelConfig) -> Mapping[str, Any]:
    """The same of the model that is trained, which may still have to be made."""
    if model.scratch is not None:
        return {"model_type": model.scratch.architecture, **model.scratch.config}
    assert model.path is not None, "ModelConfig has either `path` or `scratch`"
    return _facts(resolve_model(model.path, model.revision))


def _num_tokens(facts: Mapping[str, Any]) -> int | None:
    """Tokens that a model knows; models of several modalities say it of their text part."""
    size: int | None = facts.get("vocab_size", facts.get("text_config", {}).get("vocab_size"))
    return size


def _num_model_tokens(model: ModelConfig) -> int | None:
    if model.scratch is not None:
        return len(scratch_vocabulary(model.scratch.characters, model.scratch.words))
    return _num_tokens(_model_facts(model))


def _load(
    cfg: RlConfig, needs: Mapping[str, Needs], label: str, split: Callable[[DataConfig | DomainData], SourceConfig | None]
) -> dict[str, list[Task]]:
    """The tasks of every domain: from its own source, or from the run's by the rows' column `domain`."""
    own = {name: split(domain.data) for name, domain in cfg.mixture.items() if domain.data is not None}
    shared = split(cfg.data) if cfg.data is not None and len(own) < len(cfg.mixture) else None
    expected = {name: need for name, need in needs.items() if name not in own}
    rows = load_tasks(shared, split_label=label, needs=expected) if shared is not None else []
    loaded: dict[str, list[Task]] = {}
    for name in cfg.mixture:
        source = own.get(name)
        if name not in own:
            loaded[name] = [task for task in rows if name in (ANY, task.domain)]
        elif source is None:
            loaded[name] = []
        else:
            source = source.model_copy(update={"domain": name})
            loaded[name] = load_tasks(source, split_label=f"{name}-{label}", needs={name: needs[name]})
    return loaded


def _needs(domain: Domain, cfg: RlConfig) -> Needs:
    env = REGISTRY.lookup("env", domain.env.kind).target
    if not (isinstance(env, type) and issubclass(env, Env | Agent)):
        raise ConfigError(
            f"`env.kind`: '{domain.env.kind}' is not an environment: a class that extends drumroll.envs.base.Env was expected."
        )
    columns: dict[str, str] = {}
    for number, reward in enumerate(domain.rewards):
        for option, column in _columns(reward).items():
            columns.setdefault(column, _owner("rewards", f".{number}.{option}", domain.name, cfg))
    if domain.curriculum is not None and domain.curriculum.level_field is not None:
        columns.setdefault(domain.curriculum.level_field, _owner("curriculum", ".level_field", domain.name, cfg))
    return Needs(columns, env.needs_prompt)


def _owner(section: str, rest: str, name: str, cfg: RlConfig) -> str:
    """Where the config says something that holds in a domain, as a message says it."""
    if name not in cfg.domains:
        return f"`{section}{rest}`"
    if getattr(cfg.domains[name], section) is not None:
        return f"`domains.{name}.{section}{rest}`"
    return f"`{section}{rest}`, or give domain '{name}' its own `{section}`"


def _columns(reward: RewardConfig) -> dict[str, str]:
    """Dataset columns that a reward names, by its options called `field` or `…_field`."""
    options = reward.model_dump().items()
    return {name: value for name, value in options if (name == "field" or name.endswith("_field")) and isinstance(value, str)}


def _check_tasks(domain: Domain, tasks: Sequence[Task]) -> None:
    """Let every reward that can look at the tasks beforehand."""
    for config in domain.rewards:
        _check_reward_model(config)
        reward = Reward(config)
        for task in tasks:
            try:
                reward.check_task(task)
            except ValueError as error:
                raise DataError(f"task '{task.id}': reward '{reward.name}' cannot judge it: {error}") from error


def _check_reward_model(config: RewardConfig) -> None:
    """The folder of the model that a reward brings, if it does."""
    for name in type(config).model_fields:
        model = getattr(config, name)
        if isinstance(model, ScoreModel | ChatModel):
            folder = resolve_folder(model.path, model.revision, "model", ModelError)
            check = check_classifier_folder if isinstance(model, ScoreModel) else check_folder
            check(folder, trust_remote_code=model.trust_remote_code)


def _count(tasks: Mapping[str, Sequence[Task]]) -> str:
    """`120`, or `120 (math 80, code 40)`."""
    total = sum(map(len, tasks.values()))
    by_domain = ", ".join(f"{name} {len(of_domain)}" for name, of_domain in tasks.items())
    return f"{total} ({by_domain})" if total and len(tasks) > 1 else str(total)


def _prepare_sft(cfg: SftRunConfig) -> SftJob:
    num_demonstrations = _check_demonstrations("sft.data", cfg.sft, cfg.sft.data)
    if cfg.heldout:
        _check_demonstrations("heldout", cfg.sft, cfg.heldout)
    if cfg.teacher is not None:
        _check_teacher(cfg.teacher, cfg.model)
    return SftJob(cfg, num_demonstrations, roles_of(cfg))


def _prepare_preference(cfg: PreferenceRunConfig) -> PreferenceJob:
    section = cfg.preference
    load = load_pairs if "pairs" in section.needs else load_judgements
    num_rows, num_heldout = (len(load(section, source)) if source is not None else 0 for source in (section.data, section.heldout))
    for source, size in ((section.data, num_rows), (section.heldout, num_heldout)):
        if source is not None and size < 2 and "reference_point" in section.needs:
            raise DataError(
                f"'{source.path}' holds a single reply, and `preference.kind: {section.kind}` compares each with replies to other prompts."
            )
    return PreferenceJob(cfg, num_rows, num_heldout, roles_of(cfg))


def _check_demonstrations(key: str, cfg: SftConfig, source: SourceConfig) -> int:
    """How many there are. `key` is where the config names them."""
    demonstrations = load_demonstrations(source, cfg.completion_field)
    if not any(demonstration.teaches for demonstration in demonstrations):
        raise DataError(
            f"`{key}`: '{source.path}' has nothing to learn from: all of its replies have `imitate: false`, or a `loss_mask` without any "
            f"token. Give some replies to imitate."
        )
    return len(demonstrations)
