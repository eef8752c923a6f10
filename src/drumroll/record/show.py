"""What `drumroll show RUN` prints: a table of samples, or one trajectory in full. Functions that return renderables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from drumroll.errors import UserError
from drumroll.life import FINAL, Stamp, unpack_life
from drumroll.record.store import Bounds, Filter, SampleRow, why_no_payload
from drumroll.registry import nearest
from drumroll.types import Trajectory

AUTHOR_STYLE = {"environment": "cyan", "policy": "green"}
_STATE_STYLE = {"filtered": "yellow", "aborted": "dim", "failed": "red"}


def parse_filter(
    *,
    phase: str | None = None,
    step: str | None = None,
    reward: str | None = None,
    domain: str | None = None,
    state: str | None = None,
    stop_reason: str | None = None,
    success: bool | None = None,
    superseded: bool = False,
) -> Filter:
    """A filter from command-line texts. `step` and `reward` take `3`, `>=0.5`, `<0.5` or `0.2..0.8`.

    `superseded` asks for the samples that no longer count, because the run was taken back to before them, instead of those that do."""
    ranges = {"step": step, "reward": reward}
    bounds: dict[str, Bounds | None] = {}
    for name, text in ranges.items():
        try:
            bounds[name] = None if text is None else Bounds.parse(text)
        except UserError as error:
            raise UserError(f"--{name}: {error}") from error
    if state is not None and state not in FINAL:
        known = sorted(FINAL)
        raise UserError(f"--state: no sample ends as '{state}'.{nearest(state, known)} Known: {', '.join(known)}.")
    return Filter(
        phase=phase,
        step=bounds["step"],
        reward=bounds["reward"],
        domain=domain,
        state=state,
        stop_reason=stop_reason,
        success=success,
        superseded=superseded,
    )


def sample_table(rows: Sequence[SampleRow], total: int) -> RenderableType:
    """A line per sample. `total` is how many the filter lets through, of which `rows` may be the first.

    How samples ended stands there only where some were not consumed."""
    with_states = any(row.state != "consumed" for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("sample", overflow="fold", style="bold", ratio=3)
    table.add_column("step", justify="right")
    table.add_column("domain")
    if with_states:
        table.add_column("state")
    table.add_column("reward", justify="right")
    table.add_column("success")
    table.add_column("stop")
    table.add_column("tokens", justify="right")
    table.add_column("reply", no_wrap=True, overflow="ellipsis", ratio=4)
    for row in rows:
        table.add_row(
            Text(printable(row.sample_id)),
            str(row.step),
            Text(printable(row.domain)),
            *([state_text(row.state)] if with_states else []),
            reward_text(row.reward),
            success_text(row.success),
            row.stop_reason,
            f"{row.num_prompt_tokens}+{row.num_new_tokens}" if row.has_payload else Text("-", style="dim"),
            _gist(row),
        )
    if len(rows) == total:
        note = f"{total} samples." if rows else "No sample matches."
    else:
        note = f"{len(rows)} of {total} samples; narrow the filter or raise the limit to see others."
    return Group(table, Text(note, style="dim")) if rows else Text(note, style="dim")


def trajectory_view(row: SampleRow, trajectory: Trajectory | None) -> RenderableType:
    """One sample in full: facts, its life, then every turn in its author's colour. `trajectory` is None where the store has none."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("phase", Text(printable(f"{row.phase}, step {row.step}{', superseded' if row.superseded else ''}")))
    facts.add_row("task", Text(printable(f"{row.task_id} ({row.domain})")))
    if row.state != "consumed":
        facts.add_row("state", Text.assemble(state_text(row.state), f"   {printable(row.reason)}"))
    if trajectory is None:
        facts.add_row("tokens", Text(printable(f"none: {why_no_payload(row)}")))
    else:
        _add_figures(facts, row, trajectory)
    if row.life:
        facts.add_row("life", _life_table(unpack_life(row.life)))
    turns = _turns(trajectory) if trajectory is not None else []
    return Group(Text(printable(row.sample_id), style="bold"), facts, *turns)


