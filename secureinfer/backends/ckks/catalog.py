"""The catalog of the CKKS backend: what each step costs. Pure declarations: no cryptography is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import SettingsError
from ...graph.ir import MODEL_OWNER, Graph, Node, Visibility
from ...plan.spec import Cost, KernelSpec, Registry, Step, StepContext, step_context
from ...transport.base import HEADER_BYTES, ONLINE_BEGIN_HEADERS
from .limits import MOST_KEY_BYTES, MOST_MATRICES, MOST_ROTATIONS
from .messages import HEADER, KEYS
from .params import Parameters, from_options

SEAL_HEADER = 256
"""Most bytes that SEAL puts around a ciphertext or a key, a seed included."""


def ciphertext_bytes(p: Parameters, level: int, *, seeded: bool) -> int:
    """Upper bound of a frame: SEAL compresses residues of fewer than 64 bits, by what is not known before."""
    return (1 if seeded else 2) * p.primes_at(level) * p.degree * 8 + SEAL_HEADER + HEADER.size + HEADER_BYTES


def key_bytes(p: Parameters, galois: int, *, public: bool) -> int:
    """Upper bound of all evaluation keys, seeded."""
    digits = p.primes_at(p.levels)
    each = digits * ((digits + 1) * p.degree * 8 + SEAL_HEADER)
    total = (1 + galois) * each + 3 * (HEADER_BYTES + KEYS.size + SEAL_HEADER) + 64 * p.degree
    return total + (2 * (digits + 1) * p.degree * 8 + SEAL_HEADER if public else 0)


def _parameters(context: StepContext) -> Parameters:
    return from_options(context.options)


def _begin(context: StepContext) -> Cost:
    """The parties burn the index."""
    p = _parameters(context)
    keys = key_bytes(
        p, int(context.options.get("galois_keys", 0)), public=bool(context.options.get("circuit_privacy", 0))
    )
    return Cost("0", ONLINE_BEGIN_HEADERS * HEADER_BYTES, 0, frozenset({("evaluation keys", keys)}))


def _free(context: StepContext) -> Cost:
    return Cost()


def _groups(context: StepContext, shape: tuple[int, ...]) -> int:
    p = _parameters(context)
    return -(-shape[0] // p.slots) if context.options.get("layout") == "batch" else shape[0]


def _linear(context: StepContext) -> Cost:
    """The first matrix is where inputs come in."""
    p, attrs = _parameters(context), context.node.attrs
    if (
        attrs.get("base") != "inputs"
        or not context.node.name.endswith(".matrix0")
        or attrs.get("level") != p.levels
    ):
        return Cost()
    count = int(attrs["ciphertexts"]) * _groups(context, context.inputs[0].shape)
    return Cost("0", count * ciphertext_bytes(p, p.levels, seeded=True))


def _reveal(context: StepContext) -> Cost:
    """Ciphertexts of the outputs, to the data owner."""
    p = _parameters(context)
    count = int(context.options.get("returned", 1))
    return Cost("1", count * ciphertext_bytes(p, 0, seeded=False))


def _two_parties(context: StepContext) -> str | None:
    return None if context.parties == 2 else "CKKS has one data owner and one model owner"


def _accepts_linear(context: StepContext) -> str | None:
    weights = context.inputs[1:]
    if any(e.visibility is not Visibility.PRIVATE for e in weights) or "level" not in context.node.attrs:
        return "it was not packed"
    return _two_parties(context)


def _accepts_polynomial(context: StepContext) -> str | None:
    return None if "level" in context.node.attrs else "it has no level"


def _error(context: StepContext) -> float:
    return float(context.options.get("error", 1e-3))


def _row(op: str, name: str, accepts: Any, cost: Any, source: str) -> KernelSpec:
    return KernelSpec(op, name, "ckks", accepts, cost, _error, source, parties=2)


_SEAL = "SEAL 4.1 manual"
_PACKING = "Gazelle, USENIX Security 2018, section 4; Halevi and Shoup, CRYPTO 2018"


def check(graph: Graph, steps: Iterable[Step], options: Mapping[str, Any]) -> str | None:
    """Why a program from a file cannot run: parameters below 128 bits (rule K1), sizes beyond reason, settings or
    attributes that compiling never writes, costs that are not those of the steps. What stands in which slot is checked
    with the constants: see reading.py.
    """
    try:
        p = from_options(options)
    except SettingsError as error:
        return str(error)
    return (
        _wrong_option(p, options)
        or _wrong_party(graph)
        or next((reason for node in graph.nodes if (reason := _wrong_node(p, graph, node))), None)
        or _wrong_count(graph)
        or _wrong_cost(graph, steps, options)
    )


def _number(value: Any, most: float = 1e300) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _wrong_option(p: Parameters, options: Mapping[str, Any]) -> str | None:
    if options.get("layout") not in ("slots", "batch"):
        return "it has no layout"
    if type(options.get("late_rescaling")) is not bool or not _number(options.get("noise"), 1.0):
        return "it does not say how it rescales, or what noise that makes"
    if options.get("circuit_privacy", 0) not in (0, 40) or type(options.get("circuit_privacy", 0)) is not int:
        return "its circuit_privacy is neither 0 nor 40"
    keys = options.get("galois_keys")
    if not _integer(keys, 0, MOST_ROTATIONS) or not _integer(options.get("returned"), 1, 1 << 40):
        return f"it says neither how many Galois keys it takes, up to {MOST_ROTATIONS}, nor what comes back"
    size = key_bytes(p, int(options["galois_keys"]), public=True)
    if size > MOST_KEY_BYTES:
        return f"its keys take {size} bytes; at most {MOST_KEY_BYTES} are possible"
    return None


def _wrong_party(graph: Graph) -> str | None:
    if len(graph.owners()) != 1:
        return "it has several data owners: the secret key of one would open the inputs of all"
    if MODEL_OWNER in graph.reveal_to:
        return "it shows what is decrypted to the model owner"
    for name in graph.inputs:
        edge = graph.edge(name)
        if edge.dtype != "float32" or edge.bound is None or not edge.bound > 0:
            return f"input {name} is not a real number within a bound"
    return None


def _wrong_node(p: Parameters, graph: Graph, node: Node) -> str | None:
    attrs = node.attrs
    if node.op == "reshape" and "low" in attrs and (type(attrs["low"]) not in (int, float) or attrs["low"]):
        return f"the least value of {node.name} is not 0"
    if node.op not in ("linear", "polynomial"):
        return None
    counts = ("ciphertexts", "results", "products", "rotations") if node.op == "linear" else ("ciphertexts",)
    if not _number(attrs.get("estimate_ms")) or not all(_integer(attrs.get(c), 0, 1 << 40) for c in counts):
        return f"the cost of {node.name} is none"
    if node.op == "linear":
        if not set(node.inputs[1:]) <= set(graph.weights):
            return f"{node.name} computes with what is no weight"
        level = _integer(attrs.get("level"), 1, p.levels)
        return (
            None if level and isinstance(attrs.get("base"), str) else f"{node.name} has no level or no base"
        )
    depth, coefficients = attrs.get("depth"), attrs.get("coefficients")
    if not _integer(depth, 1, p.levels) or not _integer(attrs.get("level"), 0, p.levels):
        return f"{node.name} has no level or no depth"
    if not isinstance(coefficients, list) or not 2 <= len(coefficients) <= 1 + (1 << int(attrs["depth"])):
        return f"{node.name} has another degree than depth"
    if not all(type(c) in (int, float) and abs(c) < 1e300 for c in coefficients):
        return f"{node.name} has coefficients that are no numbers"
    if not all(_number(attrs.get(name)) for name in ("error", "range", "outside", "radius")):
        return f"{node.name} does not say how good it is"
    return None


def _wrong_count(graph: Graph) -> str | None:
    matrices = sum(n.op == "linear" for n in graph.nodes)
    return (
        None
        if 0 < matrices <= MOST_MATRICES
        else f"it has {matrices} matrices; 1 to {MOST_MATRICES} are possible"
    )


def _wrong_cost(graph: Graph, steps: Iterable[Step], options: Mapping[str, Any]) -> str | None:
    """The plan is what a data owner decides by."""
    counted = 0
    for step in steps:
        cost = CATALOG.specs[step.kernel].cost(step_context(graph, step.node, 2, options))
        if cost != step.cost:
            return f"step {step.index} has another cost than its plan says"
        counted += step.node.op == "linear" and cost.bytes > 0
    return None if counted else "its plan counts no input"


CATALOG = Registry(
    "ckks",
    [
        _row("begin", "ckks.begin", _two_parties, _begin, "the session's handshake"),
        _row("reshape", "ckks.reshape", lambda c: None, _free, "no ciphertext changes"),
        _row("cat", "ckks.cat", lambda c: None, _free, "inputs are packed together"),
        _row("slice", "ckks.slice", lambda c: None, _free, "outputs are read apart"),
        _row("avg_pool2d", "ckks.sum", lambda c: None, _free, "sums of rotations, in the matrix after it"),
        _row("linear", "ckks.matrix", _accepts_linear, _linear, _PACKING),
        _row("add", "ckks.add", _two_parties, _free, _SEAL),
        _row(
            "polynomial",
            "ckks.polynomial",
            _accepts_polynomial,
            _free,
            "Paterson and Stockmeyer, SIAM J. Comput. 1973",
        ),
        _row("reveal", "ckks.reveal", _two_parties, _reveal, "decrypted by the data owner alone"),
    ],
    check=check,
)
