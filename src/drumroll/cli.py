"""The command line. Each command reads its arguments, calls one function, and turns errors into messages and exit codes.

Exit codes: 0 done, 1 the run failed, 2 something to put right in the input, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from drumroll import __version__
from drumroll.errors import DrumrollError, PluginError, UserError
from drumroll.imports import importing

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

bench_app = typer.Typer(no_args_is_help=True, help="Measure a part of drumroll: a table, and one line of JSON at the end.")
app.add_typer(bench_app, name="bench")

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG... [KEY=VALUE...]", help="YAML files, merged left to right, then overrides such as trainer.lr=3e-4."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def command_line(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Reinforcement learning of language models and agents."""


@app.command()
def train(
    inputs: Inputs,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Watch over the run from a second process, and resume it if its process dies.")
    ] = False,
) -> None:
    """Train as the config says."""
    with importing():
        from drumroll.pipelines.start import start

        cfg = _config(inputs)
    if supervise:
        raise typer.Exit(_supervised(cfg, inputs))
    start(cfg)


@app.command()
def resume(
    run: RunPath,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="What is to change in the run's config, by name.")
    ] = None,
    changed: Annotated[
        list[str] | None, typer.Option("--changed", metavar="FILE", help="Accept that this plugin file is not what it was.")
    ] = None,
) -> None:
    """Go on with a run that was cut off, from its newest good checkpoint."""
    with importing():
        from drumroll.pipelines.start import resume

    resume(run, overrides or (), changed or ())


@app.command(name="eval")
def evaluate(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG...|RUN [KEY=VALUE...]", help="YAML files as for `train`, or the folder of a run; then overrides."),
    ],
    model: Annotated[
        str | None, typer.Option(help="In place of the config's model or the run's: a folder, a hub id, or the folder of a run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist. runs/<name>-eval-<time> otherwise.")] = None,
) -> None:
    """Play the held-out tasks with a model as it is, sampled and greedy, without training."""
    from drumroll.pipelines.start import config_of, with_model
    from drumroll.pipelines.start import evaluate as evaluate_model

    run = next((text for text in inputs if "=" not in text and Path(text).is_dir()), None)
    cfg = _config(inputs) if run is None else config_of(run, [text for text in inputs if text != run])
    if model is not None:
        cfg = with_model(cfg, model)
    evaluate_model(cfg.model_copy(update={"run_dir": out}))


@app.command()
def replay(run: RunPath, step: Annotated[int, typer.Option(help="Step of RL to train again.", min=1)]) -> None:
    """Train a step again from its stored trajectories, without engines, and compare with what was recorded."""
    from drumroll.pipelines.replay import replay as replay_step
    from drumroll.record.show import replay_table

    results = replay_step(run, step)
    Console().print(replay_table([(result.step, result.same_weights, result.differences()) for result in results]))
    if not results[-1].same_weights:
        raise typer.Exit(1)


@app.command()
def check(inputs: Inputs) -> None:
    """Check config, plugins, data and model without starting anything."""
    from drumroll.pipelines.job import prepare

    job = prepare(_config(inputs))
    Console().print(f"[green]ok[/]: {job.describe()}", soft_wrap=True)
    for note in job.notes:
        _note(note)


