"""`python -m benchmarks peers`: the engines of one run, its documents and its exit status."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from secureinfer.bench.machine import machine
from secureinfer.errors import SecureInferError, UsageError

from . import case as cases
from . import engines, environments, picture, row
from .engines import Opening
from .row import Row

COMPILE_SECONDS = 90.0
TIMEOUT = 1800.0
OWN_TIMEOUT = 600.0
"""Seconds that one message of our sessions may take."""

_IN = "from plain {x} and mask to the logits, in clear: sharing the input, {look}all layers, pooler, classifier, opening"
_LOOK_UP = "the private look-up of the words, "
_WEIGHTS = "starting, and sharing the weights (setup)"
_LOADING = "starting and loading"


def openings(
    case: cases.Case,
    given: argparse.Namespace,
    python: str | None = None,
    missing: engines.UnavailableError | None = None,
) -> list[Opening]:
    """All engines in the order of the table, of which --engine may name some. python: SPU's; missing: why there is none."""

    def spu(gelu: str) -> engines.Engine:
        if missing is not None:
            raise missing
        return engines.spu(case, python, given.threads, given.timeout, gelu=gelu)

    inside = _IN.format(
        x="token ids" if case.look_up else "word vectors", look=_LOOK_UP if case.look_up else ""
    )
    outside = "" if case.look_up else "; looking up the words, in plain"
    plaintext = Row(
        "plaintext",
        "torch fp32, eager",
        "failed",
        inside="the model's forward, warm",
        outside=_LOADING + outside,
    )
    ours: dict[str, Any] = {
        "inside": inside + ", mutual TLS",
        "outside": f"compiling the program, {_WEIGHTS}, dealing (offline){outside}",
        "counts": "ours: frames with headers, all links; steps on the longest chain of messages",
    }
    compiled = not given.no_torch_compile
    fast = "secureinfer, fast" + (", torch_compile" if compiled else "")
    crypten = "CrypTen 0.4.1 as shipped, gloo, trusted first party"
    found: list[Opening] = [
        (plaintext, lambda: engines.Plain(case, given.plaintext_threads)),
        (Row("fast", fast, "failed", **ours), _ours(case, "fast", given, compiled)),
        (Row("crypten", "secureinfer, generic kernels", "failed", **ours), _ours(case, "crypten", given, False)),
        (
            Row(
                "crypten_stock", crypten, "failed", inside=inside + "; making triples, no TLS", outside=_WEIGHTS + outside,
                counts="CrypTen's own: elements in each collective; collectives, one after another",
            ),
            lambda: engines.crypten(case, given.threads, given.timeout),
        ),
        *(
            (
                Row(
                    name, f"SPU SEMI2K, FM64, GELU by {gelu}", "failed", inside=inside + "; making triples, no TLS",
                    outside=f"compiling, {_WEIGHTS}{outside}",
                    counts="SPU's own, of what both parties send; it does not tell rounds",
                ),
                functools.partial(spu, gelu),
            )
            for name, gelu in (("spu", "erf"), ("spu_tanh", "tanh"))
        ),
    ]  # fmt: skip
    return [opening for opening in found if not given.engine or opening[0].engine in given.engine]


def _ours(
    case: cases.Case, protocol: str, given: argparse.Namespace, compiled: bool
) -> Callable[[], engines.Engine]:
    seconds = given.compile_seconds if compiled else 0.0
    return lambda: engines.Ours(
        case, protocol, given.threads, torch_compile=compiled, compile_seconds=seconds, timeout=OWN_TIMEOUT
    )


