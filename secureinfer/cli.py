"""The `secureinfer` command: thin calls of the API. Exit codes: 0, 1 (it failed), 2 (called wrongly)."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .backends import has_dealer, has_exact_bytes
from .bench.commands import app as bench
from .errors import InputError, SecureInferError, SettingsError, UsageError
from .terminal import Terminal

# All that is heavy is imported inside the commands: `--help` answers at once, and a daemon never loads torch.
if TYPE_CHECKING:
    from .plan.program import Program

app = typer.Typer(
    name="secureinfer",
    help="Private inference for PyTorch models: the data owner learns the answer, the model owner learns "
    "nothing about the data, and nobody learns the weights.\n\nStart with: secureinfer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench")

Network = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="What the report says lies between the parties: lan, or emulated:wan-40ms."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and no progress.")]


class PartyRole(StrEnum):
    model_owner = "model-owner"
    dealer = "dealer"


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Private inference for PyTorch models."""


@app.command()
def demo(
    backend: Annotated[
        str,
        typer.Option(
            metavar="mpc|ckks",
            help="How it is protected: by secret shares and a dealer, or by encryption. Example: --backend ckks",
        ),
    ] = "mpc",
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Inferences of a session; the first is cold and stands apart. Else 4 with mpc, and with ckks as many as "
            "a latency takes. Example: --runs 5",
        ),
    ] = None,
    network: Network = None,
    json: Json = False,
) -> None:
    """Compare sentences privately with a pretrained MiniLM, between three parties on this machine.

    A data owner, a model owner and a dealer run as separate processes that
    talk over mutual TLS. Prints each pair's similarity, secure and in
    plaintext, and what the privacy cost.

    With --backend ckks: scikit-learn's breast cancer and digits, classified on
    encrypted data between two parties. Prints the accuracy on a held-out half
    (float, with polynomials, secure), and what the privacy cost.

    Example:  secureinfer demo --runs 5 --json > demo.json
    """
    _check_network(network)
    if backend not in ("mpc", "ckks"):
        raise SettingsError(f"there is no demo of backend {backend!r}; choose mpc or ckks")
    terminal = Terminal(as_json=json)
    if backend == "ckks":
        from .diagnosis import run as diagnose

        diagnose(terminal, runs=runs, network=network)
        return
    from .demo import run

    run(terminal, runs=4 if runs is None else runs, network=network)