@app.command()
def plan(
    inputs: Inputs,
    pool: Annotated[
        str | None, typer.Option(help="Plan for a cluster that is not here: nodes x devices x memory, for example 4x8x80GiB.")
    ] = None,
) -> None:
    """Print which role gets which devices, without starting anything."""
    from drumroll.pipelines.job import UNSEEN_CLUSTER, plan_for
    from drumroll.plan.render import render

    cfg = _config(inputs)
    made, used = plan_for(cfg, pool)
    Console().print(render(made, used))
    if cfg.ray.address is not None and pool is None:
        _note(f"this is a plan for this machine. {UNSEEN_CLUSTER}")


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder, or with --trajectories file, to write; must not exist.")],
    step: Annotated[
        str | None, typer.Option(help="Checkpoint of this step; the final model otherwise. With --trajectories: '3', '>=10' or '3..5'.")
    ] = None,
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="Write episodes as JSON lines, for supervised fine-tuning, and not a model.")
    ] = False,
    phase: Annotated[str | None, typer.Option(help="Of --trajectories: train, eval or comparison.")] = None,
    reward: Annotated[str | None, typer.Option(help="Of --trajectories: '1', '>=0.5' or '0.2..0.8'.")] = None,
    domain: Annotated[str | None, typer.Option(help="Of --trajectories: only this domain.")] = None,
    success: Annotated[bool | None, typer.Option("--success/--no-success", help="Of --trajectories: only successes, or others.")] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, or its episodes as JSON lines."""
    from drumroll.record.folder import RunFolder

    folder = RunFolder.open(run)
    if trajectories:
        from drumroll.record.episodes import export_episodes
        from drumroll.record.show import parse_filter

        where = parse_filter(phase=phase, step=step, reward=reward, domain=domain, success=success)
        print(f"wrote {export_episodes(folder, out, where):,} episodes to {out}")
        return
    if step is not None and not step.isdigit():
        raise UserError(f"--step: got '{step}'; the number of a step was expected.")
    source = folder.export(out, None if step is None else int(step))
    Console().print(f"wrote {out} from {source}", soft_wrap=True)


@app.command()
def play(
    run: RunPath,
    env: Annotated[str | None, typer.Option(help="Only episodes of this kind of environment.")] = None,
    phase: Annotated[str | None, typer.Option(help="train, eval or comparison.")] = None,
    step: Annotated[str | None, typer.Option(help="Only these steps: '3', '>=10' or '3..5'.")] = None,
    success: Annotated[bool | None, typer.Option("--success/--no-success", help="Only successes, or only others.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many, the newest.", min=1)] = 3,
    delay: Annotated[float, typer.Option(help="Seconds between two turns.", min=0)] = 0.5,
) -> None:
    """Watch episodes of a run in the terminal, turn by turn, also while it goes on."""
    from drumroll.record.folder import RunFolder
    from drumroll.record.play import play as play_episodes
    from drumroll.record.show import parse_filter

    where = parse_filter(phase=phase, step=step, success=success, state="consumed")
    shown = play_episodes(RunFolder.open(run), Console(), where, env=env, limit=limit, delay_s=delay)
    if not shown:
        print("No episode matches.")


@app.command()
def show(
    run: RunPath,
    sample: Annotated[str | None, typer.Argument(metavar="[SAMPLE]", help="Print this sample in full.")] = None,
    step: Annotated[str | None, typer.Option(help="Only these steps: '3', '>=10' or '3..5'.")] = None,
    phase: Annotated[str | None, typer.Option(help="train, eval or comparison.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only these rewards: '1', '>=0.5', '<0' or '0.2..0.8'.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain.")] = None,
    state: Annotated[str | None, typer.Option(help="Only what ended so: consumed, filtered, aborted or failed.")] = None,
    stop: Annotated[str | None, typer.Option(help="Only this stop reason, for example length.")] = None,
    success: Annotated[bool | None, typer.Option("--success/--no-success", help="Only successes, or only others.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many.", min=1)] = 20,
    full: Annotated[bool, typer.Option("--full", help="Print every listed sample in full.")] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Only samples that the run left behind when it went back to a checkpoint.")
    ] = False,
) -> None:
    """List and print trajectories of a run, also while it goes on."""
    from drumroll.record.folder import RunFolder
    from drumroll.record.show import parse_filter, sample_table, trajectory_view
    from drumroll.record.store import Reader

    console = Console()
    where = parse_filter(
        phase=phase, step=step, reward=reward, domain=domain, state=state, stop_reason=stop, success=success, superseded=superseded
    )
    with Reader(RunFolder.open(run).store) as reader:
        rows = [reader.row(sample)] if sample else reader.query(where, limit=limit)
        if not sample and not full:
            console.print(sample_table(rows, reader.count(where)))
            return
        for row in rows:
            console.print(trajectory_view(row, reader.load(row.sample_id) if row.has_payload else None))


@app.command()
def trace(run: RunPath, out: Annotated[Path, typer.Argument(metavar="OUT.json", help="File to write; must not exist.")]) -> None:
    """Write the timeline of a run, also while it goes on: every slot, environment worker, reward worker and trainer."""
    from drumroll.record.folder import RunFolder
    from drumroll.record.store import Filter, Reader
    from drumroll.record.trace import write_trace

    folder = RunFolder.open(run)
    num_events = write_trace(folder, out)
    with Reader(folder.store) as reader:
        num_samples = reader.count(Filter(superseded=None))
    print(f"wrote {num_events:,} events of {num_samples:,} samples to {out}")
    print("Open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.")


@bench_app.command()
def scheduler(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds, steps and combinations: under a minute.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Only the combination that the headline figures are of.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each combination.", min=1)] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; as many as processors otherwise.", min=1)] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every row to this file, too.")] = None,
) -> None:
    """Ways of scheduling samples, side by side, in simulation."""
    from drumroll.bench.scheduler import bench as bench_scheduler

    bench_scheduler(quick=quick, base=base, num_seeds=seeds, num_processes=jobs, out=out)


@bench_app.command()
def rl(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="Settings of the run, such as algo.kl.coef=0.1.")
    ] = None,
    shape: Annotated[str, typer.Option(help="tiny, 3m, qwen2.5-0.5b, qwen2.5-1.5b or qwen2.5-7b.")] = "tiny",
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 64,
    samples: Annotated[int, typer.Option(help="Replies to each.", min=2)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of every prompt.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Length of every reply.", min=1)] = 512,
    tailed: Annotated[
        bool, typer.Option("--tailed", help="Lengths with a long tail, cut at --new-tokens, the median a tenth of it.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps that are measured, after one that is not.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, too.")] = None,
) -> None:
    """Whole training steps of a model's shape, with random weights: phases, tokens per second, MFU, memory."""
    from drumroll.bench.rl import Workload
    from drumroll.bench.rl import bench as bench_rl

    bench_rl(shape, Workload(prompts, samples, prompt_tokens, new_tokens, tailed), steps, overrides or [], out)


