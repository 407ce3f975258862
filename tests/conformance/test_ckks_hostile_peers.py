"""A peer of a CKKS session that sends what it must not: one typed error names it, and nothing is decrypted or computed.

Every fault is planted where it leaves its party: in the keys, in the bytes of a ciphertext, or in the header that binds
these to a context, an inference and a place.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.errors import SecureInferError, UnsafeError, WireError
from secureinfer.measure.memory import peak_memory_bytes

pytestmark = pytest.mark.needs("he")

from .ckks_pair import MODEL, OWNER, Frame, Pair, Spied, raised  # noqa: E402

X = torch.rand(1, 4, generator=torch.Generator().manual_seed(3))


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * h)


@pytest.fixture(scope="module")
def program() -> si.Program:
    made = [(torch.rand(1, 4),) for _ in range(8)]
    return si.compile(Squares().eval(), (X,), backend="ckks", calibration=made)


@dataclasses.dataclass
class Watched:
    """A pair whose decryptor and evaluator tell whether they were used."""

    pair: Pair
    evaluator: Spied
    decryptor: Spied | None = None

    @property
    def computed(self) -> list[str]:
        return self.evaluator.calls

    @property
    def decrypted(self) -> list[str]:
        return [] if self.decryptor is None else self.decryptor.calls


def watched(program: si.Program, **settings: Any) -> Watched:
    pair = Pair(program, set_up=False, **settings)
    context = pair.engines[MODEL]._common.context
    context.evaluator = Spied(context.evaluator)
    return Watched(pair, context.evaluator)


def set_up(seen: Watched) -> None:
    seen.pair.setup()
    client = seen.pair.engines[OWNER]._client
    client._decryptor = seen.decryptor = Spied(client._decryptor)


def error_of(found: dict[str, Any]) -> tuple[str, SecureInferError]:
    """Who refused, and the error: the cause, and not what the other party then says of a closed link."""
    try:
        raised(found)
    except SecureInferError as error:
        return next(name for name, e in found.items() if e is error), error
    raise AssertionError(f"nothing was refused: {found}")


def test_without_a_fault_the_answer_is_right_and_what_watches_sees_it(program: si.Program) -> None:
    seen = watched(program)
    with seen.pair as pair:
        set_up(seen)
        for _ in range(2):
            assert torch.allclose(pair.infer(X)[0], Squares()(X), atol=1e-3)
    assert seen.decrypted == ["decrypt", "decrypt"] and "multiply_plain" in seen.computed


# --- keys ---


def api() -> Any:
    import tenseal.sealapi as found

    return found


def seal(client: Any) -> tuple[Any, Any]:
    """Context and secret key of a data owner."""
    return client.context, client._generator.secret_key()


def dumped(item: Any) -> bytearray:
    from secureinfer.backends.ckks.sealed import dump

    return dump(item)


def secret_key(client: Any, keys: list[bytearray]) -> bytearray:
    return dumped(client._generator.secret_key())


def tenseal_context(secret: bool, *, other: bool = False) -> Callable[[Any, list[bytearray]], bytearray]:
    def make(client: Any, keys: list[bytearray]) -> bytearray:
        import tenseal as ts

        moduli = [60, 40, 60] if other else list(client.context.parameters.moduli)
        context = ts.context(
            ts.SCHEME_TYPE.CKKS, client.context.parameters.degree, coeff_mod_bit_sizes=moduli
        )
        saved = context.serialize(
            save_public_key=False, save_secret_key=secret, save_galois_keys=False, save_relin_keys=False
        )
        return bytearray(saved)

    return make


def generator_of_others(client: Any) -> Any:
    """Of keys for other primes of the same sizes and count."""
    from secureinfer.backends.ckks.context import Context

    p = client.context.parameters
    context = Context(dataclasses.replace(p, first_bits=p.first_bits + 1))
    return context.api.KeyGenerator(context.context)


def elements(client: Any) -> list[int]:
    return [client.context.element(s) for s in client._steps]


def zeros(client: Any, keys: list[bytearray]) -> bytearray:
    """Galois keys for as many rotations as there can be, all of them zero: 1.3 MB that would be 21 GB."""
    context = client.context
    primes = context.parameters.primes_at(context.parameters.levels) + 1
    degree, head = context.parameters.degree, struct.pack("<4Q", *context.context.key_parms_id())
    size = 8 * 2 * degree * primes
    body = head + b"\1" + struct.pack("<QQQdQ", 2, degree, primes, 1.0, 1)
    inner = body + envelope(0, 8 + size) + struct.pack("<Q", 2 * degree * primes)
    one = [(0, envelope(0, len(inner) + size) + inner), (1, size)] * (primes - 1)
    parts: list[tuple[int, Any]] = [(0, head + struct.pack("<Q", degree))]
    for _ in range(degree):
        parts += [(0, struct.pack("<Q", primes - 1)), *one]
    payload = compressed(parts)
    return bytearray(envelope(2, len(payload)) + payload)


def envelope(mode: int, size: int) -> bytes:
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, mode, 0, 16 + size)


def compressed(parts: list[tuple[int, Any]]) -> bytes:
    """A Zstandard frame. parts: (0, bytes as they are) or (1, how many zeros)."""
    out, most = bytearray(b"\x28\xb5\x2f\xfd\x00\x68"), 1 << 17
    for kind, what in parts:
        if kind == 0:
            out += (len(what) << 3).to_bytes(3, "little") + what
            continue
        for start in range(0, what, most):
            out += (min(most, what - start) << 3 | 2).to_bytes(3, "little") + b"\0"
    return bytes(out + b"\1\0\0")


RELINEARISATION, GALOIS = 0, 1
KeyFault = tuple[int, Callable[[Any, list[bytearray]], Any], type[SecureInferError], str]
KEY_FAULTS: dict[str, KeyFault] = {
    "a secret key for Galois keys": (GALOIS, secret_key, UnsafeError, "sent a secret key in place of Galois keys"),
    "a secret key for relinearisation keys": (RELINEARISATION, secret_key, UnsafeError, "secret key"),
    "a TenSEAL context with its secret key": (GALOIS, tenseal_context(True), UnsafeError, "secret key"),
    "a TenSEAL context without it": (GALOIS, tenseal_context(False), WireError, "could not be read"),
    "a TenSEAL context of other parameters": (GALOIS, tenseal_context(True, other=True), WireError, "could not be read"),
    "a secret key behind the keys": (GALOIS, lambda c, k: k[GALOIS] + secret_key(c, k), UnsafeError, "secret key"),
    "keys of other parameters": (
        GALOIS, lambda c, k: dumped(generator_of_others(c).create_galois_keys(elements(c))), WireError, "could not be read",
    ),
    "relinearisation keys of other parameters": (
        RELINEARISATION, lambda c, k: dumped(generator_of_others(c).create_relin_keys()), WireError, "could not be read",
    ),
    "a Galois key less": (
        GALOIS, lambda c, k: dumped(c._generator.create_galois_keys(elements(c)[1:])), WireError, "of the plan are missing",
    ),
    "a Galois key more": (
        GALOIS, lambda c, k: dumped(c._generator.create_galois_keys([*elements(c), 5])), WireError, "where the plan has",
    ),
    "no Galois keys": (GALOIS, lambda c, k: b"", WireError, "Galois keys of the plan are missing"),
    "no relinearisation keys": (RELINEARISATION, lambda c, k: b"", WireError, "no relinearisation keys"),
    "Galois keys for relinearisation keys": (RELINEARISATION, lambda c, k: k[GALOIS], WireError, "relinearisation keys"),
    "relinearisation keys for Galois keys": (GALOIS, lambda c, k: k[RELINEARISATION], WireError, "Galois keys"),
    "a ciphertext": (GALOIS, lambda c, k: c.encrypt(np.zeros(4096)), WireError, "could not be read"),
    "keys that are cut short": (GALOIS, lambda c, k: k[GALOIS][:-1], WireError, "could not be read"),
    "bytes behind the keys": (GALOIS, lambda c, k: k[GALOIS] + b"0", WireError, "could not be read"),
    "noise": (GALOIS, lambda c, k: os.urandom(1000), WireError, "could not be read"),
    "keys that are all zeros": (GALOIS, zeros, WireError, "would take up to"),
}  # fmt: skip


@pytest.mark.parametrize("what", KEY_FAULTS)
def test_keys_that_are_not_the_plans_are_refused_before_anything_is_computed(
    program: si.Program, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from secureinfer.backends.ckks.client import Client

    place, fault, kind, says = KEY_FAULTS[what]
    inner = Client.evaluation_keys

    def planted(self: Client, *, public: bool) -> list[Any]:
        keys = inner(self, public=public)
        keys[place] = fault(self, keys)
        return keys

    monkeypatch.setattr(Client, "evaluation_keys", planted)
    seen = watched(program)
    before = peak_memory_bytes() or 0
    with seen.pair as pair:
        pair.both(lambda name: pair.engines[name].setup() if name == OWNER else None)
        refused = pair.both(lambda name: pair.engines[name].setup() if name == MODEL else None)[MODEL]
        assert type(refused) is kind and says in str(refused) and OWNER in str(refused), repr(refused)
        assert ("secret key" in refused.for_peer) == (kind is UnsafeError)
        with pytest.raises(SecureInferError, match="not set up"):
            pair.engines[MODEL].run(0, None)
    assert seen.computed == []
    assert (peak_memory_bytes() or 0) - before < 300 << 20


def zero_public_key(client: Any, keys: list[bytearray]) -> bytes:
    """What is encrypted with it is hidden by nothing."""
    key = client.context.api.PublicKey()
    client._generator.create_public_key(key)
    raw = bytearray(uncompressed(key.data()))
    count = 2 * key.data().poly_modulus_degree() * key.data().coeff_modulus_size()
    raw[-8 * count :] = bytes(8 * count)
    return bytes(raw)


PUBLIC = 2
PUBLIC_FAULTS: dict[str, KeyFault] = {
    "no public key": (PUBLIC, lambda c, k: b"", WireError, "no public key"),
    "a public key of zeros": (PUBLIC, zero_public_key, WireError, "hides nothing"),
    "a secret key for a public key": (PUBLIC, secret_key, UnsafeError, "secret key in place of public key"),
    "a ciphertext for a public key": (
        PUBLIC,
        lambda c, k: c.encrypt(np.zeros(4096)),
        WireError,
        "could not be read",
    ),
}


@pytest.mark.parametrize("what", PUBLIC_FAULTS)
def test_a_public_key_for_circuit_privacy_is_one(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    made = si.compile(nn.Linear(4, 2).eval(), (X,), backend="ckks", calibration=[(X,)], circuit_privacy=40)
    monkeypatch.setitem(KEY_FAULTS, what, PUBLIC_FAULTS[what])
    test_keys_that_are_not_the_plans_are_refused_before_anything_is_computed(made, monkeypatch, what)


def test_keys_of_another_session_are_refused(program: si.Program) -> None:
    with Pair(program) as other:
        old = [f.payload for f in other.frames if f.address.phase == "setup"]
    seen = watched(program, tamper=lambda f: old[f.address.value])
    with seen.pair as pair:
        who, error = error_of(pair.both(lambda name: pair.engines[name].setup()))
    assert who == MODEL and type(error) is WireError and "another context" in str(error)
    assert seen.computed == []


def test_keys_are_bound_to_the_program(program: si.Program) -> None:
    """The data owner runs another program of the same shapes and parameters: its keys are not this one's."""
    other = si.Program(
        program.graph, program.plan, backend="ckks", protocol="ckks", options={**program.options, "precision_bits": 17},
        constants=program.constants, weights=program.weights,
    )  # fmt: skip
    with Pair(program, public=other.public(), set_up=False) as pair:
        who, error = error_of(pair.both(lambda name: pair.engines[name].setup()))
    assert who == MODEL and type(error) is WireError and "another context or program" in str(error)


