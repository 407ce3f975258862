"""The secret key stays at the data owner, and nothing that depends on what it decrypts goes back (rule K2).

All frames of a session are searched for the key: as bytes of any form, as an object of SEAL, and as a polynomial inside of
keys and ciphertexts. The twins are engines that leak it, one way each.
"""

from __future__ import annotations

import contextlib
import re
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.errors import SessionError

from .ckks_pair import MODEL, OWNER, Frame, Pair

pytestmark = pytest.mark.needs("he")

X = torch.rand(1, 4, generator=torch.Generator().manual_seed(8))
KEYS_HEAD, CIPHERTEXT_HEAD = 4 + 16, 4 + 16 + 8 + 4 + 4 + 1 + 7
WINDOW = 24
"""Bytes: more than any two different secrets have in common by chance."""


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * h)


@pytest.fixture(scope="module")
def program() -> si.Program:
    calibration = [(torch.rand(1, 4),) for _ in range(8)]
    return si.compile(Squares().eval(), (X,), backend="ckks", calibration=calibration)


# --- what the key looks like ---


def residues(plain: Any, degree: int) -> npt.NDArray[np.uint64]:
    """[primes, degree]: of a polynomial, as SEAL keeps it (number-theoretic transform)."""
    return np.array([plain.data(i) for i in range(plain.coeff_count())], dtype=np.uint64).reshape(-1, degree)


