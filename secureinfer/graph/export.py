"""torch.export → Graph: trace the model, make its ATen calls canonical, run the passes, mark who sees what,
find ranges."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from ..errors import CompileError, SettingsError, UnsupportedModelError, UnsupportedNode
from . import aten
from .draft import UNSUPPORTED, Draft, Value, nominal
from .expand import expand_polynomials, on_unit_ranges
from .finish import finish
from .int8 import follow, keep_int8
from .ir import DATA_OWNER, MODEL_OWNER, Graph
from .passes import canonicalise
from .ranges import with_ranges
from .structure import describe, name_arguments

_KEPT_WHOLE = (
    "linear.default", "matmul.default", "scaled_dot_product_attention.default", "silu.default",
    "log_softmax.int", "rms_norm.default", "group_norm.default", "softplus.default", "mish.default",
    "hardswish.default", "one_hot.default", "std.correction", "linalg_vector_norm.default",
    "max_pool1d.default", "avg_pool1d.default", "adaptive_avg_pool2d.default",
    "adaptive_avg_pool1d.default", "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip
"""Operators that torch would decompose, although the whole is what a protocol wants to see."""


def export_graph(
    model: torch.nn.Module,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    calibration: Sequence[Any] | None = None,
    owners: Mapping[str, str] | None = None,
    reveal_to: Sequence[str] | None = None,
    precision_bits: int = 16,
    public_weights: bool | Sequence[str] = False,
    keep_unsupported: bool = False,
    keep_polynomials: bool = True,
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model as a Graph, its private weights and its public constants, both float32, int64 or bool by edge
    name; weights that the model multiplies by a scale a channel stay int8 (graph/int8.py).

    The graph is the model in evaluation mode, at the shapes of the example inputs. calibration: more inputs
    of the same shapes (a tensor, a tuple, or a dictionary of keyword inputs each), from which ranges are
    taken. owners: input name -> data owner, `data_owner` where it is silent. reveal_to: who gets the outputs;
    may be left out with one data owner. keep_unsupported: leave nodes "unsupported" in the graph, without
    ranges, for the planner to list with its own. keep_polynomials: as one operator; else as powers and a linear layer.

    What becomes public: constants written in the code, sizes, integer and boolean buffers that are not saved
    with the model (persistent=False), integer buffers that are zero or count upwards, and the parameters and buffers
    that public_weights names, or all of them. Everything else of the model is private.

    Raises CompileError where torch cannot trace the model, UnsupportedModelError with all nodes that have no
    canonical form, SettingsError for owners or public weights that do not exist.
    """
    check_module(model)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    args, kwargs = _distinct(tuple(example_inputs), dict(example_kwargs or {}))
    positional, named = name_arguments(model.forward, args, kwargs)
    with _evaluation(model):
        program = _trace(model, args, kwargs)
    draft = Draft()
    names: dict[int, str] = {}

    def edge_of(tensor: torch.Tensor, path: str) -> str:
        names[id(tensor)] = path
        return path

    parameters = {name: describe(value, edge_of, name) for name, value in named.items()}
    owner_of, revealed = _owners(list(names.values()), owners, reveal_to)
    env = _placeholders(draft, program, args, kwargs, names, owner_of, _named_public(model, public_weights))
    _calls(draft, program, env)
    output_tree = _outputs(draft, program, env)
    if not keep_polynomials:
        draft.rewrite(on_unit_ranges)
    canonicalise(draft)
    draft.rewrite(keep_int8())
    problems = [
        UnsupportedNode(f"{UNSUPPORTED}_{i}", n.operator, n.path, n.attrs["reason"])
        for i, n in enumerate(n for n in draft.order() if n.op == UNSUPPORTED)
    ]
    if problems and not keep_unsupported:
        raise UnsupportedModelError(problems)
    graph, weights, constants = finish(
        draft,
        input_spec={"positional": positional, "parameters": parameters},
        output_tree=output_tree,
        reveal_to=revealed,
        precision_bits=precision_bits,
    )
    if not problems:
        batches = [_flat_batch(model, b, names_of=parameters) for b in calibration or ()]
        first = {path: t for t, path in _flat_tensors(named, parameters)}
        graph = with_ranges(graph, {**weights, **constants}, [first, *batches])
    if not keep_polynomials:
        graph, constants = expand_polynomials(graph, constants)
    return graph, weights, constants