# --- ciphertexts ---


def evaluator(context: Any) -> Any:
    return getattr(context.evaluator, "_inner", context.evaluator)


def fresh(context: Any, secret: Any, *, level: int, scale: float) -> Any:
    plain = context.api.Plaintext()
    context.encoder.encode([0.25] * context.parameters.slots, context.parms[level], scale, plain)
    x = context.new()
    context.api.Encryptor(context.context, secret).encrypt_symmetric(plain, x)
    return x


def of_level(context: Any, secret: Any, level: int) -> Any:
    other = 1 if level == 0 else level - 1
    return fresh(context, secret, level=other, scale=context.parameters.scale)


def of_scale(context: Any, secret: Any, level: int) -> Any:
    return fresh(context, secret, level=level, scale=context.parameters.scale / 2)


def of_almost_that_scale(context: Any, secret: Any, level: int) -> Any:
    """SEAL adds nothing of two scales: it was seen to fail in the middle of a matrix."""
    return fresh(context, secret, level=level, scale=context.parameters.scale * (1 + 1e-12))


def of_no_scale(context: Any, secret: Any, level: int) -> Any:
    x = fresh(context, secret, level=level, scale=context.parameters.scale)
    x.scale = float("nan")
    return x


def of_size_3(context: Any, secret: Any, level: int) -> Any:
    """A product that was not relinearised, whose scale was set right."""
    x, out = fresh(context, secret, level=max(level, 1), scale=context.parameters.scale), context.new()
    x.scale = 2.0**20
    evaluator(context).square(x, out)
    if level == 0:
        evaluator(context).mod_switch_to_inplace(out, context.parms[0])
    out.scale = context.parameters.scale
    return out


