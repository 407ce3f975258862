"""The public part of a program as JSON, strictly both ways, and the digest that parties compare.

A manifest that is read is checked as a whole: every shape, type and visibility is computed again from the operators, so
that a file cannot claim that a shared edge is public or that a weight belongs to the data owner.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..graph.draft import nominal
from ..graph.int8 import CHANNEL_DIM
from ..graph.ir import MODEL_OWNER, Edge, Graph, Node, Visibility
from ..graph.ops import OPS, evaluate_op
from ..graph.structure import check_tree
from ..graph.visibility import PUBLIC, WEIGHT, result_visibility
from .planner import BEGIN, Plan, reveal_node
from .spec import Cost, Step

FORMAT, VERSION = "secureinfer-program", 1
MAX_ITEMS = 1 << 18
MAX_NAME = 512
MAX_SIZE = 1 << 40
MAX_DIMENSIONS = 16
MAX_MESSAGES = 4096
PATTERNS = frozenset("xb0123456789")
"""Letters of Cost.messages."""
NO_DATA_OWNER = (None, MODEL_OWNER, "dealer")

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


class Fault(ValueError):
    """The manifest is not a valid one; the text says where."""


def canonical(value: Any) -> bytes:
    """One spelling for each JSON value, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def tensors_digest(tensors: Mapping[str, torch.Tensor], *prefix: bytes) -> str:
    """SHA-256 over length-prefixed parts: the prefix, then name, type, shape and bytes of each tensor by name."""
    h = hashlib.sha256()

    def put(part: bytes | memoryview) -> None:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)

    for part in prefix:
        put(part)
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        put(canonical([name, str(t.dtype), list(t.shape)]))
        put(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()


def manifest_digest(manifest: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> str:
    """What parties compare: graph, plan, options, ranges and public tensors, and never a weight (rule R6)."""
    return tensors_digest(constants, b"secureinfer manifest", canonical(manifest))


def write_manifest(
    graph: Graph, plan: Plan, backend: str, protocol: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "backend": backend,
        "protocol": protocol,
        "options": dict(options),
        "graph": {
            "edges": [_write_edge(e) for e in graph.edges.values()],
            "nodes": [_write_node(n) for n in graph.nodes],
            "inputs": list(graph.inputs),
            "weights": list(graph.weights),
            "constants": list(graph.constants),
            "outputs": list(graph.outputs),
            "input_spec": graph.input_spec,
            "output_spec": graph.output_spec,
            "reveal_to": list(graph.reveal_to),
        },
        "plan": [[s.kernel, *_write_cost(s.cost)] for s in plan.steps],
    }


def _write_cost(cost: Cost) -> list[Any]:
    setup = [[what, size] for what, size in sorted(cost.setup)]
    return [cost.messages, cost.bytes, cost.dealt_bytes, setup, cost.parties]


def _write_edge(e: Edge) -> list[Any]:
    return [e.name, list(e.shape), e.dtype, e.visibility.value, e.owner, e.ring_bits, e.scale, e.bound]


def _write_node(n: Node) -> list[Any]:
    attrs = {k: _write_attribute(v) for k, v in n.attrs.items()}
    return [n.name, n.op, list(n.inputs), list(n.outputs), attrs, n.path, n.operator]


def _write_attribute(value: Any) -> Any:
    """JSON has no infinities: pad values may be -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _read_attribute(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() != {"float"} or value["float"] not in ("inf", "-inf"):
            raise Fault("an attribute of an unknown kind")
        return float(value["float"])
    if isinstance(value, list):
        if len(value) > 64 or not all(isinstance(v, int | float) for v in value):
            raise Fault("an attribute list that is not a short list of numbers")
        return value
    if not (value is None or isinstance(value, bool | int | float | str)) or (
        isinstance(value, str) and len(value) > 64
    ):
        raise Fault("an attribute of an unknown kind")
    return value


def read_manifest(raw: Any) -> tuple[Graph, Plan, str, str, dict[str, Any]]:
    """Graph, plan, backend, protocol and options of a parsed manifest. Raises Fault where anything does not fit."""
    keys = {"format", "version", "backend", "protocol", "options", "graph", "plan"}
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise Fault("it is not a program's manifest")
    if raw.get("version") != VERSION:
        raise Fault(f"its version is {raw.get('version')!r}; this version of secureinfer reads {VERSION}")
    _keys(raw, keys, "manifest")
    options = raw["options"]
    if not isinstance(options, dict) or not all(
        isinstance(v, bool | int | float | str) for v in options.values()
    ):
        raise Fault("its options are not settings")
    bits = options.get("precision_bits")
    if type(bits) is not int or not 1 <= bits <= 62:
        raise Fault("its options have no precision_bits")
    graph = _read_graph(raw["graph"])
    return graph, _read_plan(raw["plan"], graph), _name(raw["backend"]), _name(raw["protocol"]), options


def _keys(raw: Any, keys: set[str], what: str) -> None:
    if not isinstance(raw, dict) or raw.keys() != keys:
        raise Fault(f"its {what} does not have exactly the keys {', '.join(sorted(keys))}")


def _name(value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not (value or empty) or not value.isprintable():
        raise Fault("a name is not a printable text of reasonable length")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise Fault("a list of names is not one")
    return tuple(_name(v) for v in value)


def _integer(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Fault(f"{what} is not an integer in {low}..{high}")
    return value


def _rows(value: Any, length: int, what: str) -> Iterable[list[Any]]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise Fault(f"its {what} are not a list of reasonable length")
    for row in value:
        if not isinstance(row, list) or len(row) != length:
            raise Fault(f"one of its {what} does not have {length} fields")
        yield row


def _read_edge(row: list[Any]) -> Edge:
    name, shape, dtype, visibility, owner, ring_bits, scale, bound = row
    name = _name(name)
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise Fault(f"edge {name} has no proper shape")
    sizes = tuple(_integer(s, 0, MAX_SIZE, f"a size of edge {name}") for s in shape)
    if math.prod(sizes) > MAX_SIZE:
        raise Fault(f"edge {name} has too many elements")
    if dtype not in DTYPES or visibility not in {v.value for v in Visibility}:
        raise Fault(f"edge {name} has an unknown type or visibility")
    if bound is not None and (type(bound) not in (int, float) or not 0 <= bound < math.inf):
        raise Fault(f"the bound of edge {name} is not a finite number")
    return Edge(
        name, sizes, dtype, Visibility(visibility), None if owner is None else _name(owner),
        _integer(ring_bits, 1, 64, f"ring bits of {name}"), _integer(scale, 0, 62, f"scale of {name}"),
        None if bound is None else float(bound),
    )  # fmt: skip


def _read_node(row: list[Any]) -> Node:
    name, op, inputs, outputs, attrs, path, operator = row
    name = _name(name)
    if op not in OPS:
        raise Fault(f"node {name} has an operator that this version does not know")
    if not isinstance(attrs, dict) or len(attrs) > 16:
        raise Fault(f"node {name} has no proper attributes")
    read = MappingProxyType({_name(k): _read_attribute(v) for k, v in attrs.items()})
    node = Node(
        name, op, _names(inputs), _names(outputs), read, _name(path, empty=True), _name(operator, empty=True)
    )
    if len(node.outputs) != 1:
        raise Fault(f"node {name} does not have one output")
    return node


def _read_graph(raw: Any) -> Graph:
    lists = {"inputs", "weights", "constants", "outputs", "reveal_to"}
    _keys(raw, {"edges", "nodes", "input_spec", "output_spec", *lists}, "graph")
    edges: dict[str, Edge] = {}
    for row in _rows(raw["edges"], 8, "edges"):
        edge = _read_edge(row)
        if edge.name in edges:
            raise Fault(f"edge {edge.name} is there twice")
        edges[edge.name] = edge
    graph = Graph(
        nodes=tuple(_read_node(r) for r in _rows(raw["nodes"], 7, "nodes")),
        edges=MappingProxyType(edges),
        input_spec=raw["input_spec"],
        output_spec=raw["output_spec"],
        **{k: _names(raw[k]) for k in lists},
    )
    check_graph(graph)
    return graph


def check_graph(graph: Graph) -> None:
    """Raise Fault unless every edge is defined once, before its use, as its operator gives it, and seen by those who may."""
    defined: set[str] = set()
    for name in (*graph.inputs, *graph.weights, *graph.constants):
        if name not in graph.edges or name in defined:
            raise Fault(f"edge {name} is missing or defined twice")
        defined.add(name)
    seen = {name: (graph.edges[name].visibility, graph.edges[name].owner) for name in defined}
    wrong = [n for n in graph.inputs if seen[n][0] is not Visibility.PRIVATE or seen[n][1] in NO_DATA_OWNER]
    wrong += [n for n in graph.weights if seen[n] != WEIGHT]
    wrong += [n for n in graph.constants if seen[n] != PUBLIC]
    if wrong:
        raise Fault(f"edge {wrong[0]} belongs to the wrong party")
    for node in graph.nodes:
        _check_node(graph, node, defined)
    if defined != graph.edges.keys():
        raise Fault("it has edges that nothing defines")
    if not graph.outputs or not defined.issuperset(graph.outputs):
        raise Fault("its outputs are missing or unknown")
    if any(graph.edges[o].owner == MODEL_OWNER for o in graph.outputs):
        raise Fault("an output would hand out weights")
    if not graph.reveal_to or not {*graph.owners(), MODEL_OWNER}.issuperset(graph.reveal_to):
        raise Fault("it reveals its outputs to somebody who takes no part")
    _check_int8(graph)
    _check_specs(graph)


def _check_node(graph: Graph, node: Node, defined: set[str]) -> None:
    output = node.outputs[0]
    if output in defined or output not in graph.edges or not defined.issuperset(node.inputs):
        raise Fault(
            f"node {node.name} does not fit: its edges are unknown, used before they exist, or defined twice"
        )
    edge, operands = graph.edges[output], [graph.edges[e] for e in node.inputs]
    try:
        tensors = [torch.empty(e.shape, dtype=_computed(e), device="meta") for e in operands]
        result = evaluate_op(node.op, node.attrs, tensors)
    except Exception as error:  # whatever torch raises for operands that do not fit
        raise Fault(
            f"node {node.name} ({node.op}) does not fit its operands: {type(error).__name__}"
        ) from error
    if tuple(result.shape) != edge.shape or nominal(result.dtype) != DTYPES[edge.dtype]:
        raise Fault(f"node {node.name} ({node.op}) gives another shape or type than its edge says")
    if (edge.visibility, edge.owner) != result_visibility((e.visibility, e.owner) for e in operands):
        raise Fault(f"edge {output} claims a visibility that its operands do not allow")
    defined.add(output)


def _computed(edge: Edge) -> torch.dtype:
    """The type that operators see: the reference functions take integers as int64, but for int8 weights."""
    return torch.int8 if edge.dtype == "int8" else nominal(DTYPES[edge.dtype])


def _check_int8(graph: Graph) -> None:
    """An int8 weight is the weight of quantised nodes and nothing else, and all of them give it the same scales."""
    int8 = {n for n in graph.weights if graph.edges[n].dtype == "int8"}
    scales: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        flag = node.attrs.get("quantized", False)
        if type(flag) is not bool or (flag and (node.op not in CHANNEL_DIM or len(node.inputs) < 3)):
            raise Fault(f"node {node.name} is no quantised layer")
        if int8.intersection((node.inputs[:1] + node.inputs[2:]) if flag else node.inputs):
            raise Fault(f"node {node.name} takes an int8 weight, and has no scales for it")
        if not flag:
            continue
        weight, scale = graph.edges[node.inputs[1]], graph.edges[node.inputs[-1]]
        channels = weight.shape[CHANNEL_DIM[node.op] : CHANNEL_DIM[node.op] + 1]
        if weight.name not in int8 or scale.name not in graph.weights or scale.dtype != "float32":
            raise Fault(f"the int8 weight of node {node.name} or its scales are not private weights")
        if scale.shape != channels or scales.setdefault(weight.name, (scale.name, node.op)) != (
            scale.name,
            node.op,
        ):
            raise Fault(f"the scales of node {node.name} do not fit its weight")
    if int8 - scales.keys() or int8.intersection(graph.outputs):
        raise Fault("it has an int8 weight that no quantised layer uses")
    apart = {scale for scale, _ in scales.values()}
    if any(apart.intersection(n.inputs[:-1] if n.attrs.get("quantized") else n.inputs) for n in graph.nodes):
        raise Fault("the scales of an int8 weight are used for something else")


def _check_specs(graph: Graph) -> None:
    spec = graph.input_spec
    if (
        not isinstance(spec, dict)
        or spec.keys() != {"positional", "parameters"}
        or not isinstance(spec["parameters"], dict)
    ):
        raise Fault("its input structure is not one")
    _names(spec["positional"])
    try:
        for name, tree in spec["parameters"].items():
            _name(name)
            check_tree(tree, graph.inputs)
        check_tree(graph.output_spec, graph.outputs)
    except ValueError as error:
        raise Fault(str(error)) from error


def _read_plan(raw: Any, graph: Graph) -> Plan:
    nodes = (BEGIN, *graph.nodes, reveal_node(graph))
    rows = list(_rows(raw, 6, "plan steps"))
    if len(rows) != len(nodes):
        raise Fault("its plan does not have one step a node")
    pairs = enumerate(zip(nodes, rows, strict=True))
    return Plan(
        tuple(Step(i, node, _name(kernel), _read_cost(cost, i)) for i, (node, (kernel, *cost)) in pairs)
    )


def _read_cost(row: list[Any], step: int) -> Cost:
    messages, size, dealt, setup, parties = row
    if not isinstance(messages, str) or len(messages) > MAX_MESSAGES or not PATTERNS.issuperset(messages):
        raise Fault(f"the messages of step {step} are not patterns")
    sent = frozenset((_name(what), _figure(n, step)) for what, n in _rows(setup, 2, "setup costs"))
    return Cost(
        messages,
        _figure(size, step),
        _figure(dealt, step),
        sent,
        _integer(parties, 1, 256, f"parties of step {step}"),
    )


def _figure(value: Any, step: int) -> int:
    return _integer(value, 0, 1 << 62, f"a cost of step {step}")
