"""A run that has passed every check and started nothing: config, tasks, demonstrations, model, plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from drumroll.algo.algorithm import build_algorithm
from drumroll.config.models import RlConfig, Role, RunConfig, SftConfig, SftRunConfig, SourceConfig
from drumroll.data.cursor import TaskCursor
from drumroll.data.tasks import load_demonstrations, load_tasks
from drumroll.envs.base import Env
from drumroll.errors import ConfigError
from drumroll.models.prepare import check_model
from drumroll.plan.mapping import make_plan
from drumroll.plan.placement import Plan
from drumroll.plan.pool import Pool, local_pool, parse_pool
from drumroll.record.metrics import check_sinks
from drumroll.registry import REGISTRY
from drumroll.types import Task


@dataclass(frozen=True)
class RlJob:
    """Everything that the `rl` pipeline needs before workers start."""

    cfg: RlConfig
    cursor: TaskCursor
    heldout: Sequence[Task]
    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()
    """What the user may not expect."""

    def describe(self) -> str:
        roles = ", ".join(self.roles)
        return f"{len(self.cursor)} training tasks, {len(self.heldout)} held-out tasks, {self.cfg.max_steps} steps, roles {roles}"


@dataclass(frozen=True)
class SftJob:
    """Everything that the `sft` pipeline needs before workers start."""

    cfg: SftRunConfig
    num_demonstrations: int
    roles: tuple[Role, ...] = ("actor_train",)
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"{self.num_demonstrations} demonstrations, {self.cfg.sft.steps} updates"


def prepare(cfg: RunConfig) -> RlJob | SftJob:
    """Check all that can be known beforehand; raises a `UserError` that says what to put right."""
    check_sinks(cfg.record)
    check_model(cfg.model)
    job = _prepare_rl(cfg) if isinstance(cfg, RlConfig) else _prepare_sft(cast(SftRunConfig, cfg))
    if cfg.ray.address is None:
        plan = make_plan(cfg, local_pool(cfg.ray.cpu_slots), job.roles)
        job = replace(job, notes=_notes(cfg, plan))
    return job


def _notes(cfg: RunConfig, plan: Plan) -> tuple[str, ...]:
    if isinstance(cfg, RlConfig) and cfg.rollout.max_staleness and plan.relation("actor_infer", "actor_train") == "colocated":
        return (
            f"`rollout.max_staleness` is {cfg.rollout.max_staleness}, but engines and trainers share all their devices: they take turns "
            f"there, and what carries over from step to step is unfinished samples alone. `devices` can keep them apart.",
        )
    return ()


def plan_for(cfg: RunConfig, pool: str | None = None) -> tuple[Plan, Pool]:
    """The plan on this machine, or on a pool that is only described."""
    described = parse_pool(pool) if pool is not None else local_pool(cfg.ray.cpu_slots)
    return make_plan(cfg, described, roles_of(cfg)), described


def roles_of(cfg: RunConfig) -> tuple[Role, ...]:
    """A role exists only when the algorithm needs it."""
    if not isinstance(cfg, RlConfig):
        return ("actor_train",)
    needs = build_algorithm(cfg.algo).needs
    reference: tuple[Role, ...] = ("reference",) if "ref_logp" in needs else ()
    return ("actor_train", "actor_infer", *reference, "environment")


def _prepare_rl(cfg: RlConfig) -> RlJob:
    env = REGISTRY.lookup("env", cfg.env.kind).target
    if not (isinstance(env, type) and issubclass(env, Env)):
        raise ConfigError(f"`env.kind`: '{cfg.env.kind}' is not an environment: a class that extends drumroll.envs.base.Env was expected.")
    load = partial(load_tasks, needed_fields=_columns(cfg), needs_prompt=env.needs_prompt)
    tasks = load(cfg.data.train, split_label="train")
    heldout = load(cfg.data.heldout, split_label="heldout") if cfg.data.heldout else []
    if cfg.warmup:
        _check_demonstrations(cfg.warmup)
    return RlJob(cfg, TaskCursor(tasks, cfg.seed), heldout, roles_of(cfg))


def _prepare_sft(cfg: SftRunConfig) -> SftJob:
    num_demonstrations = _check_demonstrations(cfg.sft)
    if cfg.heldout:
        _check_demonstrations(cfg.sft, cfg.heldout)
    return SftJob(cfg, num_demonstrations)


def _check_demonstrations(cfg: SftConfig, source: SourceConfig | None = None) -> int:
    return len(load_demonstrations(source or cfg.data, cfg.completion_field))


def _columns(cfg: RlConfig) -> list[str]:
    """Dataset columns that rewards name in options called `field` or `…_field`."""
    options = [option for reward in cfg.rewards for option in reward.model_dump().items()]
    return [value for name, value in options if (name == "field" or name.endswith("_field")) and isinstance(value, str)]