def transparent(context: Any, secret: Any, level: int) -> Any:
    """c1 = 0 throughout: c0 is a plaintext for all to read."""
    x = fresh(context, secret, level=level, scale=context.parameters.scale)
    raw = bytearray(uncompressed(x))
    half = 8 * context.parameters.degree * context.parameters.primes_at(level)
    raw[-half:] = bytes(half)
    return bytes(raw)


def uncompressed(x: Any) -> bytes:
    """A ciphertext as SEAL saves it without compression."""
    count = x.size() * x.poly_modulus_degree() * x.coeff_modulus_size()
    array = np.array([x[i] for i in range(count)], dtype=np.uint64)
    body = struct.pack("<4Q", *x.parms_id()) + b"\1"
    body += struct.pack("<QQQdQ", x.size(), x.poly_modulus_degree(), x.coeff_modulus_size(), x.scale, 1)
    inner = envelope(0, 8 + array.nbytes) + struct.pack("<Q", array.size) + array.tobytes()
    return envelope(0, len(body) + len(inner)) + body + inner


def as_plaintext(context: Any, secret: Any, level: int) -> Any:
    plain = context.api.Plaintext()
    context.encoder.encode([0.25], context.parms[level], context.parameters.scale, plain)
    return plain


def as_public_key(context: Any, secret: Any, level: int) -> Any:
    """It is serialised like a ciphertext, at the modulus of keys."""
    key = context.api.PublicKey()
    context.api.KeyGenerator(context.context, secret).create_public_key(key)
    return key