def traced_calls(model: torch.nn.Module, example_inputs: Any) -> list[tuple[str, str]]:
    """(module path, operator) of every call of the model in evaluation mode, such as ("encoder.0", "aten.relu.default").

    Raises CompileError where torch cannot trace it.
    """
    args, kwargs = as_call(example_inputs)
    with _evaluation(model):
        program = _trace(model, args, kwargs)
    return [(_path(n), str(n.target)) for n in program.graph.nodes if n.op == "call_function"]


def _path(node: torch.fx.Node) -> str:
    """Of the module whose code makes this call."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _distinct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with a tensor of its own at each place, so that a tensor's identity names its input."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = leaf.clone() if id(leaf) in seen else leaf
        seen.add(id(tensor))
        return tensor

    result: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map(own, (args, kwargs))
    return result


def check_module(model: object) -> None:
    """Refuse what is no module, saying what to give instead (field report 6)."""
    if isinstance(model, torch.jit.ScriptModule):
        raise CompileError("a scripted or traced module was given; give the module that it was made from")
    if isinstance(model, torch.nn.Module):
        return
    came = type(model).__name__
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        raise CompileError(
            f"a model file was given ({came}); give the torch.nn.Module itself. Whole-module .pt "
            "files hold a pickle, which can run any code and is never opened here: save its state_dict() as "
            "safetensors instead, build the module from its class, then load the state with load_state_dict"
        )
    if isinstance(model, Mapping):
        raise CompileError("a state dictionary was given; build the module from its class and load it first")
    raise CompileError(f"a torch.nn.Module is expected; {came} was given")


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode; its modes and attributes come back, since tracing runs hooks that set
    some."""
    modules = list(model.modules())
    before = [{k: list(v) if isinstance(v, list) else v for k, v in m.__dict__.items()} for m in modules]
    # Parameters, buffers, submodules, and every kind of hook: tables that are changed in place.
    inner = [{k: dict(v) for k, v in m.__dict__.items() if isinstance(v, dict)} for m in modules]
    try:
        for m in modules:
            m.__dict__["training"] = False
        yield
    finally:
        for m, state, tables in zip(modules, before, inner, strict=True):
            m.__dict__.clear()
            m.__dict__.update(state)
            for r, table in tables.items():
                m.__dict__[r].clear()
                m.__dict__[r].update(table)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own log lines away while it exports: what they say comes as one error of ours."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _trace(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    table = torch.export.default_decompositions()
    for name in _KEPT_WHOLE:
        packet, _, overload = name.partition(".")
        table.pop(getattr(getattr(torch.ops.aten, packet), overload), None)  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, kwargs, strict=False)
            decomposed: torch.export.ExportedProgram = program.run_decompositions(table)
            return decomposed
    except Exception as error:  # torch raises every kind here, RuntimeError to AttributeError
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = (
            "; the model branches on a value of its input, which stays secret: use torch.where"
            if "data-dependent" in str(error)
            else ""
        )
        raise CompileError(
            f"torch could not export the model: {type(error).__name__}: {first}{hint}"
        ) from error


