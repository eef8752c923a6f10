"""The learning curve of a run as a PNG, drawn from metrics.jsonl and eval.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drumroll.record.files import aside, read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.metrics import REWARD, SUCCESS

INK, GREY, BLUE, GREEN, ORANGE = "#1f2933", "#9aa5b1", "#2f6fde", "#138a4b", "#d9730d"

Points = list[tuple[int, float]]


def draw_curve(folder: RunFolder) -> Path:
    """Draw curve.png into the run folder and return its path."""
    metrics, evaluations = read_lines(folder.metrics_file), read_lines(folder.eval_file)
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reward, success = _series(metrics, REWARD), _series(metrics, SUCCESS)
    if success:
        _line(axes, success, BLUE, "training success, sampled")
    if reward and reward != success:
        _line(axes, reward, GREY, "training reward")
    _draw_evaluations(axes, evaluations)
    if all(0.0 <= value <= 1.0 for _, value in [*reward, *success]):
        axes.set_ylim(-0.02, 1.05)
    _dress(axes, str(folder.config().get("name", folder.root.name)), "success" if reward == success or not reward else "success, reward")
    with aside(folder.curve_file) as draft:
        figure.savefig(draft, format="png")
    return folder.curve_file


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict[str, Any]]) -> None:
    own = [record for record in evaluations if record.get("stage") != "comparison"]
    sampled, greedy = _series(own, "sampled"), _series(own, "greedy")
    if greedy:
        hollow: dict[str, Any] = {"marker": "D", "markersize": 5, "markerfacecolor": "white"}
        axes.plot(*_xy(greedy), color=GREEN, linewidth=1.2, linestyle=":", label="held-out, greedy", **hollow)
    if sampled:
        axes.plot(*_xy(sampled), color=GREEN, marker="o", markersize=7, linewidth=1.8, label="held-out, sampled", zorder=4)
        for place, (step, value) in {"left": sampled[0], "right": sampled[-1]}.items():
            shift, side = ((8, "left") if place == "left" else (-8, "right")) if len(sampled) > 1 else (8, "left")
            axes.annotate(
                f"{value:.2f}", (step, value), xytext=(shift, -15), textcoords="offset points", ha=side, color=GREEN, fontweight="bold"
            )
    comparison = _series([record for record in evaluations if record.get("stage") == "comparison"], "sampled")
    if comparison:
        value = comparison[-1][1]
        axes.axhline(value, color=ORANGE, linestyle="--", linewidth=1.5, label=f"held-out, same compute as more SFT ({value:.2f})")


def _line(axes: Axes, points: Points, color: str, label: str) -> None:
    """Every step faintly, and a running mean over a twelfth of them on top."""
    steps, values = _xy(points)
    window = max(1, len(values) // 12)
    smooth = [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1.0)
    axes.plot(steps, smooth, color=color, linewidth=2.0, label=label, marker="." if len(steps) == 1 else None)


def _dress(axes: Axes, title: str, quantity: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set_xlabel("RL step", color=INK)
    axes.set_ylabel(quantity, color=INK)
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
