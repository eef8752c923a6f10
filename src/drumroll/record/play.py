"""What `drumroll play RUN` shows: episodes turn by turn, as they were played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from drumroll.errors import UserError
from drumroll.record.folder import RunFolder
from drumroll.record.show import printable, reward_text, success_text
from drumroll.record.store import Filter, Reader
from drumroll.registry import nearest
from drumroll.types import Trajectory


def play(
    folder: RunFolder,
    console: Console,
    where: Filter,
    *,
    env: str | None = None,
    limit: int = 3,
    delay_s: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the newest matching episodes, a moment after each turn; returns how many. `env` is the kind of environment."""
    domains = domains_of(folder.config(), env) if env is not None else None
    with Reader(folder.store) as reader:
        rows = [row for row in reader.query(where) if row.has_payload and (domains is None or domains == "*" or row.domain in domains)]
        for row in rows[-limit:]:
            for scene in scenes(reader.load(row.sample_id)):
                console.print(scene)
                sleep(delay_s)
    return min(limit, len(rows))


def domains_of(config: dict[str, Any], env: str) -> Sequence[str] | str:
    """The run's domains with this environment, `*` for all; an error that names the environments that the run has."""
    own = {name: (domain.get("env") or config["env"])["kind"] for name, domain in (config.get("domains") or {}).items()}
    kinds = own or {"*": config["env"]["kind"]}
    if env not in kinds.values():
        known = sorted(set(kinds.values()))
        raise UserError(f"--env: the run has no environment '{env}'.{nearest(env, known)} It has: {', '.join(known)}.")
    return [name for name, kind in kinds.items() if kind == env] if own else "*"


def scenes(trajectory: Trajectory) -> Iterator[RenderableType]:
    """A heading, what is shown and replied in turns, and the end."""
    yield Text(printable(f"{trajectory.sample_id}   task {trajectory.task.id}"), style="bold")
    number = 0
    for turn in trajectory.turns:
        if turn.author == "environment":
            yield Text(printable(turn.text), style="cyan")
            continue
        number += 1
        title = Text.assemble(f"turn {number}   reward ", reward_text(turn.reward))
        yield Panel(Text(printable(turn.text) or "(nothing)", style="green"), title=title, title_align="left", expand=False)
    success = success_text(trajectory.success)
    yield Text.assemble(f"ended by {trajectory.stop_reason}   reward ", reward_text(trajectory.reward), "   success ", success, "\n")