@app.command(name="list")
def list_registered(
    family: Annotated[str | None, typer.Argument(help="For example reward, group_filter or infer_backend; all otherwise.")] = None,
    plugins: Annotated[list[str] | None, typer.Option("--plugin", help="Module or file to import first.")] = None,
) -> None:
    """Name everything that is registered: backends, environments, rewards, advantages, losses, corrections, filters."""
    from rich.table import Table
    from rich.text import Text

    from drumroll.registry import FAMILIES, REGISTRY, import_plugin, nearest

    if family is not None and family not in FAMILIES:
        raise UserError(f"no family named '{family}'.{nearest(family, FAMILIES)} Known: {', '.join(FAMILIES)}.")
    for module in plugins or []:
        import_plugin(module)
    table = Table("family", "kind", "what it is", box=None)
    for known in [family] if family else FAMILIES:
        for name in REGISTRY.names(known):
            try:
                what = REGISTRY.lookup(known, name).summary
            except PluginError as error:  # a package that it needs
                what = str(error)
            table.add_row(known, name, Text(what))
    Console().print(table)


def _supervised(cfg: Any, inputs: Sequence[str]) -> int:
    """Run `drumroll train` in a child process, and whenever that dies `drumroll resume`, or where nothing was begun the same again; returns
    the exit code."""
    from drumroll.pipelines.job import prepare
    from drumroll.pipelines.supervise import supervise
    from drumroll.record.checkpoint import CheckpointStore
    from drumroll.record.folder import RunFolder

    def checkpoints() -> list[str]:
        if not folder.config_file.exists():
            return []
        with CheckpointStore(folder.checkpoint_root) as store:
            return store.names()

    def command() -> list[str]:
        drumroll = [sys.executable, "-m", "drumroll"]
        if folder.config_file.exists():
            return [*drumroll, "resume", str(folder.root)]
        folder.give_up()  # the child claims it
        return [*drumroll, "train", *inputs, f"run_dir={folder.root}"]

    prepare(cfg)
    folder = RunFolder.claim(cfg.run_dir, cfg.name)
    return supervise(command, progress=checkpoints, say=lambda text: print(f"drumroll: {text}", file=sys.stderr))


def _config(inputs: Sequence[str]) -> Any:
    from drumroll.config.load import load_config

    files = [text for text in inputs if "=" not in text or Path(text).exists()]
    if not files:
        raise UserError("no config file given. Try: drumroll train recipes/quickstart.yaml")
    return load_config(files, [text for text in inputs if text not in files])


def _note(text: str) -> None:
    Console().print(f"[yellow]note[/]: {text}", soft_wrap=True)


def main() -> None:
    """Entry point of `drumroll`."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        code = app(standalone_mode=False)  # None from every command that ends; a code where typer ended it, as on Ctrl-C
        if code == 130:
            raise KeyboardInterrupt
        sys.exit(code)
    except UserError as error:
        _fail(str(error), 2)
    except DrumrollError as error:
        _fail("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # a mistake on the command line itself
            message = error.format_message()
            _fail(message, 2) if message else sys.exit(2)  # without one, the help has been shown
        traceback.print_exc()
        sys.exit(1)


def _on_sigterm(number: int, frame: object) -> None:
    """The first SIGTERM unwinds everything in order; a second one exits at once."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    sys.exit(143)


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print("[bold red]drumroll:[/] ", end="")
    print(message, file=sys.stderr)
    sys.exit(code)
