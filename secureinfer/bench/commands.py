"""`secureinfer bench` and `python -m benchmarks`: run cases or loads, draw a report, compare two."""

from __future__ import annotations

import math
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import UsageError
from ..terminal import Terminal

# All that is heavy is imported inside the commands: `--help` answers at once.
if TYPE_CHECKING:
    from ..measure.energy import EnergyMeter
    from .runner import Effort
    from .sweep import Plan


class _RunsByDefault(TyperGroup):
    """`bench --quick` is `bench run --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsByDefault,
    help="What privacy costs: private inference beside plaintext on this machine, in one run. Without a command: run.",
    no_args_is_help=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and no progress.")]
WHICH, SHAPE, HOW, LOAD = "Which cases", "Which cases", "How they are run", "Load (MLPerf LoadGen)"


@app.command()
def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="fraud-mlp, minilm, ..., or file.py:name of your own. Else the cases of a built-in sweep.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", rich_help_panel=WHICH, help="A sweep that ends within three minutes.")
    ] = False,
    study: Annotated[
        bool,
        typer.Option("--study", rich_help_panel=WHICH, help="The case study of docs/benchmarks.md; hours."),
    ] = False,
    compression: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=SHAPE,
            metavar="NAME",
            help="none, int8, approximate; repeatable. Example: --compression int8",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=SHAPE,
            metavar="NAME",
            help="mpc, crypten, ckks; repeatable. Example: --backend ckks",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=SHAPE,
            metavar="NAME",
            help="loopback, lan, wan (emulated between namespaces by root, else projected), lan:projected, wan:projected; "
            "repeatable. Example: --network wan",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            rich_help_panel=SHAPE,
            metavar="N",
            min=1,
            help="Samples of an inference; repeatable. Example: --batch 8",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=HOW,
            metavar="N",
            min=2,
            help="Warm private inferences of a case, at least. Example: --runs 10",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=HOW,
            metavar="S",
            min=0,
            help="How long turns are taken, at least. Example: --seconds 60",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=HOW,
            metavar="NAME:TYPE",
            help="Plaintext to compare with, in place of all; repeatable. Example: --engine 'torch eager:fp32'",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=HOW,
            metavar="N",
            min=1,
            help="Of each party; half of the cores by default. Example: --threads 1",
        ),
    ] = None,
    watts_per_core: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=HOW,
            metavar="W",
            min=0,
            help="Of an estimate, where no meter can be read. Example: --watts-per-core 7",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=LOAD,
            metavar="NAME",
            help="single-stream, multi-stream, server, offline: a load, in place of turns; repeatable. "
            "Example: --scenario server",
        ),
    ] = None,
    target_p99_ms: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=LOAD,
            metavar="MS",
            min=0,
            help="server: the bound that 99 % of queries keep. Example: --target-p99-ms 50",
        ),
    ] = None,
    loadgen_settings: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LOAD,
            metavar="FILE",
            help="LoadGen's settings, in its own format. Example: --loadgen-settings user.conf",
        ),
    ] = None,
    least_seconds: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=LOAD,
            metavar="S",
            min=0,
            help="Least duration of a load; shorter ones are invalid. Example: --least-seconds 60",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A folder for the report and each case; a new one by default. What it holds of these cases is kept.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Go on with a sweep that was stopped. Example: --resume bench-20261130-2145"
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="With --out or --resume: run failed cases again. Example: --resume DIR --retry-failed",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Run cases of model, compression, backend, network and batch, and report what privacy costs.

    Private inferences and plaintext engines (torch eager, torch.compile, ONNX
    Runtime; fp32, bf16, int8) take turns on this machine. Writes report.json,
    report.md and report.html. A case that fails stands in the report.

    Example:  secureinfer bench fraud-mlp --backend mpc --backend ckks
    """
    terminal = Terminal(as_json=json)
    if resume is not None:
        given = {
            "models": models, "--quick": quick, "--study": study, "--compression": compression, "--backend": backend,
            "--network": network, "--batch": batch, "--runs": runs, "--seconds": seconds, "--engine": engine,
            "--threads": threads, "--scenario": scenario, "--target-p99-ms": target_p99_ms,
            "--loadgen-settings": loadgen_settings, "--least-seconds": least_seconds, "--out": out,
        }  # fmt: skip
        if extra := [
            name for name, value in given.items() if value is not None and value is not False and value != []
        ]:
            raise UsageError(f"--resume takes all from the folder; leave away: {', '.join(extra)}")
    for name, number in (
        ("--seconds", seconds),
        ("--target-p99-ms", target_p99_ms),
        ("--least-seconds", least_seconds),
    ):
        if number is not None and not math.isfinite(number):
            raise UsageError(f"{name} takes a number, not {number}")
    if target_p99_ms == 0:
        raise UsageError("--target-p99-ms takes more than 0; no query takes no time")
    if quick and study:
        raise UsageError("--quick and --study are two sweeps; give one of them")
    if scenario is None and (
        target_p99_ms is not None or loadgen_settings is not None or least_seconds is not None
    ):
        raise UsageError("settings of a load need --scenario, such as --scenario server")
    from .sweep import Folder, Plan, read_plan

    if resume is not None:
        plan = read_plan(resume)
        folder = Folder(resume)
    else:
        from .cases import chosen
        from .loads import load_plan

        effort = _effort(quick, runs, seconds, engine, threads)
        keys = chosen(
            models or (), compression, backend, network, batch, quick=quick, study=study, load=bool(scenario)
        )
        load = None
        if scenario is not None:
            settings = "quick" if loadgen_settings is None and quick else loadgen_settings
            load = load_plan(scenario, target_p99_ms, settings, least_seconds)
        plan = Plan(tuple(keys), effort, shlex.join(["secureinfer", *sys.argv[1:]]), load=load)
        if out is not None:
            _check_same(out, plan)
        folder = Folder(out or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}"))
    from .shown import Shown, summary

    with _meter(watts_per_core) as meter:
        from .sweep import sweep

        report = sweep(plan, folder, Shown(terminal, plan), meter=meter, retry_failed=retry_failed)
    files = [str(folder.path / f"report{ending}") for ending in (".json", ".md", ".html")]
    terminal.answer(report.model_dump(mode="json", by_alias=True), *summary(report), "\n".join(files))
    if not report.complete:
        terminal.note(f"stopped; `secureinfer bench --resume {folder.path}` goes on")
        raise typer.Exit(1)
    statuses = [*(case.status for case in report.cases), *(load.status for load in report.loads)]
    if statuses and all(status == "failed" for status in statuses):
        raise typer.Exit(1)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="A report's JSON.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="STEM",
            help="Write STEM.json, STEM.md, STEM.html; beside the file by default.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Draw a report again: JSON, Markdown, and one HTML page that opens offline.

    Example:  secureinfer bench report bench/report.json
    """
    from .report import read
    from .shown import summary
    from .sweep import publish

    found = read(file)
    stem = out or file.with_suffix("")
    if not stem.name or stem.name == "..":
        raise UsageError(
            f"{stem} is a folder; give the files' name without ending, such as {stem / 'report'}"
        )
    if not stem.parent.is_dir():
        raise UsageError(f"cannot write {stem}: there is no folder {stem.parent}")
    files = [str(path) for path in publish(found, stem)]
    Terminal(as_json=json).answer(
        {"files": files, "report": found.model_dump(mode="json", by_alias=True)},
        *summary(found),
        "\n".join(files),
    )


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A report's JSON.")],
    after: Annotated[Path, typer.Argument(help="A later one's.")],
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="PART", min=0, help="What may become slower or fatter. Example: --tolerance 0.1"
        ),
    ] = 0.05,
    json: Json = False,
) -> None:
    """Say what became slower or fatter beyond noise, and exit with 1 if anything did.

    Example:  secureinfer bench compare old/report.json new/report.json
    """
    from .compare import compare as compared
    from .report import read

    found = compared(read(before), read(after), tolerance)
    Terminal(as_json=json).answer(found.to_dict(), found)
    if found.regressed:
        raise typer.Exit(1)


@app.command("list")
def list_(json: Json = False) -> None:
    """The models, compressions, backends and networks that cases are made of.

    Example:  secureinfer bench list
    """
    from .cases import NETWORKS
    from .models import BACKENDS, COMPRESSIONS, SUBJECTS

    parts = {"compression": COMPRESSIONS, "backend": BACKENDS, "network": NETWORKS}
    rows = [f"{name:14} {s.title}; {s.input}; {s.weights} weights" for name, s in SUBJECTS.items()]
    rows += ["", *(f"--{name:12} {', '.join(values)}" for name, values in parts.items())]
    models = {
        name: {"title": s.title, "input": s.input, "weights": s.weights} for name, s in SUBJECTS.items()
    }
    Terminal(as_json=json).answer(
        {"models": models, **{k: list(v) for k, v in parts.items()}}, "\n".join(rows)
    )


def _check_same(out: Path, plan: Plan) -> None:
    """Raises UsageError where the folder holds a sweep with other settings: its cases and report would be lost."""
    from .sweep import SWEEP, read_plan

    if not (out / SWEEP).is_file():
        return
    try:
        there = read_plan(out).settings
    except UsageError:
        return  # half-written, or of another version: nothing that could go on
    if there != plan.settings:
        names = sorted(k for k in {*there, *plan.settings} if there.get(k) != plan.settings.get(k))
        raise UsageError(
            f"{out} holds a sweep with other settings ({', '.join(names)}), which this one would replace; "
            f"give another --out, or --resume {out} to go on with that one"
        )


def _effort(
    quick: bool, runs: int | None, seconds: float | None, engine: list[str] | None, threads: int | None
) -> Effort:
    import dataclasses

    from .plaintext import engines
    from .runner import QUICK_EFFORT, Effort

    changes: dict[str, Any] = {"threads": threads}
    if runs is not None:
        changes |= {"least_runs": runs}
    if seconds is not None:
        changes |= {"seconds": seconds}
    if engine is not None:
        pairs = [(name, dtype) for name, _, dtype in (text.rpartition(":") for text in engine)]
        there = engines("cpu")
        if wrong := [pair for pair in pairs if pair not in there]:
            raise UsageError(
                f"there is no plaintext engine {':'.join(wrong[0])!r}; there are "
                + ", ".join(":".join(pair) for pair in there)
            )
        changes |= {"engines": tuple(dict.fromkeys(pairs))}
    effort = dataclasses.replace(QUICK_EFFORT if quick else Effort(), **changes)
    return dataclasses.replace(effort, most_runs=max(effort.most_runs, effort.least_runs))


def _meter(watts_per_core: float | None) -> EnergyMeter:
    from ..measure.energy import EnergyMeter

    return EnergyMeter(gpu=False) if watts_per_core is None else EnergyMeter(watts_per_core, gpu=False)
