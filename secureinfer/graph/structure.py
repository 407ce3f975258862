"""The call's and the answer's structure as JSON: which tensor is which edge, and how to rebuild what the
model returns.

input_spec: {"positional": [parameter names in order], "parameters": {name: tree}}; output_spec: a tree. A
tree is one of {"edge": name}, {"value": None, bool, int, float or str}, {"list": [..]}, {"tuple": [..]},
{"dict": [[key, tree], ..]}, {"namedtuple": name, "fields": [[key, tree], ..]} and {"model_output": class,
"fields": [[key, tree], ..]}.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CompileError, InputError

_MODEL_OUTPUT = re.compile(r"transformers\.(modeling_outputs|models\.\w+\.modeling_\w+)")


def name_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Parameter names in positional order, and name -> given value; a variadic parameter's values are name_0,
    name_1, ..."""
    positional: list[str] = []
    for p in inspect.signature(forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(p.name)
        elif p.kind == p.VAR_POSITIONAL:
            positional.extend(f"{p.name}_{i}" for i in range(len(args) - len(positional)))
    if len(args) > len(positional):
        raise CompileError(f"the model takes {len(positional)} positional inputs and {len(args)} were given")
    given = dict(zip(positional, args, strict=False))
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise CompileError(f"example inputs give {', '.join(twice)} twice")
    return positional, {**given, **kwargs}


def describe(value: Any, edge_of: Callable[[torch.Tensor, str], str], path: str = "") -> Any:
    """The tree of a structure of tensors. edge_of: called with each tensor and its path, names its edge."""

    def inner(key: object, item: Any) -> Any:
        return describe(item, edge_of, f"{path}.{key}" if path else str(key))

    if isinstance(value, torch.Tensor):
        return {"edge": edge_of(value, path)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = [[k, inner(k, v)] for k, v in zip(value._fields, value, strict=True)]
        return {"namedtuple": type(value).__name__, "fields": fields}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [inner(i, v) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        fields = [[k, inner(k, v)] for k, v in value.items()]
        if not all(isinstance(k, str | int) for k in value):
            raise CompileError(
                f"a dictionary at {path or 'the top'} has keys that are neither text nor integers"
            )
        cls = f"{type(value).__module__}.{type(value).__qualname__}"
        if _MODEL_OUTPUT.fullmatch(type(value).__module__):
            return {"model_output": cls, "fields": fields}
        return {"dict": fields}
    raise CompileError(
        f"{path or 'the model'} holds a {type(value).__name__}; inputs and outputs are tensors in tuples, "
        "lists and dictionaries (for a key-value cache, compile with use_cache=False)"
    )


def flatten_inputs(spec: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Edge -> tensor of one call, which may name its inputs or give them in the order of the model's forward.

    Raises InputError if an input is missing, unknown, given twice or not of the compiled structure.
    """
    positional, parameters = spec["positional"], spec["parameters"]
    if len(args) == 1 and isinstance(args[0], Mapping) and args[0].keys() & parameters.keys():
        if not positional or "edge" in parameters.get(positional[0], {"edge": None}):
            raise InputError(
                f"the inputs came as one {type(args[0]).__name__}; give them by name, with two stars before it: "
                f"infer(**inputs). The program takes {_names(parameters)}"
            )
    if len(args) > len(positional):
        raise InputError(
            f"{len(args)} positional inputs; the program takes {len(positional)}: {_names(positional)}"
        )
    given: dict[str, Any] = {}
    for name, value in [*zip(positional, args, strict=False), *kwargs.items()]:
        if name in given:
            raise InputError(f"input {name!r} was given twice")
        if name not in parameters and value is not None:
            raise InputError(f"unknown input {name!r}; the program was compiled with {_names(parameters)}")
        given[name] = value
    found: dict[str, torch.Tensor] = {}
    for name, tree in parameters.items():
        if name in given:
            _match(tree, given[name], name, found)
        elif _edges(tree):
            raise InputError(f"input {name!r} is missing; the program takes {_names(parameters)}")
    return found


def _names(names: Any) -> str:
    return ", ".join(names) or "no input"


def _edges(tree: Any) -> list[str]:
    if "edge" in tree:
        return [tree["edge"]]
    return [e for _, sub in _items(tree) for e in _edges(sub)]


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if "list" in tree or "tuple" in tree:
        return list(enumerate(tree["list"] if "list" in tree else tree["tuple"]))
    return [(k, v) for k, v in tree.get("dict", tree.get("fields", []))]


def _match(tree: Any, value: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if "edge" in tree:
        if not isinstance(value, torch.Tensor):
            raise InputError(f"input {path!r} is a {type(value).__name__}; a tensor is expected")
        found[tree["edge"]] = value
        return
    if "value" in tree:
        if isinstance(value, torch.Tensor) or value != tree["value"]:
            came = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise InputError(
                f"input {path!r} is fixed to {tree['value']!r} since compilation; {came} was given"
            )
        return
    items = _items(tree)
    if "list" in tree or "tuple" in tree:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise InputError(f"input {path!r} must be a sequence of {len(items)}")
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts = value._asdict()
    else:
        raise InputError(f"input {path!r} must be a mapping with {_names(str(k) for k, _ in items)}")
    if parts.keys() != {k for k, _ in items}:
        raise InputError(f"input {path!r} must have exactly the keys {_names(str(k) for k, _ in items)}")
    for key, sub in items:
        _match(sub, parts[key], f"{path}.{key}", found)


def unflatten_output(spec: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The model's own output structure, from output edge -> tensor. ModelOutput needs transformers, else it
    is a dict."""
    if "edge" in spec:
        return tensors[spec["edge"]]
    if "value" in spec:
        return spec["value"]
    parts = [(k, unflatten_output(sub, tensors)) for k, sub in _items(spec)]
    if "list" in spec:
        return [v for _, v in parts]
    if "tuple" in spec:
        return tuple(v for _, v in parts)
    if "namedtuple" in spec:
        cls = collections.namedtuple(spec["namedtuple"], [k for k, _ in parts])  # type: ignore[misc]
        return cls(*(v for _, v in parts))
    if "model_output" in spec:
        built = _model_output(spec["model_output"])
        if built is not None:
            return built(**dict(parts))
    return dict(parts)


def _model_output(qualified: str) -> Callable[..., Any] | None:
    """A ModelOutput class of transformers by its name; None for any other name or where transformers is not
    installed."""
    module, _, name = qualified.rpartition(".")
    if not _MODEL_OUTPUT.fullmatch(module):
        return None
    try:
        base = importlib.import_module("transformers.utils").ModelOutput
        cls = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return cls if isinstance(cls, type) and issubclass(cls, base) else None


def check_tree(tree: Any, edges: Sequence[str], depth: int = 0) -> None:
    """Raise ValueError unless this is a tree over these edges: what a program file holds is not trusted."""
    if depth > 32 or not isinstance(tree, dict):
        raise ValueError("a structure is not a tree")
    if tree.keys() == {"edge"}:
        if tree["edge"] not in edges:
            raise ValueError("a structure names an unknown edge")
        return
    if tree.keys() == {"value"}:
        if not (tree["value"] is None or isinstance(tree["value"], bool | int | float | str)):
            raise ValueError("a structure holds a value of an unknown type")
        return
    kinds = ({"list"}, {"tuple"}, {"dict"}, {"namedtuple", "fields"}, {"model_output", "fields"})
    if tree.keys() not in kinds:
        raise ValueError("a structure of an unknown kind")
    named = "fields" in tree or "dict" in tree
    for key, item in tree.items():
        if key in ("namedtuple", "model_output"):
            if not isinstance(item, str) or not all(_is_name(p) for p in item.split(".")):
                raise ValueError("a structure's class has no proper name")
            continue
        if not isinstance(item, list):
            raise ValueError("a structure's parts are not a list")
        for part in item:
            if named:
                if not (isinstance(part, list) and len(part) == 2 and isinstance(part[0], str | int)):
                    raise ValueError("a structure's fields are not pairs")
                if "fields" in tree and not _is_name(part[0]):
                    raise ValueError("a structure's field has no proper name")
            check_tree(part[1] if named else part, edges, depth + 1)


def _is_name(text: Any) -> bool:
    ok = isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)
    return ok and not text.startswith("_")
