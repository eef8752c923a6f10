"""Every exception that drumroll raises on purpose.

    DrumrollError
    ├── UserError                  the caller's mistake: shown without a traceback, exit code 2
    │   ├── ConfigError            a key, value or combination in the config
    │   ├── PlanError              a device map that does not fit the pool
    │   ├── DataError              a dataset that is missing, broken or lacks a column
    │   ├── ModelError             a model or tokenizer folder that cannot be used
    │   ├── PluginError            a registered name or import path that cannot be resolved
    │   └── RunFolderError         a run folder that already holds a run, or does not
    ├── WorkerError                an exception inside a worker, with role, rank, node and remote traceback
    │   ├── WorkerOverdue          no answer in time, from workers that are alive
    │   ├── WorkerUnreachable      a line that broke; the worker at its other end may be well
    │   ├── StateLost              what is learnt is lost with those who hold it, again and again
    │   ├── DeviceMemoryError      a device's memory was not enough: who, at which stage, for what, and the setting to change
    │   └── WorkerLost             the worker's process or node is gone
    │       ├── DeviceLost         its device is: nothing can be computed in that process any more
    │       ├── NodeLost           its node is gone, with the devices that it had there
    │       └── RoleLost           nobody is left to do a role's work, and nobody is started any more
    ├── WeightSyncError            weights that did not arrive as they were sent
    ├── CheckpointError            a checkpoint that is damaged, incomplete or of another run
    │   └── DiskNearlyFull         one that was not written for want of space; the run can go on
    ├── RewardError                a reward that failed, took too long or returned no number: no verdict, never a zero
    ├── SandboxError               a sandbox that could not be made or did not hold: no verdict on what ran in it
    ├── RolloutError               rollouts that can no longer deliver what the step needs
    └── DivergedError              training whose numbers are no longer finite, also after going back

`PolicyFault` stands apart: an environment raises it when the model's own action broke it. It is a verdict, not a failure.

Every class is built from its message alone, so that each survives pickling between processes.
"""

from __future__ import annotations

import traceback


class DrumrollError(Exception):
    """Base of everything that drumroll raises on purpose."""


class UserError(DrumrollError):
    """Something the user can put right: the message says what, where and how."""


class ConfigError(UserError):
    """A config key, value or combination that cannot be accepted."""


class PlanError(UserError):
    """A device map that does not fit the pool."""


class DataError(UserError):
    """A dataset that is missing, broken, or lacks a needed column."""


class ModelError(UserError):
    """A model or tokenizer folder that cannot be used."""


class PluginError(UserError):
    """A registered name or import path that cannot be resolved."""


class RunFolderError(UserError):
    """A run folder that already holds a run, or one that holds none."""


class WorkerError(DrumrollError):
    """An exception raised inside a worker; the message names role, rank, node and the remote traceback."""


class WorkerOverdue(WorkerError):
    """Workers that gave no answer in time; the message says which, and what they do instead."""


class WorkerUnreachable(WorkerError):
    """A worker that was out of reach for a moment: nobody knows whether it has done what it was asked."""


class StateLost(WorkerError):
    """What is learnt is lost with the workers that hold it each time that the run goes on from where it was kept."""


class WorkerLost(WorkerError):
    """A worker whose process or node is gone."""


class NodeLost(WorkerLost):
    """A worker whose node is gone, with the devices that it had there."""


class RoleLost(WorkerLost):
    """A role that nobody is left for, or not enough, and whose restarts are used up."""


class DeviceMemoryError(WorkerError):
    """A device whose memory was not enough. The worker lives on, without what it was computing."""

    role: str = ""
    rank: int = -1
    stage: str = ""
    """`start`, `rollout`, `score`, `update`, `sync`, or the name of the call."""


class DeviceLost(WorkerLost):
    """A device that fell off, or failed in a way that leaves its process unable to compute."""


class WeightSyncError(DrumrollError):
    """Weights that did not arrive as they were sent."""


class CheckpointError(DrumrollError):
    """A checkpoint that is damaged, incomplete or of another run."""


class DiskNearlyFull(CheckpointError):
    """A checkpoint that was not written for want of space; those before it are intact, and the run can go on."""


class RewardError(DrumrollError):
    """A reward that failed, took too long, or returned something that is no reward."""


class SandboxError(DrumrollError):
    """A sandbox that could not be made, or that broke: there is no verdict on what was to run in it."""


class RolloutError(DrumrollError):
    """Rollouts that can no longer deliver what the step needs."""


class DivergedError(DrumrollError):
    """Training whose losses or gradients are no longer finite, also after going back to an earlier state."""


def place_of(error: Exception) -> str:
    """` (file, line 12)`: where it was raised, for messages about the user's own functions."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


class PolicyFault(Exception):
    """Raised by an environment whose episode the model's own action broke; the episode ends with this reward and trains.

    Example: `raise PolicyFault(-1.0, "the move left the board")`.
    """

    def __init__(self, reward: float, reason: str = "") -> None:
        super().__init__(reward, reason)
        self.reward = reward
        self.reason = reason
