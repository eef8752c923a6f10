"""The learning curve of a run as a PNG, drawn from metrics.jsonl and eval.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drumroll.record.files import aside, read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.metrics import HELDOUT_ACCURACY, HELDOUT_LOSS, PREFERENCE_ACCURACY, REWARD, SFT_LOSS, SUCCESS

INK, GREY, BLUE, GREEN, ORANGE = "#1f2933", "#9aa5b1", "#2f6fde", "#138a4b", "#d9730d"

Points = list[tuple[int, float]]


def draw_curve(folder: RunFolder) -> Path:
    """Draw curve.png into the run folder and return its path: success and reward of RL, the accuracy of preferences, or the loss where
    there was only SFT."""
    metrics, evaluations = read_lines(folder.metrics_file), read_lines(folder.eval_file)
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reward, success = _series(metrics, REWARD), _series(metrics, SUCCESS)
    if reward or success:
        _draw_rl(axes, reward, success)
        _draw_evaluations(axes, evaluations)
    elif accuracy := _series(metrics, PREFERENCE_ACCURACY):
        _draw_preferences(axes, accuracy, _series(evaluations, HELDOUT_ACCURACY))
    else:
        _draw_sft(axes, _series(metrics, SFT_LOSS), _series(evaluations, HELDOUT_LOSS))
    _dress(axes, str(folder.config().get("name", folder.root.name)))
    with aside(folder.curve_file) as draft:
        figure.savefig(draft, format="png")
    return folder.curve_file


def _draw_rl(axes: Axes, reward: Points, success: Points) -> None:
    shown = {"success": success, "reward": [] if reward == success else reward}
    for (name, points), color in zip(shown.items(), (BLUE, GREY), strict=True):
        if points:
            _line(axes, points, color, f"training {name}, sampled")
    if all(0.0 <= value <= 1.0 for _, value in [*reward, *success]):
        axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("RL step")
    axes.set_ylabel(", ".join(name for name, points in shown.items() if points))


def _draw_preferences(axes: Axes, accuracy: Points, heldout: Points) -> None:
    _line(axes, accuracy, BLUE, "training accuracy")
    if heldout:
        _dots(axes, heldout, "held-out accuracy")
        for point in {heldout[0], heldout[-1]}:
            _label(axes, point)
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("update")
    axes.set_ylabel("preferences told apart")


def _draw_sft(axes: Axes, loss: Points, heldout: Points) -> None:
    if loss:
        _line(axes, loss, BLUE, "training loss")
    if heldout:
        _dots(axes, heldout, "held-out loss")
    axes.set_xlabel("update")
    axes.set_ylabel("loss per token")


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict[str, Any]]) -> None:
    own = [record for record in evaluations if record.get("stage") != "comparison"]
    sampled, greedy = _series(own, "sampled"), _series(own, "greedy")
    if greedy:
        _dots(axes, greedy, "held-out, greedy", is_greedy=True)
    domains = dict.fromkeys(name for record in own for name in record if name.startswith("sampled/"))
    for number, name in enumerate(domains):
        points = _series(own, name)
        style = ("-", "--", ":", "-.")[number % 4]
        axes.plot(*_xy(points), color=INK, alpha=0.55, linewidth=1.0, linestyle=style, marker=".", label=name.partition("/")[2])
    if sampled:
        _dots(axes, sampled, "held-out, sampled" + (", mean of the domains" if domains else ""))
        for point in {sampled[0], sampled[-1]}:
            _label(axes, point)
    comparison = _series([record for record in evaluations if record.get("stage") == "comparison"], "sampled")
    if comparison:
        value = comparison[-1][1]
        axes.axhline(value, color=ORANGE, linestyle="--", linewidth=1.5, label=f"held-out, same compute as more SFT ({value:.2f})")


def _label(axes: Axes, point: tuple[int, float]) -> None:
    """The value under its point, on a white ground so that it can be read over other lines."""
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    text = f"{point[1]:.2f}"
    axes.annotate(text, point, (0, -19), textcoords="offset points", ha="center", color=GREEN, fontweight="bold", bbox=ground, zorder=5)


def _line(axes: Axes, points: Points, color: str, label: str) -> None:
    """Every step faintly, and the mean over about a twelfth of them around each on top."""
    steps, values = _xy(points)
    reach = len(values) // 24
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    if reach:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1.0)
    axes.plot(steps, [fmean(w) for w in windows], color=color, linewidth=2.0, label=label, marker="." if len(steps) == 1 else None)


def _dots(axes: Axes, points: Points, label: str, *, is_greedy: bool = False) -> None:
    """Evaluations; a line joins them only where there are some in between, because nothing is known of the way otherwise."""
    look: dict[str, Any] = {"marker": "D", "markersize": 5, "markerfacecolor": "white"} if is_greedy else {"marker": "o", "markersize": 7}
    join = ("-", ":")[is_greedy] if len(points) > 2 else "none"
    axes.plot(*_xy(points), color=GREEN, linewidth=1.5, linestyle=join, label=label, zorder=4, **look)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)


def _series(records: Sequence[dict[str, Any]], name: str) -> Points:
    """(step, value) of the records that have a finite value of that name, by step."""
    found = [(int(record["step"]), float(record[name])) for record in records if record.get(name) is not None]
    return sorted(point for point in found if math.isfinite(point[1]))


def _xy(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