def _owners(
    inputs: Sequence[str], owners: Mapping[str, str] | None, reveal_to: Sequence[str] | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Input edge -> owner, and who gets the outputs."""
    chosen = dict(owners or {})
    unknown = sorted(k for k in chosen if not any(e == k or e.startswith(f"{k}.") for e in inputs))
    if unknown:
        raise SettingsError(f"owners names {', '.join(unknown)}; the model's inputs are {', '.join(inputs)}")
    bad = sorted(v for v in chosen.values() if v in (MODEL_OWNER, "dealer") or not v)
    if bad:
        raise SettingsError(f"{', '.join(bad)} cannot own an input; inputs belong to data owners")
    result = {}
    for edge in inputs:
        parents = [k for k in chosen if edge == k or edge.startswith(f"{k}.")]
        result[edge] = chosen[max(parents, key=len)] if parents else DATA_OWNER
    everybody = list(dict.fromkeys(result.values()))
    if reveal_to is None:
        if len(everybody) > 1:
            raise SettingsError(
                f"the inputs belong to {', '.join(everybody)}: say in reveal_to who gets the output"
            )
        return result, tuple(everybody or [DATA_OWNER])
    if isinstance(reveal_to, str):
        reveal_to = (reveal_to,)
    strangers = [p for p in reveal_to if p not in everybody and p != MODEL_OWNER]
    if strangers or not reveal_to:
        raise SettingsError(
            f"reveal_to must name some of {', '.join([*everybody, MODEL_OWNER])}; got {list(reveal_to)}"
        )
    return result, tuple(dict.fromkeys(reveal_to))


def _structural(t: torch.Tensor, persistent: bool) -> bool:
    """Whether a buffer says nothing but what the code says: positions, types, causal masks.

    Of saved integers only zeros and counts pass: any other constant may be learnt, such as a zero point.
    """
    if t.dtype not in (torch.int64, torch.int32, torch.bool):
        return False
    if not persistent:
        return True
    if t.dtype == torch.bool or t.numel() == 0:
        return False
    flat = t.reshape(-1, t.shape[-1] if t.dim() else 1)
    steps = torch.arange(flat.shape[1], device=t.device)
    return not bool(flat.any()) or bool((flat == steps).all())


def _named_public(model: torch.nn.Module, public: bool | Sequence[str]) -> set[str]:
    """Names of the parameters and buffers that are public, tied ones under each of their names."""
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if isinstance(public, bool):
        return {name for name, _ in state} if public else set()
    wanted = [public] if isinstance(public, str) else list(public)
    unknown = [w for w in wanted if not any(name == w or name.startswith(f"{w}.") for name, _ in state)]
    if unknown:
        raise SettingsError(
            f"public_weights names {', '.join(map(str, unknown))}, which is no parameter, buffer or module of the model"
        )
    chosen = {id(t) for name, t in state if any(name == w or name.startswith(f"{w}.") for w in wanted)}
    return {name for name, t in state if id(t) in chosen}


def _placeholders(
    draft: Draft,
    program: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Mapping[int, str],
    owner_of: Mapping[str, str],
    named_public: set[str],
) -> dict[str, Any]:
    """FX placeholder -> Value, or the plain value of an input that is no tensor."""
    env: dict[str, Any] = {}
    leaves = iter(torch.utils._pytree.tree_leaves((args, kwargs)))
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.TOKEN:
            env[name] = None
            continue
        if spec.kind is InputKind.USER_INPUT:
            leaf = next(leaves)
            if isinstance(leaf, torch.Tensor):
                edge = names[id(leaf)]
                env[name] = draft.input(edge, leaf.shape, leaf.dtype, owner_of[edge])
            else:
                env[name] = leaf
            continue
        if spec.target is None or spec.kind not in (
            InputKind.PARAMETER,
            InputKind.BUFFER,
            InputKind.CONSTANT_TENSOR,
        ):
            raise CompileError(
                f"the model holds a {spec.kind.name.lower().replace('_', ' ')} ({name}), which cannot run"
            )
        state = program.state_dict if spec.target in program.state_dict else program.constants
        tensor = state[spec.target].detach()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float()
        public = (
            spec.target.startswith("lifted_tensor_")
            or spec.target.rpartition(".")[2].startswith("lifted_tensor_")
            if spec.kind is InputKind.CONSTANT_TENSOR
            else spec.kind is InputKind.BUFFER and _structural(tensor, bool(spec.persistent))
        )
        public = public or spec.target in named_public
        if public and not bool(torch.isfinite(tensor).all()):
            raise CompileError(f"{spec.target} holds values that are not finite")
        env[name] = draft.constant(tensor) if public else draft.weight(tensor, spec.target)
    return env


def _calls(draft: Draft, program: torch.export.ExportedProgram, env: dict[str, Any]) -> None:
    """Every call in order; a call that only known values reach is run by torch itself."""
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args = torch.fx.node.map_arg(node.args, lambda n: env[n.name])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: env[n.name])
        operator = str(node.target)
        with draft.at(_path(node), operator):
            env[node.name] = _call(draft, node, args, kwargs)


def _call(draft: Draft, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    if getattr(node.target, "__name__", "") == "getitem":
        return args[0][args[1]]
    operator = str(node.target).removeprefix("aten.")
    if operator.startswith(("_assert", "sym_constrain")):
        return None
    values = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
    target = node.target
    random = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    meta = node.meta.get("val")
    if isinstance(target, torch._ops.OpOverload) and not random and all(v.tensor is not None for v in values):
        if not operator.startswith("empty"):
            return _run(draft, target, args, kwargs, values)
    first = meta[0] if isinstance(meta, list | tuple) else meta
    reason = "no canonical operator expresses it"
    if random and operator not in aten.ATEN:
        reason = "it draws random numbers"
    elif operator in aten.ATEN and isinstance(first, torch.Tensor):
        call = aten.Call(draft, _shape(node, first), first.dtype)
        try:
            return aten.ATEN[operator](call, *args, **_plain(kwargs))
        except aten.Unsupported as error:
            reason = str(error)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            # A form of the call that the canonicaliser was not written for: refused here, never guessed.
            reason = f"this form of the call is not supported ({type(error).__name__}: {error})"
    results = meta if isinstance(meta, list | tuple) else [meta]
    shaped = [
        draft.unsupported(values, _shape(node, r), r.dtype, reason) if isinstance(r, torch.Tensor) else None
        for r in results
    ]
    if not any(shaped):
        raise UnsupportedModelError([UnsupportedNode(node.name, str(node.target), draft.path, reason)])
    return shaped if isinstance(meta, list | tuple) else shaped[0]


def _shape(node: torch.fx.Node, result: torch.Tensor) -> tuple[int, ...]:
    if all(isinstance(n, int) for n in result.shape):
        return tuple(result.shape)
    raise CompileError(
        f"the shape of {node.name} ({node.target}) depends on values (of a boolean index, or of nonzero); shapes are "
        "public and fixed in a private program: use torch.where, or an index of integers"
    )


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what says where a tensor lies, which means nothing to a protocol."""
    return {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}


def _run(draft: Draft, target: Any, args: Any, kwargs: Any, values: Sequence[Value]) -> Any:
    """A call on known values only, in torch."""

    def tensor(x: Any) -> Any:
        return x.known if isinstance(x, Value) else x

    real_args, real_kwargs = torch.utils._pytree.tree_map(tensor, (args, kwargs))
    with torch.no_grad():
        if target is torch.ops.aten.embedding.default:
            result = _embed(*real_args[:2])
        else:
            result = target(*real_args, **real_kwargs)
    if isinstance(result, list | tuple):
        return [draft.known(r, values) for r in result]
    value = draft.known(result, values)
    operator = str(target).split(".")[-2]
    with torch.no_grad():
        value.int8 = follow(operator, args, lambda t, *rest: target(t, *rest, **real_kwargs), value.is_float)
    return value


def _embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a table; ids that are an expansion are looked up once and expanded afterwards."""
    index = tuple(slice(0, 1) if s == 0 else slice(None) for s in ids.stride())
    return table[ids[index]].expand(*ids.shape, table.shape[1])


def _outputs(draft: Draft, program: torch.export.ExportedProgram, env: dict[str, Any]) -> Any:
    """Fill draft.outputs; the tree names output i "out.i" until finish.py names the edges."""
    leaves: list[Any] = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.TOKEN:
            continue
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CompileError(
                f"the model changes its own state ({spec.target}) in forward; a private program cannot"
            )
        name = getattr(spec.arg, "name", "")
        value = env.get(name) if name else getattr(spec.arg, "value", None)
        if isinstance(value, Value):
            if value.kind == "weight":
                raise CompileError(
                    "an output depends on weights only, so that running it would hand them to the data owner"
                )
            leaves.append(torch.empty(0))
            draft.outputs.append(value)
        else:
            leaves.append(value)
    order = {id(t): f"out.{i}" for i, t in enumerate(v for v in leaves if isinstance(v, torch.Tensor))}
    if not order:
        raise CompileError("the model returns no tensor")
    structure = program.call_spec.out_spec.unflatten(leaves)
    return describe(structure, lambda t, _: order[id(t)])


def _flat_tensors(named: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[tuple[torch.Tensor, str]]:
    from .structure import flatten_inputs

    found = flatten_inputs({"positional": [], "parameters": parameters}, (), named)
    return [(t, e) for e, t in found.items()]


def _flat_batch(model: torch.nn.Module, batch: Any, names_of: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    args, kwargs = as_call(batch)
    _, named = name_arguments(model.forward, args, kwargs)
    return {e: t for t, e in _flat_tensors(named, names_of)}


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as users give them (a tensor, a sequence, a mapping of keyword inputs) as (args,
    kwargs)."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    raise CompileError(
        f"example inputs are a tensor, a tuple or a mapping; {type(inputs).__name__} was given"
    )


__all__ = ["as_call", "check_module", "export_graph", "nominal"]