@app.command("compile")
def compile_(
    model: Annotated[str, typer.Argument(help="minilm, file.py:name, or package.module:name.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The private program; its public half goes beside it.")
    ] = Path("program.si"),
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="mpc: secret shares, and a dealer; ckks: encryption; plaintext: nothing. Example: --backend ckks",
        ),
    ] = "mpc",
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="mpc: fast (the default), or crypten, its generic kernels alone. Example: --protocol crypten",
        ),
    ] = None,
    public_weights: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Public weights",
            metavar="NAME",
            help="mpc: a parameter, buffer or module that everybody may see; products with it cost no message. Repeatable. "
            "Example: --public-weights embeddings --public-weights head.bias",
        ),
    ] = None,
    all_weights_public: Annotated[
        bool,
        typer.Option(
            "--all-weights-public",
            rich_help_panel="Public weights",
            help="mpc: every weight. Example: --all-weights-public",
        ),
    ] = False,
    exact_cuts: Annotated[
        bool | None,
        typer.Option(
            "--exact-cuts/--no-exact-cuts",
            rich_help_panel="Rounding",
            help="mpc, fast: round hidden layers exactly too, so that many answers to one input tell no more than one; the "
            "default where nothing else rounds at random. Example: --exact-cuts",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Compression, first",
            metavar="int8",
            help="Make weights int8 first, and report it. Example: --quantize int8",
        ),
    ] = None,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate",
            rich_help_panel="Compression, first",
            help="Put polynomials in place of activations first, and report it. Example: --backend ckks --approximate",
        ),
    ] = False,
    circuit_privacy: Annotated[
        bool,
        typer.Option(
            "--circuit-privacy",
            help="ckks: noise of 40 bits hides the weights from a data owner who looks at the noise of its results. "
            "Example: --backend ckks --circuit-privacy",
        ),
    ] = False,
    precision_bits: Annotated[
        int,
        typer.Option(
            rich_help_panel="Rounding",
            metavar="N",
            help="Fraction bits of fixed point, 8 to 20. Example: --precision-bits 12",
        ),
    ] = 16,
    sentences: Annotated[
        int,
        typer.Option(
            min=1,
            rich_help_panel="minilm",
            metavar="N",
            help="minilm: sentences in a batch. Example: --sentences 8",
        ),
    ] = 6,
    tokens: Annotated[
        int,
        typer.Option(
            min=3,
            max=512,
            rich_help_panel="minilm",
            metavar="N",
            help="minilm: tokens of a sentence. Example: --tokens 32",
        ),
    ] = 16,
    json: Json = False,
) -> None:
    """Turn a model into a program: program.si for the model owner, program.public.si for everybody else.

    The name stands for (model, example_inputs), or (model, example_inputs,
    calibration), or for a function that returns them. calibration is a list of
    further inputs: ranges are taken from them, else from the example alone.

    Example:  secureinfer compile mymodel.py:build -o program.si
    """
    terminal = Terminal(as_json=json)
    _refuse_absent_folder(out)
    if public_weights and all_weights_public:
        raise SettingsError(
            "--public-weights names some, and --all-weights-public says all; give one of them"
        )
    from . import api
    from .files import load_reference, tokenizer_beside

    settings: dict[str, Any] = {
        "backend": backend,
        "protocol": protocol,
        "public_weights": all_weights_public or public_weights or False,
        "exact_cuts": exact_cuts,
        "circuit_privacy": 40 if circuit_privacy else 0,
        "precision_bits": precision_bits,
    }
    api.check_settings(**settings)
    transforms = _transforms(quantize, approximate)
    tokenizer: Path | None = None
    with terminal.working("loading the model"):
        if model == "minilm":
            from .minilm import reference, tokenizer_file

            module, inputs = reference(sentences, tokens)
            calibration = None
            tokenizer = tokenizer_file()
        else:
            module, inputs, calibration = load_reference(model)
    if calibration is None and (approximate or backend == "ckks"):
        terminal.note(
            "no calibration was given: ranges are taken from the example inputs, and inputs far beyond them are refused or "
            "come out wrong; let the name stand for (model, example_inputs, calibration)"
        )
    report = None
    if transforms:
        with terminal.working("compressing"):
            module, report = api.compress(module, transforms, calibration=calibration or [inputs])
    with terminal.working("compiling"):
        program = api.compile(module, inputs, calibration=calibration, **settings)
    public = out.with_suffix(f".public{out.suffix or '.si'}")
    with terminal.working("writing"):
        program.save(out)
        program.public().save(public)
        beside = tokenizer_beside(public)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, beside)
    dealt = has_dealer(program.backend)
    held = "without them" if settings["public_weights"] is False else "with the public ones alone"
    files = {
        str(out): "with the weights, for the model owner alone",
        str(public): f"{held}, for {'the data owner and the dealer' if dealt else 'the data owner'}",
        **({} if tokenizer is None else {str(beside): "for the data owner"}),
    }
    terminal.answer(
        {
            "program": str(out),
            "public": str(public),
            "files": files,
            "compression": None if report is None else report.to_dict(),
            **plan_json(program),
        },
        *([] if report is None else [f"{report}\n"]),
        _totals(program),
        *(f"{file}: {purpose}" for file, purpose in files.items()),
    )


@app.command()
def plan(
    program: Annotated[Path, typer.Argument(help="A .si file, private or public.")],
    json: Json = False,
) -> None:
    """Show what a program will cost before anything runs: rounds, bytes and what else its backend tells of each step.

    Example:  secureinfer plan program.public.si
    """
    from .plan.program import Program

    loaded = Program.load(program)
    Terminal(as_json=json).answer(plan_json(loaded), str(loaded.plan))


@app.command()
def certs(
    out: Annotated[Path, typer.Option("--out", "-o", help="A folder, made if it is not there.")],
    data_owner: Annotated[list[str] | None, typer.Option(help="A data owner's name; repeatable.")] = None,
    model_owner: Annotated[list[str] | None, typer.Option(help="The model owner's name.")] = None,
    dealer: Annotated[list[str] | None, typer.Option(help="The dealer's name.")] = None,
    json: Json = False,
) -> None:
    """Make a development certificate authority and a certificate for each party.

    Without names it makes one party of each role. A later call with the same folder adds parties. Programs without a dealer
    (CKKS) need those of the two owners alone.
    For trying things out: in earnest, each party makes its own key and has it signed; no key ever travels.

    Example:  secureinfer certs --out certs
    """
    from .transport.tls import make_certificates

    given = {"data_owner": data_owner, "model_owner": model_owner, "dealer": dealer}
    names = {role: listed for role, listed in given.items() if listed}
    names = names or {role: [role] for role in given}
    make_certificates(out, names)
    files = sorted(str(p) for p in out.rglob("*") if p.is_file())
    Terminal(as_json=json).answer({"folder": str(out), "parties": names, "files": files}, "\n".join(files))


@app.command()
def party(
    role: Annotated[PartyRole, typer.Option(help="Who this is.")],
    config: Annotated[Path, typer.Option(help="The party's settings, a TOML file.")],
    json: Json = False,
) -> None:
    """Run the model owner or the dealer: listen, and serve sessions until it is stopped.

    The data owner needs no daemon: see `secureinfer infer`. A CKKS program needs no dealer.

    Example:  secureinfer party --role dealer --config parties/dealer/dealer.toml
    """
    from .config import load_settings
    from .session.servicer import serve

    settings = load_settings(config)
    wanted = role.value.replace("-", "_")
    if settings.role != wanted:
        raise UsageError(f"{config} is a {settings.role}'s settings, and --role says {wanted}")
    if json and settings.listen is not None:
        starting = {"event": "starting", "role": settings.role, "name": settings.name}
        Terminal(as_json=True).answer({**starting, **settings.listen.model_dump()})
    serve(settings)