def of_others(context: Any, secret: Any, level: int) -> Any:
    from secureinfer.backends.ckks.context import Context

    p = context.parameters
    other = Context(dataclasses.replace(p, first_bits=p.first_bits + 1))
    key = other.api.KeyGenerator(other.context).secret_key()
    return fresh(other, key, level=level, scale=p.scale)


def residue_too_great(context: Any, secret: Any, level: int) -> bytes:
    raw = bytearray(uncompressed(fresh(context, secret, level=level, scale=context.parameters.scale)))
    raw[-8:] = b"\xff" * 8
    return bytes(raw)


BYTES: dict[str, Callable[[Any, Any, int], Any]] = {
    "of another level": of_level,
    "of another scale": of_scale,
    "of almost that scale": of_almost_that_scale,
    "of no scale": of_no_scale,
    "of size 3": of_size_3,
    "a plaintext in disguise": transparent,
    "a plaintext": as_plaintext,
    "a public key": as_public_key,
    "a secret key": lambda context, secret, level: secret,
    "of other parameters": of_others,
    "with a residue above its prime": residue_too_great,
    "noise": lambda context, secret, level: os.urandom(1000),
    "a single byte": lambda context, secret, level: b"0",
    "nothing": lambda context, secret, level: b"",
}
CUTS: dict[str, Callable[[bytes], bytes]] = {
    "cut by one byte": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "with a byte behind it": lambda data: data + b"0",
    "twice": lambda data: data * 2,
}


def good(context: Any, secret: Any, level: int) -> Any:
    return fresh(context, secret, level=level, scale=context.parameters.scale)


def as_bytes(item: Any) -> bytes:
    return bytes(item) if isinstance(item, bytes | bytearray) else bytes(dumped(item))


HEADER_BYTES = 4 + 16 + 8 + 4 + 4 + 1 + 7