class Secret:
    """A data owner's key, from inside of its process, in every form in which it could leave."""

    def __init__(self, client: Any) -> None:
        from secureinfer.backends.ckks.sealed import dump

        self.context = client.context
        key = client._generator.secret_key()
        degree = self.context.parameters.degree
        self.residues = residues(key.data(), degree)
        chain = self.context.context.key_context_data().parms().coeff_modulus()
        self.primes = [m.value() for m in chain]
        ternary = inverse_ntt(self.residues[0], self.primes[0])
        assert set(np.unique(ternary)) == {-1, 0, 1}
        self.forms: dict[str, bytes] = {
            "serialised": bytes(dump(key)),
            "residues": self.residues.tobytes(),
            "coefficients, a byte each": ternary.astype(np.int8).tobytes(),
            "coefficients, 64 bits each": ternary.astype(np.int64).tobytes(),
            "coefficients, floats": ternary.astype(np.float64).tobytes(),
            "coefficients, two bits each": packed(ternary),
            "coefficients modulo the first prime": (ternary % self.primes[0]).astype(np.uint64).tobytes(),
        }

    def as_bytes(self, data: bytes) -> set[str]:
        """Forms of which a part stands in the data, wherever it begins."""
        found = set()
        for form, raw in self.forms.items():
            start = raw.find(b"\1") if "coefficients" in form else 0
            pieces = (raw[at : at + WINDOW * 8] for at in range(max(0, start), len(raw), len(raw) // 16))
            if any(len(piece) >= WINDOW and piece in data for piece in pieces):
                found.add(form)
        return found

    def as_object(self, data: bytes) -> bool:
        from secureinfer.backends.ckks.sealed import holds_secret_key

        return holds_secret_key(self.context, data)

    def as_polynomial(self, x: Any) -> bool:
        """Whether a component of a ciphertext, or of a key, is the key or its negative."""
        degree, primes = x.poly_modulus_degree(), x.coeff_modulus_size()
        for component in range(x.size()):
            at = component * degree * primes
            first = np.array([x[at + i] for i in range(64)], dtype=np.uint64)
            key = self.residues[0, :64]
            if np.array_equal(first, key) or np.array_equal(first, np.uint64(self.primes[0]) - key):
                return True
        return False


def packed(ternary: npt.NDArray[np.int64]) -> bytes:
    bits = (ternary % 3).astype(np.uint8).reshape(-1, 4)
    return (bits << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(1).astype(np.uint8).tobytes()


def inverse_ntt(values: npt.NDArray[np.uint64], prime: int) -> npt.NDArray[np.int64]:
    """Coefficients, centred, of a polynomial's values in the odd powers of SEAL's root of unity, in its order.

    SEAL takes the smallest primitive root, and keeps the value at psi^(2 br(i) + 1) in place i, br for reversed bits.
    """
    n = len(values)
    bits = n.bit_length() - 1
    psi = smallest_root(prime, 2 * n)
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(n)]
    natural = [0] * n  # at psi^(2 k + 1)
    for i, value in enumerate(values.tolist()):
        natural[order[i]] = value
    spectrum = inverse_fft(natural, pow(psi, 2, prime), prime)
    inverse, power, out = pow(psi, -1, prime), 1, []
    for value in spectrum:
        c = value * power % prime
        out.append(c - prime if c > prime // 2 else c)
        power = power * inverse % prime
    return np.array(out, dtype=np.int64)


def smallest_root(prime: int, order: int) -> int:
    """Of the primitive roots of unity of that order, a power of two."""
    g = next(g for g in range(2, 1000) if pow(g, (prime - 1) // 2, prime) == prime - 1)
    root = pow(g, (prime - 1) // order, prime)
    square, best = root * root % prime, root
    current = root
    for _ in range(order // 2):
        current = current * square % prime
        best = min(best, current)
    return best


def inverse_fft(values: list[int], root: int, prime: int) -> list[int]:
    """c_j = 1/n sum_k values_k root^(-jk)."""

    def step(part: list[int], w: int) -> list[int]:
        if len(part) == 1:
            return part
        even, odd = step(part[::2], w * w % prime), step(part[1::2], w * w % prime)
        half, power, out = len(even), 1, [0] * len(part)
        for i in range(half):
            t = power * odd[i] % prime
            out[i], out[i + half] = (even[i] + t) % prime, (even[i] - t) % prime
            power = power * w % prime
        return out

    inverse = pow(len(values), -1, prime)
    return [v * inverse % prime for v in step(values, pow(root, -1, prime))]


# --- the search ---


def leaks(frames: list[Frame], secret: Secret) -> set[str]:
    """What of the key is in the frames of a session."""
    found = set()
    for frame in frames:
        found |= secret.as_bytes(frame.payload)
        if secret.as_object(frame.payload):
            found.add("an object")
        if any(secret.as_polynomial(x) for x in components(frame, secret.context)):
            found.add("a polynomial")
    return found


def components(frame: Frame, context: Any) -> Iterator[Any]:
    """Everything of SEAL in a frame, which is one object and nothing behind it."""
    from secureinfer.backends.ckks.sealed import load

    api = context.api
    if frame.address.phase == "setup":
        kind = (api.RelinKeys, api.GaloisKeys, api.PublicKey)[frame.address.value]
        key = load(kind(), context.context, frame.payload[KEYS_HEAD:], "keys", frame.sender)
        rows = [[key]] if kind is api.PublicKey else key.data()
        yield from (part.data() for row in rows for part in row)
    elif frame.address.phase == "online" and frame.payload:
        yield load(
            context.new(), context.context, frame.payload[CIPHERTEXT_HEAD:], "a ciphertext", frame.sender
        )


def session(program: si.Program, *inputs: torch.Tensor, **settings: Any) -> tuple[list[Frame], Secret]:
    with Pair(program, **settings) as pair:
        secret = Secret(pair.engines[OWNER]._client)
        for x in inputs:
            pair.infer(x)
        return pair.frames, secret


def test_the_key_that_is_looked_for_is_the_key(program: si.Program) -> None:
    """Its coefficients, found from the outside, decrypt."""
    with Pair(program) as pair:
        client = pair.engines[OWNER]._client
        secret, context = Secret(client), client.context
        from secureinfer.backends.ckks.sealed import load_ciphertext

        sent = client.encrypt(np.full(context.parameters.slots, 0.5))
        x = load_ciphertext(context, sent, context.parameters.levels, "x", "x")
        degree, prime = context.parameters.degree, secret.primes[0]
        at = degree * x.coeff_modulus_size()
        c0, c1 = (np.array([x[start + i] for i in range(degree)], dtype=object) for start in (0, at))
        message = (c0 + c1 * secret.residues[0].astype(object)) % prime
        values = inverse_ntt(message.astype(np.uint64), prime)
        assert abs(values[0] / context.parameters.scale - 0.5) < 1e-3  # a constant
        assert np.abs(values[1:]).max() < 1e-3 * context.parameters.scale


@pytest.mark.parametrize("privacy", [0, 40])
def test_no_frame_of_a_session_holds_the_secret_key(program: si.Program, privacy: int) -> None:
    made = program
    if privacy:
        calibration = [(torch.rand(1, 4),) for _ in range(8)]
        made = si.compile(
            nn.Linear(4, 2).eval(), (X,), backend="ckks", calibration=calibration, circuit_privacy=40
        )
    frames, secret = session(made, X, X / 2)
    assert len([f for f in frames if f.address.phase == "setup"]) == (3 if privacy else 2)
    assert leaks(frames, secret) == set()


def test_each_session_has_a_key_of_its_own(program: si.Program) -> None:
    keys = [session(program)[1].residues for _ in range(2)]
    assert not np.array_equal(*keys)


# --- the twins ---


def in_place_of_keys(client: Any, keys: list[Any]) -> list[Any]:
    from secureinfer.backends.ckks.sealed import dump

    return [keys[0], dump(client._generator.secret_key())]


def behind_the_keys(client: Any, keys: list[Any]) -> list[Any]:
    return [keys[0], keys[1] + bytes(Secret(client).forms["coefficients, two bits each"])]


LEAKS: dict[str, tuple[Callable[[Any, list[Any]], list[Any]], str]] = {
    "in place of keys": (in_place_of_keys, "an object"),
    "behind the keys": (behind_the_keys, "coefficients, two bits each"),
}


@pytest.mark.parametrize("what", LEAKS)
def test_an_engine_that_sends_its_key_with_the_others_is_found(
    program: si.Program, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from secureinfer.backends.ckks.client import Client

    inner, (fault, form) = Client.evaluation_keys, LEAKS[what]
    monkeypatch.setattr(
        Client, "evaluation_keys", lambda self, *, public: fault(self, inner(self, public=public))
    )
    with Pair(program, set_up=False) as pair:
        pair.both(lambda name: pair.engines[name].setup() if name == OWNER else None)
        secret = Secret(pair.engines[OWNER]._client)
        frame = pair.frames[1]
        assert form in secret.as_bytes(frame.payload) | (
            {"an object"} if secret.as_object(frame.payload) else set()
        )


@pytest.mark.parametrize(
    "form",
    [
        "residues",
        "coefficients, a byte each",
        "coefficients, 64 bits each",
        "coefficients, floats",
        "serialised",
    ],
)
def test_a_key_in_a_ciphertexts_frame_is_found_in_any_form(program: si.Program, form: str) -> None:
    frames, secret = session(program)
    planted = Frame(OWNER, frames[0].address, b"head" + secret.forms[form][100:] + b"tail")
    assert form in secret.as_bytes(planted.payload)
    other = session(program)[1]
    assert other.as_bytes(planted.payload) == set()


def test_a_key_that_stands_in_place_of_a_ciphertexts_randomness_is_found(program: si.Program) -> None:
    """c1 = s: a well-formed ciphertext, compressed, in which no search for bytes finds anything."""
    from secureinfer.backends.ckks.sealed import dump, load

    with Pair(program) as pair:
        client = pair.engines[OWNER]._client
        secret, context = Secret(client), client.context
        degree, levels = context.parameters.degree, context.parameters.primes_at(context.parameters.levels)
        array = np.concatenate([np.zeros_like(secret.residues[:levels]), secret.residues[:levels]]).tobytes()
        parms = context.context.first_parms_id()
        head = struct.pack("<4Q", *parms) + b"\1" + struct.pack("<QQQdQ", 2, degree, levels, 1.0, 1)
        inner = envelope(struct.pack("<Q", len(array) // 8) + array)
        x = load(context.new(), context.context, envelope(head + inner), "x", "x")
        frame = Frame(OWNER, pair_address(), bytes(CIPHERTEXT_HEAD) + bytes(dump(x)))
        assert "a polynomial" in leaks([frame], secret)


def envelope(body: bytes) -> bytes:
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 0, 0, 16 + len(body)) + body


def pair_address() -> Any:
    from secureinfer.transport.base import Address

    return Address("online", 0, 1, 0)


# --- the end of a key ---


def reachable(start: Any) -> Iterator[Any]:
    """All objects that an engine refers to, through attributes and containers of our own and of Python."""
    todo, seen = [start], set()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        elif type(item).__module__.startswith(("secureinfer", "tests")):
            todo.append(vars(item) if hasattr(item, "__dict__") else ())


HOLDS_A_KEY = ("SecretKey", "KeyGenerator", "Decryptor")


def holders(engine: Any) -> list[str]:
    return sorted({type(o).__name__ for o in reachable(engine)} & {*HOLDS_A_KEY})


def test_nothing_refers_to_the_key_after_the_end(program: si.Program) -> None:
    with Pair(program) as pair:
        pair.infer(X)
        engine = pair.engines[OWNER]
        client = engine._client
        assert holders(engine) == ["Decryptor", "KeyGenerator"]  # the twin
        assert holders(pair.engines[MODEL]) == []
        engine.close()
        assert holders(engine) == holders(client) == []
        assert engine._client is None
        for call in (
            lambda: client.encrypt(np.zeros(4096)),
            lambda: client.decrypt(memoryview(b"x"), MODEL),
            lambda: client.evaluation_keys(public=False),
            lambda: engine.run(1, {program.graph.inputs[0]: X}),
        ):
            with pytest.raises(SessionError, match="closed"):
                call()


CHILD = """
import gc, sys
from tests.conformance.test_ckks_secrets import OWNER, X, Pair, Squares, si, torch

program = si.compile(Squares().eval(), (X,), backend="ckks", calibration=[(torch.rand(1, 4),)])
pair = Pair(program)
client = pair.engines[OWNER]._client

def told():  # in a form that is not the key's own, so that none of this is found
    key = client._generator.secret_key()
    print(*(key.data().data(i) ^ (1 << 64) - 1 for i in range(3000, 3016)), flush=True)

told()
pair.infer(X)
gc.collect()
for end in (lambda: None, pair.engines[OWNER].close):
    end()
    print("now", flush=True)
    sys.stdin.readline()
"""


def in_memory(pid: int, needle: bytes) -> int:
    """How often bytes stand in another process's memory."""
    found = 0
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for start, end in re.findall(
            r"^([0-9a-f]+)-([0-9a-f]+) rw", Path(f"/proc/{pid}/maps").read_text(), re.M
        ):
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(int(start, 16))
                found += memory.read(int(end, 16) - int(start, 16)).count(needle)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory")
def test_the_key_is_erased_from_memory_at_the_end() -> None:
    """Found while the session lasts, which is the twin; and after it not once."""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        needle = b"".join(struct.pack("<Q", int(v) ^ (1 << 64) - 1) for v in child.stdout.readline().split())
        assert len(needle) == 128 and len(set(needle)) > 32
        seen = []
        for _ in range(2):
            assert child.stdout.readline() == "now\n"
            try:
                seen.append(in_memory(child.pid, needle))
            except PermissionError:
                pytest.skip("this system lets no process read another's memory")
            child.stdin.write("\n")
            child.stdin.flush()
        assert seen[0] > 0 and seen[1] == 0, seen
    finally:
        child.kill()
        child.communicate()


# --- what goes back ---


def traffic(program: si.Program, *inputs: torch.Tensor) -> tuple[list[tuple[str, Any]], list[int]]:
    """Sender and address of each frame, and its length."""
    frames, _ = session(program, *inputs)
    return [(f.sender, f.address) for f in frames], [len(f.payload) for f in frames]


def test_two_inputs_give_the_same_traffic(program: si.Program) -> None:
    first, lengths = traffic(program, X, torch.zeros_like(X))
    second, others = traffic(program, X.flip(1), torch.ones_like(X))
    assert first == second
    np.testing.assert_allclose(
        lengths, others, rtol=0.01
    )  # SEAL compresses random bytes, by a few more or less
    assert (
        first[-1][0] == MODEL and sum(sender == MODEL for sender, _ in first) == 2
    )  # nothing follows a result


def test_an_engine_that_asks_again_for_a_great_result_is_seen(
    program: si.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: a retry that depends on what was decrypted."""
    from secureinfer.backends.ckks import data_owner

    inner = data_owner._split

    def split(graph: Any, values: Any) -> Any:
        if values[0, 0] > threshold:
            pair.links[OWNER].send(pair_address(), b"again")
        return inner(graph, values)

    with torch.no_grad():
        answers = [float(Squares()(x)[0, 0]) for x in (X, torch.ones_like(X))]
    threshold = sum(answers) / 2
    monkeypatch.setattr(data_owner, "_split", split)
    sent = []
    for x in (X, torch.ones_like(X)):
        with Pair(program) as pair:
            pair.infer(x)
            sent.append([(f.sender, f.address) for f in pair.frames])
    assert sent[0] != sent[1]


def test_lengths_tell_nothing_of_values(program: si.Program) -> None:
    """Of the input's own ciphertexts: those of small values are as long as those of great ones."""
    with Pair(program) as pair:
        client = pair.engines[OWNER]._client
        slots = np.ones(client.context.parameters.slots)
        lengths = [len(client.encrypt(v)) for _ in range(20) for v in (slots, 1e-3 * slots, 0 * slots)]
    by_value = np.array(lengths).reshape(-1, 3)
    spread = by_value.std()
    assert np.ptp(by_value.mean(0)) < 6 * spread / np.sqrt(20) + 1


# --- repr, errors ---


def test_objects_that_hold_secrets_do_not_print_them(program: si.Program) -> None:
    with Pair(program) as pair:
        engine, client = pair.engines[OWNER], pair.engines[OWNER]._client
        secret = Secret(client)
        pair.infer(X)
        shown = " ".join(repr(o) for o in reachable(engine) if not isinstance(o, dict | list | tuple | set))
        for form, raw in secret.forms.items():
            assert raw[:WINDOW].hex() not in shown, form
        values = [f"{float(v):.6g}" for v in pair.infer(X)[0].reshape(-1)]
        assert not any(v in shown for v in values)


# --- what the public part of a program tells ---


def public_part(scale: float, **options: Any) -> si.Program:
    """Of a model whose weights are all so much greater."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter.copy_(scale * torch.rand(parameter.shape, generator=generator))
    calibration = [(X.roll(i, 1),) for i in range(4)]
    return si.compile(model, (X,), backend="ckks", calibration=calibration, **options).public()


@pytest.mark.parametrize("options", [{}, {"circuit_privacy": 40}], ids=["bare", "private"])
def test_the_public_part_is_the_same_for_other_weights(options: dict[str, Any]) -> None:
    """Else whoever has it could test guesses of the weights: ranges and noise are rounded."""
    first, second = (public_part(scale, **options) for scale in (1.0, 1.000001))
    assert first.manifest_digest == second.manifest_digest


def test_a_figure_with_all_its_digits_would_tell_weights_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from secureinfer.backends.ckks import lowering

    monkeypatch.setattr(lowering, "_rounded", lambda error: error)
    first, second = (public_part(scale) for scale in (1.0, 1.000001))
    assert first.manifest_digest != second.manifest_digest
    assert first.options["noise"] == pytest.approx(second.options["noise"], rel=1e-3)