@app.command()
def infer(
    config: Annotated[Path, typer.Option(help="The data owner's settings, a TOML file.")],
    input: Annotated[Path, typer.Option(help="Sentences (.txt), or tensors (.npz, .npy, .json).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs here, as .npz.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="For sentences: tokenizer.json, else the one beside the program."),
    ] = None,
    network: Network = None,
    json: Json = False,
) -> None:
    """Run one private inference as the data owner, with a model owner, and a dealer if the program needs one, that are up.

    From .txt, one sentence a line, it prints each pair's similarity. From tensors it prints the outputs.

    Example:  secureinfer infer --config parties/data_owner/data_owner.toml --input sentences.txt
    """
    terminal = Terminal(as_json=json)
    if not input.is_file():
        raise InputError(f"there is no file {input}")
    if input.suffix not in (".txt", ".npz", ".npy", ".json"):
        raise UsageError(f"{input} is neither sentences (.txt) nor tensors (.npz, .npy, .json)")
    if output is not None:
        output = _with_npz(output)
        _refuse_absent_folder(output)
    _check_network(network)
    from .inference import infer_sentences, infer_tensors

    if input.suffix == ".txt":
        infer_sentences(terminal, config, input, output, tokenizer, network)
    else:
        infer_tensors(terminal, config, input, output, network)


def _transforms(quantize: str | None, approximate: bool) -> list[Any]:
    """In the order in which they work: polynomials may change float weights."""
    from .compression.approximate import Approximate
    from .compression.quantize import Quantize

    return [
        *([Approximate()] if approximate else []),
        *([] if quantize is None else [Quantize(weights=quantize)]),
    ]


def _check_network(text: str | None) -> None:
    """Before anything heavy is loaded."""
    from .config import parse_network

    if text is not None:
        parse_network(text)


def _with_npz(file: Path) -> Path:
    """The file that is written: numpy would add the ending in silence, also to another one."""
    if file.suffix not in ("", ".npz"):
        raise UsageError(f"cannot write {file}: outputs are written as .npz; say --output {file.stem}.npz")
    return file if file.suffix or file.is_dir() else file.with_name(f"{file.name}.npz")


def _refuse_absent_folder(file: Path) -> None:
    """Refuse before the work what could not be written after it: an answer that was paid for would be lost."""
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder")


def plan_json(program: Program) -> dict[str, Any]:
    """A program's plan for programs: its totals, and each step with whatever its backend tells of it."""
    plan = program.plan
    steps = [
        {
            **step.details,
            **({"fit": step.fit} if step.fit is not None else {}),
            "index": step.index,
            "path": step.node.path,
            "op": step.node.op,
            "kernel": step.kernel,
            "rounds": step.cost.rounds,
            "bytes": step.cost.bytes,
            "dealt_bytes": step.cost.dealt_bytes,
        }
        for step in plan.steps
    ]
    totals = plan.totals
    return {
        "backend": program.backend,
        "protocol": program.protocol,
        "manifest_digest": program.manifest_digest,
        "totals": {
            "rounds": totals.rounds,
            "bytes": totals.bytes,
            "dealt_bytes": totals.dealt_bytes,
            "setup_bytes": totals.setup_bytes,
            "exact_bytes": has_exact_bytes(program.backend),
        },
        "steps": steps,
    }


def _totals(program: Program) -> str:
    from .measure.table import size

    totals = program.plan.totals
    most = "" if has_exact_bytes(program.backend) else "at most "
    text = f"{len(program.plan.steps)} steps; each inference will take {totals.rounds} rounds and {most}{size(totals.bytes)}"
    if has_dealer(program.backend):
        return f"{text} online, after {size(totals.dealt_bytes)} offline"
    return f"{text}, after {most}{size(totals.setup_bytes)} once a session" if totals.setup_bytes else text


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code; never raises."""
    terminal = Terminal(as_json="--json" in arguments)
    debug = "--debug" in arguments
    command = typer.main.get_command(app)
    try:
        command.main(args=list(arguments), prog_name="secureinfer")
    except SystemExit as done:
        if done.code in (0, 1, 2):
            return int(done.code)
        terminal.note("stopped")  # the framework's own code for an interrupt is 130
        return 1
    except SecureInferError as error:
        if debug:
            traceback.print_exc()
        terminal.error(error)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        terminal.note("stopped")
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug else "; `secureinfer --debug ...` shows where"
        terminal.error(SecureInferError(f"unexpected {type(error).__name__}: {error}{hint}"))
        return 1
    return 0


def main() -> None:
    # gRPC's own log would stand beside our errors, and name whoever tried to connect. It reads this when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run(sys.argv[1:]))
