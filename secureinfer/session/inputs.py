"""Checks of a call's inputs, before anything of them is encoded or sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import InputError, RangeError
from ..graph.ir import Edge, Graph
from .tensors import DTYPES


def check_inputs(graph: Graph, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a call as the program needs them: its shapes and dtypes, finite, and in range.

    Widens integers where that loses nothing, and takes float64 where float32 was compiled. Raises InputError
    or RangeError that names the input and says what came and what to do; never a value.
    """
    rows, low = _table_rows(graph), _least(graph)
    return {
        name: _check(graph.edge(name), tensor, rows.get(name), low.get(name))
        for name, tensor in given.items()
    }


def _check(edge: Edge, tensor: torch.Tensor, rows: int | None, low: float | None) -> torch.Tensor:
    name = edge.name
    if tuple(tensor.shape) != edge.shape:
        raise InputError(
            f"input {name!r} has shape {tuple(tensor.shape)}; the program was compiled for {edge.shape}. Pad or split "
            "the input, or compile with inputs of this shape"
        )
    if tensor.is_sparse or tensor.is_quantized or tensor.layout is not torch.strided:
        raise InputError(f"input {name!r} is not a dense tensor; give .to_dense() or .dequantize() of it")
    tensor = tensor.detach().cpu()
    wanted = DTYPES[edge.dtype]
    if not _fits(tensor.dtype, wanted):
        raise InputError(
            f"input {name!r} has dtype {tensor.dtype}; the program was compiled for torch.{edge.dtype}. Convert it, "
            f"if that is what you mean, with .to(torch.{edge.dtype})"
        )
    if not tensor.numel():
        return tensor.to(wanted)
    if tensor.is_floating_point():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise InputError(f"input {name!r} has {bad} values that are NaN or infinite, of {tensor.numel()}")
    if rows is not None:
        outside = int(((tensor < 0) | (tensor >= rows)).sum())
        if outside:
            raise RangeError(
                f"input {name!r} has {outside} ids outside 0 to {rows - 1}, the rows of the model's table, of "
                f"{tensor.numel()}"
            )
    elif edge.bound is not None and edge.dtype != "bool":
        outside = int((tensor.to(torch.float64).abs() > edge.bound).sum())
        if outside:
            raise RangeError(
                f"input {name!r} has {outside} values beyond the range of ±{edge.bound:g} that the program was "
                f"compiled for, of {tensor.numel()}. Scale the input, or compile with calibration data that has such "
                "values"
            )
    if low is not None and (below := int((tensor < low).sum())):
        raise RangeError(
            f"input {name!r} has {below} values below {low:g}, which is the least that the program was compiled for, of "
            f"{tensor.numel()}. Shift the input, or compile with calibration data that has such values"
        )
    return tensor.to(wanted)


def _fits(given: torch.dtype, wanted: torch.dtype) -> bool:
    if given == wanted or (given.is_floating_point and wanted.is_floating_point):
        return True
    if given.is_floating_point or wanted.is_floating_point or given.is_complex:
        return False
    if given == torch.bool:
        return True
    if wanted == torch.bool:
        return False
    a, b = torch.iinfo(given), torch.iinfo(wanted)
    return b.min <= a.min and a.max <= b.max


def _least(graph: Graph) -> dict[str, float]:
    """Input edge -> the least value that its program takes, where it says so."""
    return {
        node.inputs[0]: float(node.attrs["low"])
        for node in graph.nodes
        if node.op == "reshape"
        and type(node.attrs.get("low")) in (int, float)
        and node.inputs[0] in graph.inputs
    }


def _table_rows(graph: Graph) -> dict[str, int]:
    """Input edge -> rows of the table that it indexes, where it does so directly."""
    rows: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "embedding" and node.inputs[0] in graph.inputs:
            size = graph.edge(node.inputs[1]).shape[0]
            rows[node.inputs[0]] = min(size, rows.get(node.inputs[0], size))
    return rows
