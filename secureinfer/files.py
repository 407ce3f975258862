"""Reading what a user points at: a model by reference, and the inputs of an inference from a file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from .errors import InputError, UsageError
from .graph.ir import Graph
from .graph.structure import unflatten_output

TORCH_FILES = {".pt", ".pth", ".bin", ".ckpt"}


def load_reference(reference: str) -> tuple[torch.nn.Module, Any, list[Any] | None]:
    """(model, example inputs, calibration) from `file.py:name` or `package.module:name`.

    The name is a tuple (model, example_inputs) or (model, example_inputs, calibration), or a function without arguments
    that returns one; example_inputs is a tensor, a tuple of what the model's forward takes, or a mapping of keyword inputs,
    and calibration a list of such. It is None where the tuple has none.
    Raises UsageError if there is no such module or name, or if it holds something else.
    """
    where, colon, name = reference.rpartition(":")
    if Path(reference).suffix in TORCH_FILES:
        raise UsageError(
            f"{reference} is a pickled file, which runs code when it is loaded. Save the weights with "
            "safetensors.torch.save_file(model.state_dict(), ...) and point to the Python that builds the "
            "model, as file.py:name"
        )
    if not colon or not where or not name:
        raise UsageError(
            f"{reference!r} is no model reference; write file.py:name, package.module:name, or minilm"
        )
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{where} has no {name!r}")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, torch.nn.Module):
        found = found()
    if not (isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], torch.nn.Module)):
        raise UsageError(
            f"{reference} must be (model, example_inputs) or (model, example_inputs, calibration), or return it, but is a "
            f"{type(found).__name__}"
        )
    model, inputs, *rest = found
    if rest and (not isinstance(rest[0], list | tuple) or not rest[0]):
        raise UsageError(
            f"the calibration of {reference} must be a list of one or more inputs like the example"
        )
    return (
        model,
        inputs if isinstance(inputs, tuple | Mapping) else (inputs,),
        list(rest[0]) if rest else None,
    )


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"there is no file {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        if spec is None or spec.loader is None:
            raise UsageError(f"{where} cannot be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # like `python -m`: a module beside the user counts
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and where.startswith(error.name):
            raise UsageError(f"there is no module {where}") from error
        raise


def tokenizer_beside(public: Path) -> Path:
    """minilm.public.si -> minilm.tokenizer.json: where `compile` leaves it and `infer` looks for it."""
    return public.with_name(f"{public.name.removesuffix('.si').removesuffix('.public')}.tokenizer.json")


def read_sentences(path: Path) -> list[str]:
    """One sentence a line, blank lines left out. Raises InputError if there is none or it is not UTF-8."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text") from error
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise InputError(f"{path} has no sentences; write one a line")
    return sentences


def read_tensors(path: Path, graph: Graph) -> dict[str, torch.Tensor]:
    """The graph's inputs by name, from .npz (named arrays), .npy (the only input) or .json (name -> lists).

    An array is taken with its own dtype (.json: the input's), so that a wrong one is refused later, by name.
    Raises InputError if a name is missing or unknown, or the file is not what its ending says.
    """
    try:
        if path.suffix == ".json":
            arrays = _from_json(json.loads(path.read_text(encoding="utf-8")), graph)
        else:
            if path.suffix == ".npz" and path.is_file() and not zipfile.is_zipfile(path):
                raise ValueError("it is no archive, or truncated")  # numpy would advise to allow pickles
            loaded: Any = np.load(path, allow_pickle=False)
            arrays = {n: loaded[n] for n in loaded.files} if path.suffix == ".npz" else _only(loaded, graph)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error
    names = graph.inputs
    missing, unknown = [n for n in names if n not in arrays], [n for n in arrays if n not in names]
    if missing or unknown:
        raise InputError(
            f"{path} must hold exactly the inputs {', '.join(names)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    try:
        return {n: torch.from_numpy(np.array(arrays[n], order="C")) for n in names}
    except TypeError as error:
        raise InputError(f"{path} holds an array that is not numeric: {error}") from error


def _only(array: Any, graph: Graph) -> dict[str, Any]:
    if len(graph.inputs) != 1:
        raise InputError(
            f"a .npy file holds one array, and the program takes {', '.join(graph.inputs)}: use .npz"
        )
    return {graph.inputs[0]: array}


def _from_json(data: Any, graph: Graph) -> dict[str, Any]:
    if not isinstance(data, dict):
        data = {graph.inputs[0]: data} if len(graph.inputs) == 1 else {}
    dtypes = {name: np.dtype(graph.edge(name).dtype) for name in graph.inputs}
    return {name: _array(name, value, dtypes.get(name)) for name, value in data.items()}


def _array(name: str, value: Any, dtype: np.dtype[Any] | None) -> Any:
    try:
        return np.asarray(value, dtype=dtype)
    except (ValueError, TypeError, OverflowError):  # their texts quote the value
        raise InputError(
            f"input {name!r} is not numbers of dtype {dtype} in rows of one length; nothing else can be an input"
        ) from None


def call_of(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The keyword arguments of the model's forward, in its own structure, for tensors by input name."""
    parameters: dict[str, Any] = graph.input_spec["parameters"]
    return {name: unflatten_output(tree, tensors) for name, tree in parameters.items()}


def named_tensors(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Every tensor of a model's output structure, under a readable name, to be written to a file."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}
    if hasattr(value, "items"):
        for key, part in value.items():
            found |= named_tensors(part, str(key) if name == "output" else f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for i, part in enumerate(value):
            found |= named_tensors(part, f"{name}.{i}")
    return found
