"""CrypTen on a current torch and on our transport: every patch of CrypTen is here, and nowhere else.

CrypTen 0.4.1 keeps one communicator, one set of generators and one provider in module globals. `activate(party)` puts the
Party of the calling thread in their place, so that a process (or a thread, in tests) is one party. What is replaced:

- the communicator: frames on Links in place of torch.distributed;
- the generators and the random-number functions: AES-CTR streams in place of Mersenne Twisters with 64-bit seeds;
- the provider: dealt material in place of the trusted first party, which is refused without its unsafe switch;
- division by public numbers: exact truncation in place of the local one, which fails with probability |x| 2^(2f-64);
- a stub for the torch module that CrypTen's unused ONNX converter imports and that torch no longer has.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import SessionError, UnsafeError
from . import protocols, ring
from .correlations import And, BitPair, Product, Square, Wraps, frozen
from .party import Party

_state = threading.local()


def _import_crypten() -> Any:
    """Import crypten; torch 2.13 and later lack the registry of old ONNX symbols that it imports but does not need here."""
    name = "torch.onnx._internal.registration"
    if importlib.util.find_spec("torch.onnx._internal") is None or not _has(name):
        stub = types.ModuleType(name)
        stub.registry = types.SimpleNamespace()  # type: ignore[attr-defined]
        sys.modules.setdefault(name, stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("crypten")


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


__all__ = ["ArithmeticSharedTensor", "BinarySharedTensor", "activate", "beaver", "crypten", "current"]

crypten = _import_crypten()
import crypten.communicator as _communicator  # noqa: E402
from crypten.common import rng as _rng  # noqa: E402
from crypten.config import cfg as _cfg  # noqa: E402
from crypten.mpc.primitives import arithmetic as _arithmetic  # noqa: E402
from crypten.mpc.primitives import beaver  # noqa: E402
from crypten.mpc.primitives import binary as _binary  # noqa: E402
from crypten.mpc.primitives.arithmetic import ArithmeticSharedTensor  # noqa: E402
from crypten.mpc.primitives.binary import BinarySharedTensor  # noqa: E402
from crypten.mpc.provider import tfp_provider as _tfp  # noqa: E402


def current() -> Party:
    """The party of this thread. Raises SessionError outside `activate`."""
    party: Party | None = getattr(_state, "party", None)
    if party is None:
        raise SessionError("CrypTen is not active in this thread; use runtime.activate(party)")
    return party


@contextlib.contextmanager
def activate(
    party: Party, *, provider: str = "dealer", unsafe_trusted_first_party: bool = False
) -> Iterator[Party]:
    """Run CrypTen as `party` in this thread.

    provider: "dealer", or CrypTen's own default "trusted_first_party", in which rank 0 makes every mask and so can read
    everything; that one raises UnsafeError without unsafe_trusted_first_party=True, and warns with it.
    """
    if provider not in ("dealer", "trusted_first_party"):
        raise UnsafeError(f"unknown provider {provider!r}; use 'dealer'")
    if provider == "trusted_first_party":
        if not unsafe_trusted_first_party:
            raise UnsafeError(
                "the trusted-first-party provider gives one party every mask; "
                "use a dealer, or pass unsafe_trusted_first_party=True if that is truly meant"
            )
        warnings.warn("unsafe_trusted_first_party: rank 0 knows every mask of this session", stacklevel=3)
    before = getattr(_state, "party", None), getattr(_state, "provider", None)
    _state.party = party
    _state.provider = _tfp.TrustedFirstParty() if provider == "trusted_first_party" else DealtProvider()
    try:
        yield party
    finally:
        _state.party, _state.provider = before


class DealtProvider:
    """CrypTen's TupleProvider interface on the material of the current party."""

    NAME = "dealer"

    def generate_additive_triple(
        self,
        size0: Sequence[int],
        size1: Sequence[int],
        op: str,
        device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        options = frozen(kwargs)
        result = ring.apply(
            op,
            torch.empty(tuple(size0), dtype=torch.int64, device="meta"),
            torch.empty(tuple(size1), dtype=torch.int64, device="meta"),
            dict(options),
        )
        parts = current().take(Product(op, tuple(size0), tuple(size1), tuple(result.shape), options))
        return _arithmetic_shares(parts["a"]), _arithmetic_shares(parts["b"]), _arithmetic_shares(parts["c"])

    def square(self, size: Sequence[int], device: Any = None) -> tuple[Any, Any]:
        parts = current().take(Square(tuple(size)))
        return _arithmetic_shares(parts["r"]), _arithmetic_shares(parts["r2"])

    def generate_binary_triple(
        self, size0: Sequence[int], size1: Sequence[int], device: Any = None
    ) -> tuple[Any, Any, Any]:
        result = torch.broadcast_shapes(tuple(size0), tuple(size1))  # type: ignore[no-untyped-call]
        parts = current().take(And(tuple(size0), tuple(size1), tuple(result)))
        return tuple(BinarySharedTensor.from_shares(parts[n], precision=0) for n in ("a", "b", "c"))

    def wrap_rng(self, size: Sequence[int], device: Any = None) -> tuple[Any, Any]:
        parts = current().take(Wraps(tuple(size)))
        return _arithmetic_shares(parts["r"]), _arithmetic_shares(parts["theta"])

    def B2A_rng(self, size: Sequence[int], device: Any = None) -> tuple[Any, Any]:
        parts = current().take(BitPair(tuple(size), torch.int64))
        return (
            _arithmetic_shares(parts["arithmetic"]),
            BinarySharedTensor.from_shares(parts["binary"] & 1, precision=0),
        )


def _arithmetic_shares(tensor: torch.Tensor) -> Any:
    return ArithmeticSharedTensor.from_shares(tensor, precision=0)


# -- the patches


class _Generator:
    """Stands for one of CrypTen's named generators; the streams are the current party's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ring(self, size: Sequence[int]) -> torch.Tensor:
        return current().named_ring(self.name, tuple(size))


class _Generators(dict[str, Any]):
    """generators[name][device] -> _Generator, for every device."""

    def __init__(self) -> None:
        super().__init__({n: _AnyDevice(n) for n in ("prev", "next", "local", "global")})


class _AnyDevice(dict[Any, Any]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._generator = _Generator(name)

    def __missing__(self, device: Any) -> _Generator:
        return self._generator


def _ring_element(
    size: Sequence[int], ring_size: int = 2**64, generator: Any = None, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    source = generator if generator is not None else crypten.generators["local"][device]
    return source.ring(size)  # type: ignore[no-any-return]


def _kbit(
    size: Sequence[int],
    bitlength: int | None = None,
    generator: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    words = _ring_element(size, generator=generator, device=device)
    if bitlength is None or bitlength == ring.RING_BITS:
        return words
    return words & ((1 << bitlength) - 1)


def _divide(self: Any, y: Any) -> Any:
    """ArithmeticSharedTensor.div_ by a public number or integer tensor: exact to one unit in the last place."""
    if isinstance(y, float) and y == int(y):
        y = int(y)
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
        self.share = protocols.truncate(current(), self.share, y.bit_length() - 1)
        return self
    reciprocal = 1.0 / (y.double() if torch.is_tensor(y) else torch.tensor(float(y), dtype=torch.float64))
    # Keep 30 significant bits of the smallest reciprocal, as far as they fit.
    smallest = float(reciprocal.abs().min()) if reciprocal.numel() else 1.0
    bits = max(1, min(40, 20 + max(0, -int(torch.floor(torch.log2(torch.tensor(smallest)))))))
    self.share = protocols.truncate(current(), self.share * ring.encode(reciprocal, bits), bits)
    return self


def _install() -> None:
    def get() -> Any:
        return current().communicator

    _communicator.get = get
    _communicator.is_initialized = lambda: getattr(_state, "party", None) is not None
    crypten.is_initialized = _communicator.is_initialized
    crypten.generators = _Generators()
    for module in (_rng, _arithmetic, _binary, _tfp):
        if hasattr(module, "generate_random_ring_element"):
            module.generate_random_ring_element = _ring_element
        if hasattr(module, "generate_kbit_random_tensor"):
            module.generate_kbit_random_tensor = _kbit
    crypten.mpc.get_default_provider = lambda: _state.provider
    ArithmeticSharedTensor.div_ = _divide
    _cfg.encoder.precision_bits = 16


_install()
