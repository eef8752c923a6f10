"""Configs to plan for, without the backends that a whole run would import."""

from __future__ import annotations

from typing import Any

from drumroll.config.models import (
    AdvantageConfig,
    AlgoConfig,
    EngineConfig,
    EnvConfig,
    LossConfig,
    ModelConfig,
    RewardConfig,
    RlConfig,
    ScratchConfig,
    TrainerConfig,
)

RL_ROLES = ("actor_train", "actor_infer", "environment")


class PlainAlgo(AlgoConfig):
    advantage: AdvantageConfig = AdvantageConfig(kind="grpo")
    loss: LossConfig = LossConfig(kind="ppo_clip")


class PlainRl(RlConfig):
    """The `rl` config with its variants unresolved: planning reads none of them."""

    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    env: EnvConfig = EnvConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(kind="exact_match"),)
    algo: PlainAlgo = PlainAlgo()


def rl_config(devices: Any = "auto", **sections: Any) -> PlainRl:
    fields = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": ModelConfig(scratch=ScratchConfig(characters="abc", architecture="unknown")),
        "data": {"train": {"path": "tasks.jsonl"}},
        "devices": devices,
        **sections,
    }
    return PlainRl.model_validate(fields)
