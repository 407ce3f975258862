"""The whole flow, top-down: compress a model, compile it to a Program, run it between parties, read the report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .backends import catalog, default_protocol
from .backends.ckks.compiling import Export, compile_model
from .backends.mpc.rings import LEAST_PRECISION, MOST_PRECISION
from .compression.adopt import adopt
from .compression.transform import run
from .errors import CompileError, SettingsError
from .graph.export import as_call, check_module, export_graph
from .plan.planner import make_plan
from .plan.program import Program

if TYPE_CHECKING:
    import torch

    from .compression.report import CompressionReport
    from .compression.transform import Transform
    from .graph.ir import Graph
    from .session.client import Session


def compress(
    model: torch.nn.Module, transforms: Iterable[Transform], *, calibration: Sequence[Any] | None = None
) -> tuple[torch.nn.Module, CompressionReport]:
    """A smaller model, the given one unchanged, and what was done to each of its layers, or why not.

    transforms: such as [si.Quantize()] or [si.Approximate()], applied in order. calibration: example inputs for transforms
    that look at activations. The result is an ordinary module: it runs, has a state_dict, and compiles like any other.

    Raises SettingsError for a transform that does not exist, CompileError for a model whose weights cannot be used.
    """
    check_module(model)
    return run(model, transforms, _batches(calibration))


def compile(
    model: torch.nn.Module,
    example_inputs: Any = (),
    *,
    backend: str = "mpc",
    protocol: str | None = None,
    calibration: Sequence[Any] | None = None,
    owners: Mapping[str, str] | None = None,
    reveal_to: Sequence[str] | None = None,
    precision_bits: int = 16,
    public_weights: bool | Sequence[str] = False,
    exact_cuts: bool | None = None,
    circuit_privacy: int = 0,
    ckks: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Program:
    """Make a Program of a PyTorch model: trace it, choose a kernel for every operator, know the cost before any run.

    model: any torch.nn.Module, Hugging Face models too; it is compiled as in evaluation mode and left as it was.
    Layers with int8 weights, of compress or of torch's quantize_dynamic, stay int8.
    example_inputs: a tensor, a tuple of positional inputs, or a mapping of keyword inputs (a tokenizer's answer); they
    fix shapes and types. calibration: more such inputs, from which the greatest values are taken; 16 times that is the
    range of the program. protocol: of "mpc", "fast" or "crypten", which has the generic kernels alone. owners: input
    name -> data owner. reveal_to: who gets the output. precision_bits: fraction bits of fixed point, 8 to 20.
    public_weights: parameters, buffers or modules by name, or True for all: they stand in the public file, everybody who
    runs the program holds them, and products with them cost no message. exact_cuts: with "fast", products of hidden layers
    are rounded exactly too, for some rounds more, so that many answers to one input tell no more than one does; by default
    where nothing else of the model rounds at random. circuit_privacy: with "ckks", 40 hides the weights from a data owner
    who looks at the noise of its results, at the price of a longer modulus; 0 does not (docs/security.md). ckks: settings of
    an expert, in place of those that are found: degree, first_bits, scale_bits, levels, special_bits, split, layout ("slots"
    or "batch"), error (greatest, of noise), fit_error and greatest_degree (of activations).

    Raises UnsupportedModelError with every operator that no kernel takes, CompileError where the model cannot be
    traced, SettingsError for a choice that does not exist or cannot work.
    """
    check_module(model)
    check_settings(
        backend=backend,
        protocol=protocol,
        precision_bits=precision_bits,
        public_weights=public_weights,
        exact_cuts=exact_cuts,
        circuit_privacy=circuit_privacy,
        ckks=ckks,
    )
    calibration = _batches(calibration)
    registry = catalog(backend, protocol)
    protocol = protocol or default_protocol(backend)
    args, kwargs = as_call(example_inputs)
    call = {**kwargs, **(example_kwargs or {})}
    given = adopt(model)

    def export(
        args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return export_graph(
            given,
            args,
            kwargs,
            calibration=None if backend == "ckks" else calibration,
            owners=owners,
            reveal_to=reveal_to,
            precision_bits=precision_bits,
            public_weights=public_weights,
            keep_unsupported=True,
            keep_polynomials=bool(registry.for_op("polynomial")),
        )

    options: dict[str, Any] = {"precision_bits": precision_bits}
    if backend == "ckks":
        return _compile_ckks(export, args, call, calibration or (), options, circuit_privacy, ckks)
    graph, weights, constants = export(args, call)
    if exact_cuts is None:
        exact_cuts = registry.can_be_exact is not None and registry.can_be_exact(graph)
    if exact_cuts:
        options["exact_cuts"] = True
    if registry.lower is not None:
        graph = registry.lower(graph, options)
    plan = make_plan(graph, registry, 1 + len(graph.owners()), options)
    return Program(
        graph, plan, backend=backend, protocol=protocol, options=options, constants=constants, weights=weights
    )


def check_settings(
    *,
    backend: str,
    protocol: str | None = None,
    precision_bits: int = 16,
    public_weights: bool | Sequence[str] = False,
    exact_cuts: bool | None = None,
    circuit_privacy: int = 0,
    ckks: Mapping[str, Any] | None = None,
) -> None:
    """What compile would refuse of its settings whatever the model is. Raises SettingsError."""
    catalog(backend, protocol)
    if type(precision_bits) is not int or not LEAST_PRECISION <= precision_bits <= MOST_PRECISION:
        raise SettingsError(
            f"precision_bits is {precision_bits!r}; it must be an integer from {LEAST_PRECISION} to {MOST_PRECISION}: a "
            "product carries twice as many fraction bits in a ring of 64, so that with 32 of them 3 x 4 becomes 0"
        )
    if exact_cuts and (backend, protocol or default_protocol(backend)) != ("mpc", "fast"):
        raise SettingsError(
            "exact_cuts is of backend='mpc' with protocol='fast'; the others round as they do"
        )
    if backend != "ckks":
        if circuit_privacy or ckks:
            raise SettingsError("circuit_privacy and ckks are settings of backend='ckks'")
        return
    if ckks is not None and not isinstance(ckks, Mapping):
        raise SettingsError(f"ckks is a mapping, such as {{'degree': 8192}}; got {ckks!r}")
    if circuit_privacy not in (0, 40) or isinstance(circuit_privacy, bool):
        raise SettingsError(f"circuit_privacy is 0 or 40 (bits), got {circuit_privacy!r}")
    if public_weights:
        raise SettingsError(
            "public_weights is not of backend='ckks': weights stay with the model owner there, and public ones would save "
            "nothing"
        )


def _batches(calibration: Any) -> list[Any] | None:
    """A tensor of many samples is itself a sequence, but not one of inputs. Raises SettingsError for what is no list."""
    if calibration is None:
        return None
    single = isinstance(calibration, str | Mapping) or hasattr(calibration, "shape")
    if single or not isinstance(calibration, Iterable):
        raise SettingsError(
            "calibration is a list of inputs like the example, such as [x]; "
            f"{type(calibration).__name__} was given"
        )
    return list(calibration)


def _compile_ckks(
    export: Export,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    calibration: Sequence[Any],
    options: dict[str, Any],
    circuit_privacy: int,
    settings: Mapping[str, Any] | None,
) -> Program:
    if circuit_privacy:
        options["circuit_privacy"] = circuit_privacy
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    batches = [as_call(batch) for batch in calibration]
    if not all(t.isfinite().all() for t in tree_leaves(batches) if isinstance(t, Tensor)):
        raise CompileError("calibration has values that are NaN or infinite")
    graph, weights, constants, options = compile_model(export, args, kwargs, batches, options, settings)
    plan = make_plan(graph, catalog("ckks"), 2, options)
    return Program(
        graph, plan, backend="ckks", protocol="ckks", options=options, constants=constants, weights=weights
    )


def local_session(
    program: Program,
    *,
    timeout: float = 120.0,
    threads: int | None = None,
    network: str | None = None,
    torch_compile: bool = False,
) -> Session:
    """Real parties on this machine, over mutual TLS, as a session to call: see session/local.py.

    timeout: seconds that one message may take. threads: for computing at each party, default half of the cores.
    network: what reports say of a loopback that was made slow, such as "emulated:wan-40ms". torch_compile: fuse local steps
    on many values, in the background; worth it for sessions of minutes.
    """
    from .session.local import local_session as start

    return start(program, timeout=timeout, threads=threads, network=network, torch_compile=torch_compile)


def connect(config: str | os.PathLike[str], *, network: str | None = None) -> Session:
    """A session with remote parties, from a data owner's settings file: see session/client.py.

    network: what reports say lies between the parties, in place of the settings' word: "lan", "emulated:wan-40ms".
    """
    from .session.client import connect as start

    return start(config, network=network)