def _add_figures(facts: Table, row: SampleRow, trajectory: Trajectory) -> None:
    facts.add_row("reward", Text.assemble(reward_text(trajectory.reward), _listed(trajectory.reward_parts, "   ")))
    facts.add_row("success", success_text(trajectory.success))
    facts.add_row("stopped by", trajectory.stop_reason)
    facts.add_row("tokens", f"{row.num_prompt_tokens} given, {row.num_new_tokens} sampled{_versions(trajectory)}")
    facts.add_row("sampling", f"temperature {trajectory.sampling.temperature:g}, seed {trajectory.seed}")
    if trajectory.metrics:
        facts.add_row("metrics", _listed(trajectory.metrics))
    if trajectory.task.data:
        facts.add_row("data", Text(printable(", ".join(f"{key}: {value!r}" for key, value in trajectory.task.data.items()))))
    if trajectory.error:
        by = f"{trajectory.fault}: " if trajectory.fault else ""
        facts.add_row("error", Text(printable(by + trajectory.error), style="red"))


def _turns(trajectory: Trajectory) -> list[Panel]:
    return [
        Panel(
            Text(printable(turn.text), style=AUTHOR_STYLE[turn.author]),
            title=f"{turn.author}, {turn.end - turn.start} tokens",
            title_align="left",
            border_style=f"dim {AUTHOR_STYLE[turn.author]}",
        )
        for turn in trajectory.turns
    ]


def _life_table(stamps: Sequence[Stamp]) -> Table:
    """A line per state: seconds since the first one, how long it lasted, where it was, and the step of the weights."""
    table = Table("state", Column("at", justify="right"), Column("lasted", justify="right"), "where", "version", box=None, pad_edge=False)
    followers = [*stamps[1:], None]
    for stamp, follower in zip(stamps, followers, strict=True):
        table.add_row(
            state_text(stamp.state),
            f"+{stamp.time - stamps[0].time:.3f} s",
            f"{follower.time - stamp.time:.3f} s" if follower else "",
            _where(stamp),
            str(stamp.version) if stamp.version >= 0 else "",
        )
    return table


def printable(text: str) -> str:
    """Text that is safe for a terminal: control characters that a model may have written appear as escapes."""
    return "".join(c if c in "\n\t" or not _is_control(c) else c.encode("unicode_escape").decode() for c in text)


def reward_text(reward: float | None) -> Text:
    if reward is None:
        return Text("no verdict", style="dim")
    return Text(f"{reward:.3g}", style="green" if reward > 0 else "red" if reward < 0 else "")


def success_text(success: bool | None) -> Text:
    return Text("-", style="dim") if success is None else Text("yes", style="green") if success else Text("no", style="red")


def state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLE.get(state, ""))


def _listed(values: Mapping[str, float], before: str = "") -> Text:
    return Text(printable(before + "  ".join(f"{name} {value:.4g}" for name, value in values.items())) if values else "")


def _versions(trajectory: Trajectory) -> str:
    versions = trajectory.token_version[trajectory.loss_mask]
    if not len(versions):
        return ""
    oldest, newest = int(versions.min()), int(versions.max())
    return f" by the weights of step {oldest}" + (f" to {newest}" if newest > oldest else "")


def _gist(row: SampleRow) -> Text:
    """The error, else the beginning of the reply, else why there is none."""
    if row.error:
        return Text(printable(row.error).replace("\n", " "), style="red")
    if row.has_payload:
        return Text(printable(row.reply).replace("\n", "⏎"))
    return Text(printable(row.reason).replace("\n", " "), style="dim")


def _where(stamp: Stamp) -> str:
    if stamp.place < 0:
        return ""
    who = "engine" if stamp.state in ("waiting", "generating") else "worker"
    return f"{who} {stamp.place}" + (f", slot {stamp.slot}" if stamp.slot >= 0 else "")


def _is_control(character: str) -> bool:
    code = ord(character)
    return code < 32 or 127 <= code < 160 or 0xD800 <= code < 0xE000 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def replay_table(results: Sequence[tuple[int, bool, Mapping[str, tuple[Any, Any]]]]) -> Table:
    """Steps that were trained again: whether the weights are the same, and which metrics are not."""
    table = Table("step", "weights", "metrics that differ", box=None)
    for step, same_weights, differences in results:
        told = "\n".join(f"{name}: {recorded} → {again}" for name, (recorded, again) in differences.items())
        table.add_row(str(step), "[green]identical[/]" if same_weights else "[red]different[/]", told or "none")
    return table