def replaced(program: si.Program, sender: str, make: Callable[[Any, Any, int], bytes]) -> Watched:
    """A pair in which a party sends these bytes, with the header of the ciphertext that belongs there."""
    held: list[Any] = []

    def tamper(frame: Frame) -> bytes:
        if frame.sender != sender or frame.address.phase != "online":
            return frame.payload
        context, secret = seal(held[0].engines[OWNER]._client)
        level = context.parameters.levels if sender == OWNER else 0
        return frame.payload[:HEADER_BYTES] + make(context, secret, level)

    seen = watched(program, tamper=tamper)
    held.append(seen.pair)
    return seen


def refused(seen: Watched, sender: str) -> SecureInferError:
    """What the other party says of a fault, once it is certain that it did nothing with it."""
    with seen.pair as pair:
        set_up(seen)
        who, error = error_of(pair.run(X))
    assert who != sender and sender in str(error), (who, error)
    assert seen.decrypted == [] and (sender == MODEL or seen.computed == [])
    return error


@pytest.mark.parametrize("sender", [OWNER, MODEL])
def test_a_ciphertext_of_ones_own_making_is_taken(program: si.Program, sender: str) -> None:
    """The twin of all below: what is refused there is not refused because of who made it."""
    seen = replaced(program, sender, lambda *given: as_bytes(good(*given)))
    with seen.pair as pair:
        set_up(seen)
        answer = pair.infer(X)[0]
    assert seen.decrypted and seen.computed
    assert sender == OWNER or torch.allclose(answer, torch.full_like(answer, 0.25), atol=1e-3)


@pytest.mark.parametrize("sender", [OWNER, MODEL])
@pytest.mark.parametrize("what", BYTES)
def test_bytes_that_are_no_ciphertext_of_the_plan_are_refused(
    program: si.Program, sender: str, what: str
) -> None:
    error = refused(replaced(program, sender, lambda *given: as_bytes(BYTES[what](*given))), sender)
    assert type(error) is WireError


@pytest.mark.parametrize("sender", [OWNER, MODEL])
@pytest.mark.parametrize("what", CUTS)
def test_bytes_that_are_cut_or_followed_by_others_are_refused(
    program: si.Program, sender: str, what: str
) -> None:
    error = refused(replaced(program, sender, lambda *given: CUTS[what](as_bytes(good(*given)))), sender)
    assert type(error) is WireError


def place(**changes: int) -> Callable[[bytes], bytes]:
    """A frame whose header says something else."""
    from secureinfer.backends.ckks.messages import HEADER, Place

    def change(frame: bytes) -> bytes:
        _, context, inference, ordinal, count, kind = HEADER.unpack(frame[: HEADER.size])
        said = Place(context, inference, kind, ordinal, count)
        wanted = {name: getattr(said, name) + by for name, by in changes.items()}
        return bytes(dataclasses.replace(said, **wanted).pack(frame[HEADER.size :]))

    return change


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "another ordinal": place(ordinal=1),
    "another count": place(count=1),
    "another inference": place(inference=1),
    "another kind": place(kind=5),
    "the other kind": lambda f: place(kind=1)(f) if f[36] == 1 else place(kind=-1)(f),
    "another context": lambda f: f[:4] + os.urandom(16) + f[20:],
    "no magic": lambda f: b"CKS2" + f[4:],
    "a header alone": lambda f: f[:HEADER_BYTES],
    "half a header": lambda f: f[:20],
    "nothing": lambda f: b"",
}


@pytest.mark.parametrize("sender", [OWNER, MODEL])
@pytest.mark.parametrize("what", FRAMES)
def test_a_header_that_names_another_place_is_refused(program: si.Program, sender: str, what: str) -> None:
    def tamper(frame: Frame) -> bytes:
        return (
            FRAMES[what](frame.payload)
            if (frame.sender, frame.address.phase) == (sender, "online")
            else frame.payload
        )

    assert type(refused(watched(program, tamper=tamper), sender)) is WireError


@pytest.fixture(scope="module")
def earlier(program: si.Program) -> Iterator[list[Frame]]:
    """The online frames of a whole session with two inferences."""
    with Pair(program) as pair:
        pair.infer(X)
        pair.infer(X)
        yield [f for f in pair.frames if f.address.phase == "online"]


