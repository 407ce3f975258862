"""From a traced model to what the planner takes: the graph of one sample, calibration, and how many samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import CompileError, SettingsError
from ...graph.ir import MODEL_OWNER, Graph
from ...graph.ops import run_reference
from ...graph.polynomials import MOST_DEGREE
from ...graph.structure import flatten_inputs
from .found import Source
from .lowering import lower
from .params import MOST_BITS, Parameters

Exported = tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]
Export = Callable[[Any, Mapping[str, Any]], Exported]

SETTINGS = {*Parameters.__dataclass_fields__, "error", "fit_error", "greatest_degree", "layout"}
MOST_SAMPLES = 256
CLOSE = 1e-4


def compile_model(
    export: Export,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    calibration: Sequence[Any],
    options: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Graph, weights, constants and options of a CKKS program.

    export: traces the model with a call's inputs. calibration: (args, kwargs) pairs like the example. settings: see
    api.compile. Raises UnsupportedModelError, CompileError and SettingsError.
    """
    given = dict(settings or {})
    _check_settings(given)
    graph, weights, constants = export(tuple(args), kwargs)
    if not graph.inputs:
        raise CompileError("the model takes no tensor; there is nothing to encrypt")
    wrong = [n for n in graph.inputs if graph.edge(n).dtype != "float32"]
    if wrong:
        raise CompileError(
            f"input {wrong[0]!r} has dtype {graph.edge(wrong[0]).dtype}; CKKS encrypts real numbers. Token ids and "
            "masks need "
            "backend='mpc'"
        )
    owners = graph.owners()
    if len(owners) > 1:
        raise SettingsError(
            "CKKS has one data owner: its one secret key would open the inputs of all; use backend='mpc'"
        )
    if MODEL_OWNER in graph.reveal_to:
        raise SettingsError(
            "reveal_to names the model owner: CKKS decrypts at the data owner, and what is decrypted stays there; use "
            "backend='mpc'"
        )
    example = flatten_inputs(graph.input_spec, args, kwargs)
    calls = [example, *(flatten_inputs(graph.input_spec, a, k) for a, k in calibration)]
    tensors = {**weights, **constants}
    batch = _batch(graph, example)
    one = _one_sample(export, args, kwargs, graph, tensors, example, batch) if batch > 1 else None
    if one is not None:
        graph, weights, constants = one
    independent = one is not None or batch == 1
    join = torch.cat if independent else torch.stack
    try:
        samples = {n: join([c[n] for c in calls])[:MOST_SAMPLES] for n in graph.inputs}
        if any(s.shape[1:] != graph.edge(n).shape[int(independent) :] for n, s in samples.items()):
            raise RuntimeError
    except (RuntimeError, KeyError):
        raise CompileError("calibration has inputs of other shapes than the example") from None
    source = Source(graph, {**weights, **constants}, samples, batch if one is not None else 1, independent)
    return lower(source, options, given)


def _check_settings(given: Mapping[str, Any]) -> None:
    unknown = sorted(given.keys() - SETTINGS)
    if unknown:
        raise SettingsError(
            f"there is no CKKS setting {', '.join(unknown)}; there are {', '.join(sorted(SETTINGS))}"
        )
    for name, value in given.items():
        if name == "layout":
            if value not in ("slots", "batch"):
                raise SettingsError(f"CKKS layout is 'slots' or 'batch', got {value!r}")
        elif name in ("error", "fit_error"):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
                raise SettingsError(f"CKKS {name} is a positive number, got {value!r}")
        elif type(value) is not int or value < 1:
            raise SettingsError(f"CKKS {name} is a positive integer, got {value!r}")
        elif name == "degree" and value not in MOST_BITS:
            raise SettingsError(
                f"CKKS degree is one of {', '.join(map(str, MOST_BITS))}, got {value}; smaller ones hold no useful chain at "
                "128 bits of security"
            )
        elif name == "greatest_degree" and value > MOST_DEGREE:
            raise SettingsError(
                f"CKKS greatest_degree, of activations, is at most {MOST_DEGREE}, got {value}"
            )
        elif name == "split" and value > 2:
            raise SettingsError(f"CKKS split is 1 or 2 primes for each scale, got {value}")


def _batch(graph: Graph, example: Mapping[str, torch.Tensor]) -> int:
    """Size of the first dimension that all inputs share, or 0."""
    sizes = {example[n].shape[0] if example[n].dim() > 1 else 0 for n in graph.inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _one_sample(
    export: Export,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    example: Mapping[str, torch.Tensor],
    batch: int,
) -> Exported | None:
    """The graph of one sample, if the model treats samples apart: then it gives the same, sample by sample."""
    first = _sliced((tuple(args), dict(kwargs)), 0, batch)
    try:
        exported = export(first[0], first[1])
    except CompileError:
        return None
    one = exported[0]
    if one.inputs != graph.inputs or len(one.outputs) != len(graph.outputs):
        return None
    together = run_reference(graph, tensors, example)
    known = {**exported[1], **exported[2]}
    for i in (0, batch - 1):
        alone = run_reference(one, known, {n: example[n][i : i + 1] for n in one.inputs})
        for a, b in zip(alone.values(), together.values(), strict=True):
            if a.dim() < 1 or a.shape[0] != 1 or b.shape != (batch, *a.shape[1:]):
                return None
            if not torch.allclose(a[0], b[i], rtol=CLOSE, atol=CLOSE):
                return None
    return exported


def _sliced(value: Any, index: int, batch: int) -> Any:
    def cut(leaf: Any) -> Any:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == batch
        return leaf[index : index + 1].clone() if fits else leaf

    return torch.utils._pytree.tree_map(cut, value)
