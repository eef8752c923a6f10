"""Episodes of a run as JSON lines that supervised fine-tuning reads back: with their texts, and with their tokens and masks as sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drumroll.errors import RunFolderError
from drumroll.record.files import aside
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Trajectory


def export_episodes(folder: RunFolder, out: Path, where: Filter) -> int:
    """Write the matching episodes that have a verdict to a new file, whole or not at all; returns how many.

    A row has `turns` (what was shown, and the replies), `reward`, `success` and the task's id and domain; and `token_ids`,
    `loss_mask` and `tokenizer`, by which a model with the same tokenizer learns from exactly what was sampled."""
    if out.exists():
        raise RunFolderError(f"'{out}' exists already, and nothing is overwritten. Choose another name.")
    tokenizer = Tokenizer(folder.model_folder()).fingerprint
    with Reader(folder.store) as reader:
        trajectories = (reader.load(row.sample_id) for row in reader.query(where) if row.has_payload)
        rows = [episode(trajectory, tokenizer) for trajectory in trajectories if trajectory.trainable]
    if not rows:
        raise RunFolderError(f"'{folder.root}' has no episode with a verdict that matches: nothing is written.")
    with aside(out) as draft:
        draft.write_text("".join(line + "\n" for line in _lines(rows)), encoding="utf-8")
    return len(rows)


def episode(trajectory: Trajectory, tokenizer: str) -> dict[str, Any]:
    """One row."""
    return {
        "task": trajectory.task.id,
        "domain": trajectory.task.domain,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "turns": list(_turns(trajectory)),
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": [int(sampled) for sampled in trajectory.loss_mask],
        "tokenizer": tokenizer,
    }


def _turns(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """What was shown, then a reply, and so on; an observation that nobody replied to is left out."""
    for shown, replied in zip(trajectory.turns[::2], trajectory.turns[1::2], strict=False):
        yield {"prompt": shown.text}
        yield {"reply": replied.text, "reward": replied.reward}


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in rows)