@pytest.mark.parametrize("sender", [OWNER, MODEL])
def test_a_ciphertext_of_another_session_is_refused(
    program: si.Program, earlier: list[Frame], sender: str
) -> None:
    old = next(f.payload for f in earlier if f.sender == sender)

    def tamper(frame: Frame) -> bytes:
        return old if (frame.sender, frame.address.phase) == (sender, "online") else frame.payload

    error = refused(watched(program, tamper=tamper), sender)
    assert type(error) is WireError and "another context" in str(error)


def replaying(sender: str) -> Callable[[Frame], bytes]:
    """Of all that the sender sends online the first, over and over."""
    sent: list[bytes] = []

    def tamper(frame: Frame) -> bytes:
        if (frame.sender, frame.address.phase) == (sender, "online"):
            sent.append(frame.payload)
            return sent[0]
        return frame.payload

    return tamper


@pytest.mark.parametrize("sender", [OWNER, MODEL])
def test_a_ciphertext_of_an_earlier_inference_is_refused(program: si.Program, sender: str) -> None:
    seen = watched(program, tamper=replaying(sender))
    with seen.pair as pair:
        set_up(seen)
        pair.infer(X)
        before = list(seen.computed), list(seen.decrypted)
        who, error = error_of(pair.run(X))
        assert (
            who != sender and type(error) is WireError and "(inference, kind, ordinal, count)" in str(error)
        )
        assert sender == MODEL or seen.computed == before[0]
        assert seen.decrypted == before[1]


@pytest.mark.parametrize("lowered", [False, True], ids=["as it came", "with the header of an output"])
def test_an_input_that_comes_back_as_the_output_is_refused(program: si.Program, lowered: bool) -> None:
    """Rebound or not, at its own level it is no result. A model owner that lowers it first computes another function than
    it says, which no check of the data owner's can tell (docs/security.md)."""
    inputs: list[bytes] = []

    def tamper(frame: Frame) -> bytes:
        if frame.address.phase != "online":
            return frame.payload
        if frame.sender == OWNER:
            inputs.append(frame.payload)
            return frame.payload
        return frame.payload[:HEADER_BYTES] + inputs[0][HEADER_BYTES:] if lowered else inputs[0]

    assert type(refused(watched(program, tamper=tamper), MODEL)) is WireError


def test_a_party_that_does_not_check_decrypts_what_was_replayed(
    program: si.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: without the binding, the second inference gives the first one's answer, and what watches sees it."""
    from secureinfer.backends.ckks.messages import HEADER, Place

    monkeypatch.setattr(Place, "unpack", lambda self, frame, peer: frame[HEADER.size :])
    seen = watched(program, tamper=replaying(MODEL))
    with seen.pair as pair:
        set_up(seen)
        first, second = pair.infer(X)[0], pair.infer(X / 2)[0]
    assert torch.allclose(first, second, atol=1e-6) and seen.decrypted == ["decrypt", "decrypt"]


# --- an inference that was already run ---


@pytest.mark.parametrize("name", [OWNER, MODEL])
def test_an_index_is_run_once(program: si.Program, name: str) -> None:
    with Pair(program) as pair:
        pair.infer(X)
        with pytest.raises(SecureInferError, match="already run"):
            pair.engines[name].run(0, {program.graph.inputs[0]: X})


# --- parameters ---

WEAK = {
    "a longer modulus": {"levels": 8},
    "a smaller degree": {"degree": 4096},
    "a degree of no use": {"degree": 1024},
    "a degree that is none": {"degree": 8191},
}


@pytest.mark.parametrize("what", WEAK)
@pytest.mark.parametrize("name", [OWNER, MODEL])
def test_parameters_below_128_bits_are_refused_at_both_sides(
    program: si.Program, name: str, what: str
) -> None:
    from secureinfer.backends import make_engine
    from secureinfer.transport.base import Clock

    weak = si.Program(
        program.graph, program.plan, backend="ckks", protocol="ckks", options={**program.options, **WEAK[what]},
        constants=program.constants, weights=program.weights,
    )  # fmt: skip
    with pytest.raises(si.SecureInferError, match="128 bits of security|degree"):
        make_engine(
            name, weak if name == MODEL else weak.public(), me=name, compute_parties=(MODEL, OWNER), dealer="",
            links={}, clock=Clock(), session_id=bytes(16),
        )  # fmt: skip
