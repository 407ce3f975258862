"""The catalog of the CKKS backend: what each step costs. Pure declarations: no cryptography is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import SettingsError
from ...graph.ir import Graph, Visibility
from ...plan.spec import Cost, KernelSpec, Registry, Step, StepContext
from ...transport.base import HEADER_BYTES, ONLINE_BEGIN_HEADERS
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
    """Why a program from a file cannot run: parameters below 128 bits (rule K1), or sizes beyond reason."""
    try:
        from_options(options)
    except SettingsError as error:
        return str(error)
    if options.get("layout") not in ("slots", "batch"):
        return "it has no layout"
    return None


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