ENGINES = ("plaintext", "fast", "crypten", "crypten_stock", "spu", "spu_tanh")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with 2 and says what was wrong."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--layers", type=_positive, default=1, help="encoder layers of the BERT (1)")
    parser.add_argument("--small", action="store_true", help="64 wide and 16 tokens, to try it out")
    parser.add_argument("--look-up", choices=("outside", "private"), default="outside",
                        help="whether the look-up of words is measured too (outside)")  # fmt: skip
    parser.add_argument(
        "--runs", type=_positive, default=5, help="turns after a first one that stands apart (5)"
    )
    parser.add_argument("--threads", type=_positive, default=1, help="of each party (1)")
    parser.add_argument("--plaintext-threads", type=_positive, default=cores, help=f"all cores ({cores})")
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="one of them; may be given again (all)"
    )
    parser.add_argument(
        "--setup", type=Path, metavar="DIR", help="SPU's environment: made where it is not there yet"
    )
    parser.add_argument(
        "--no-torch-compile", action="store_true", help="the fast engine's local steps run eagerly"
    )
    parser.add_argument("--compile-seconds", type=_seconds, default=None,
                        help=f"that the fast engine's compiler gets before the turns ({COMPILE_SECONDS:g})")  # fmt: skip
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT,
                        help=f"seconds that a peer may be silent ({TIMEOUT:g})")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON in place of Markdown")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write peers.json, peers.md and peers.svg there"
    )
    given = parser.parse_args(arguments)
    if given.compile_seconds is None:
        given.compile_seconds = 0.0 if given.small else COMPILE_SECONDS
    return given


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, and {value} was given")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"between 0 and 1e6 seconds, and {text} was given")
    return value


def about(case: cases.Case, given: argparse.Namespace) -> dict[str, Any]:
    x, mask = case.inputs
    config = case.config
    what = (
        f"BertForSequenceClassification, {config.num_hidden_layers} layer(s), {config.hidden_size} wide, int8 weights, "
        f"sequence {mask.shape[1]} with {int(mask[0].sum())} tokens, batch {mask.shape[0]}, look-up of words {given.look_up}"
    )
    return {
        "what": what,
        "model_digest": case.model_digest,
        "input_digest": case.input_digest,
        "layers": config.num_hidden_layers,
        "tokens": mask.shape[1],
        "batch": mask.shape[0],
        "look_up": given.look_up,
        "runs": given.runs,
        "network": "loopback",
        "machine": machine(),
        "expected": case.expected.tolist(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def run(
    given: argparse.Namespace, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and what they are of. Raises UsageError; what an engine raises is in its row."""
    python = os.environ.get(engines.SPU_PYTHON)
    missing = None
    if given.setup is not None:
        progress("making SPU's environment")
        try:
            python = environments.setup(given.setup)
        except engines.UnavailableError as why:
            missing = why
    case = cases.make(layers=given.layers, small=given.small, look_up=given.look_up == "private")
    told = about(case, given)
    rows = engines.measure(openings(case, given, python, missing), given.runs, progress)
    told["load_average_after"] = machine()["load_average"]
    return rows, told


def write(folder: Path, rows: Sequence[Row], told: dict[str, Any]) -> None:
    files = {
        "peers.json": json.dumps(row.document(rows, told), indent=1) + "\n",
        "peers.md": row.table(rows, told) + "\n",
        "peers.svg": picture.svg(rows),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where nothing could be measured at all, 2 for a wrong call. An engine that fails is a row."""
    given = parsed(arguments)
    shown = sys.stderr.isatty()

    def progress(text: str) -> None:
        sys.stderr.write(f"\r{text:<78}" if shown else f"{text}\n")
        sys.stderr.flush()

    # Ended as by an exception, so that children and folders go.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if given.out is not None:
            _folder(given.out)
        rows, told = run(given, progress)
        if given.out is not None:
            write(given.out, rows, told)
    except (SecureInferError, engines.EngineError) as why:
        sys.stderr.write(f"{type(why).__name__}: {why}\n")
        return 2 if isinstance(why, UsageError) else 1
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stderr.write("\n" if shown else "")
    sys.stdout.write((json.dumps(row.document(rows, told)) if given.json else row.table(rows, told)) + "\n")
    return 0


def _folder(path: Path) -> None:
    """Before anything is measured: a run of many minutes should not end with a folder that cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as why:
        raise UsageError(f"{path} cannot be written: {why.strerror}") from why
