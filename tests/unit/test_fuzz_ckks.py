"""Bytes that a CKKS peer sends, changed: read right or refused with a WireError, in bounded time and memory.

Runs in a process of its own, whose peak memory is looked at, since SEAL's memory is not Python's, and which a crash of SEAL
would end. `make test` runs COUNT inputs over all targets, `make test-all` MANY; SECUREINFER_FUZZ=count makes it a fiftieth
of that, and SECUREINFER_FUZZ_SEED=number repeats one. See test_fuzz.py for the rest.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secureinfer.errors import SecureInferError, WireError
from secureinfer.measure.memory import peak_memory_bytes

pytestmark = pytest.mark.needs("he")

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("SECUREINFER_FUZZ", "50000")) // 50
MANY = int(os.environ.get("SECUREINFER_FUZZ", "2000000")) // 50
SEED = int(os.environ.get("SECUREINFER_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
MOST_SECONDS = 2.0
MOST_BYTES = 128 << 20
"""Of one process, beyond what it takes for valid inputs."""

EDGES = [
    0,
    1,
    2,
    3,
    15,
    16,
    17,
    64,
    8191,
    8192,
    8193,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**63,
    2**64 - 1,
]


@dataclass(frozen=True)
class Target:
    """valid: inputs to change. check: reads one; it may raise WireError alone."""

    valid: list[bytes]
    check: Callable[[bytes], object]


def targets() -> dict[str, Target]:
    from secureinfer.backends.ckks.arithmetic import Arithmetic, Keys
    from secureinfer.backends.ckks.client import Client
    from secureinfer.backends.ckks.context import Context
    from secureinfer.backends.ckks.messages import INPUT, Place
    from secureinfer.backends.ckks.params import Parameters
    from secureinfer.backends.ckks.sealed import dump, holds_secret_key, load, load_ciphertext

    context = Context(Parameters(8192, 45, 40, 1, 45))
    client = Client(context, [1])
    keys = [bytes(k) for k in client.evaluation_keys(public=True)]
    kinds = (context.api.RelinKeys, context.api.GaloisKeys, context.api.PublicKey)
    loaded = [
        load(kind(), context.context, key, "keys", "peer") for kind, key in zip(kinds, keys, strict=True)
    ]
    a = Arithmetic(context, Keys(*loaded))
    slots = np.linspace(-1, 1, context.parameters.slots)
    seeded = bytes(client.encrypt(slots))
    x = load_ciphertext(context, seeded, 1, "an input", "peer")
    low = a.lower(x, 0)
    secret = dump(client._generator.secret_key())
    most = max(map(len, keys))

    def evaluated(data: bytes) -> None:
        y = load_ciphertext(context, data, 1, "an input", "peer")
        a.rotate(a.times(a.add(x, y), y), 1)

    def opened(data: bytes) -> None:
        client.decrypt(memoryview(data), "peer")

    def used(kind: Any, data: bytes) -> None:
        key = load(kind(), context.context, data, "keys", "peer", most=most)
        given = [key if isinstance(key, k) else known for k, known in zip(kinds, loaded, strict=True)]
        if given[0].has_key(2) and given[1].has_key(context.element(1)):
            b = Arithmetic(context, Keys(*given))
            b.rotate(b.times(x, x), 1)

    place = Place(bytes(range(16)), 3, INPUT, 2, 5)
    return {
        "frames": Target(
            [bytes(place.pack(b"12345678"))], lambda data: place.unpack(memoryview(data), "peer")
        ),
        "inputs": Target([seeded, bytes(dump(x)), plain(x)], evaluated),
        "results": Target([bytes(dump(low)), plain(low)], opened),
        "relinearisation keys": Target([keys[0], plain_keys(loaded[0])], partial(used, kinds[0])),
        "Galois keys": Target([keys[1], plain_keys(loaded[1])], partial(used, kinds[1])),
        "public keys": Target([keys[2], plain(loaded[2].data())], partial(used, kinds[2])),
        "secret keys": Target(
            [bytes(secret), bytes(keys[0][:100]) + bytes(secret)],
            lambda data: holds_secret_key(context, data),
        ),
    }


def envelope(body: bytes) -> bytes:
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 0, 0, 16 + len(body)) + body


def plain(x: Any) -> bytes:
    """A ciphertext as SEAL saves it without compression, so that a changed byte reaches what is in it."""
    count = x.size() * x.poly_modulus_degree() * x.coeff_modulus_size()
    array = np.array([x[i] for i in range(count)], dtype=np.uint64)
    head = struct.pack("<4Q", *x.parms_id()) + b"\1"
    head += struct.pack("<QQQdQ", x.size(), x.poly_modulus_degree(), x.coeff_modulus_size(), x.scale, 1)
    return envelope(head + envelope(struct.pack("<Q", array.size) + array.tobytes()))


def plain_keys(keys: Any) -> bytes:
    body = struct.pack("<4QQ", *keys.parms_id(), len(keys.data()))
    for row in keys.data():
        body += struct.pack("<Q", len(row)) + b"".join(plain(key.data()) for key in row)
    return envelope(body)


def changed(data: bytes, chance: random.Random) -> bytes:
    """One to three changes: of bits and bytes, mostly in what describes the rest; of lengths; of the ends."""
    raw = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw)) if chance.random() < 0.3 else chance.randrange(min(len(raw), 160))
        kind = chance.choice(
            ["bit", "byte", "number", "insert", "delete", "cut", "grow", "mode", "size", "zeros"]
        )
        if kind == "bit":
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            raw[at] = chance.randrange(256)
        elif kind == "number":
            raw[at : at + 8] = struct.pack("<Q", chance.choice(EDGES))[: len(raw) - at]
        elif kind == "insert":
            raw[at:at] = chance.randbytes(chance.randint(1, 9))
        elif kind == "delete":
            del raw[at : at + chance.randint(1, 9)]
        elif kind == "cut":
            del raw[at:]
        elif kind == "grow":
            raw += chance.randbytes(chance.choice([1, 8, 100]))
        elif kind == "mode" and len(raw) > 5:
            raw[5] = chance.choice([0, 1, 2, 3, 255])
        elif (
            kind == "size" and len(raw) >= 16
        ):  # the envelope says what is there, so that SEAL gets to see it
            raw[8:16] = struct.pack("<Q", len(raw))
        elif kind == "zeros":
            raw[at:] = bytes(len(raw) - at)
        if not raw:
            break
    if chance.random() < 0.5 and len(raw) >= 16:
        raw[8:16] = struct.pack("<Q", len(raw))
    return bytes(raw)


def run(name: str, count: int, seed: int) -> int:
    """How many inputs were refused."""
    target = targets()[name]
    for valid in target.valid:  # the twin: what is refused below is refused for its change
        target.check(valid)
    chance, refused, before = random.Random(seed), 0, peak_memory_bytes()
    for i in range(count):
        data = changed(chance.choice(target.valid), chance)
        start = time.thread_time()
        try:
            target.check(data)
        except WireError as error:
            refused += 1
            text = f"{error}{error.for_peer}"
            assert "peer" in str(error) and "Traceback" not in text and 'File "' not in text
        except Exception as error:
            raise AssertionError(f"input {i} of seed {seed}: {type(error).__name__}: {error}") from error
        assert time.thread_time() - start < MOST_SECONDS, f"input {i} of seed {seed} took too long"
        assert peak_memory_bytes() - before < MOST_BYTES, f"input {i} of seed {seed} took too much memory"
    return refused


def apart(code: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, of which a crash is an end by a signal."""
    start = "from tests.unit import test_fuzz_ckks as fuzz\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, cwd=ROOT, timeout=timeout
    )


NAMES = [
    "frames", "inputs", "results", "relinearisation keys", "Galois keys", "public keys", "secret keys",
]  # fmt: skip


def fuzz(count: int, timeout: float) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and refused ones of each target."""
    each = max(1, count // len(NAMES))
    code = f"for name in fuzz.NAMES: print(fuzz.run(name, {each}, {SEED}), flush=True)"
    done = apart(code, timeout)
    assert done.returncode == 0, f"seed {SEED}, status {done.returncode}: {done.stderr[-2000:]}"
    return zip(NAMES, [each] * len(NAMES), map(int, done.stdout.split()), strict=True)


def test_changed_bytes_are_refused_with_a_wire_error() -> None:
    for name, count, refused in fuzz(COUNT, 120):
        assert count < 100 or name == "secret keys" or refused > count // 3, name


@pytest.mark.slow
def test_many_changed_bytes_are_refused_with_a_wire_error() -> None:
    for name, count, refused in fuzz(MANY, 3600):
        assert count < 100 or name == "secret keys" or refused > count // 3, name


# --- the twins: what these checks would find ---

PLANTED = {
    "another exception": (
        "def check(data): raise RuntimeError('from SEAL')",
        "RuntimeError: from SEAL",
    ),
    "memory": ("def check(data): return bytearray(b'x' * (300 << 20))", "took too much memory"),
    "time": (
        "def check(data):\n  import time\n  stop = time.thread_time() + 2.1\n  while time.thread_time() < stop: pass",
        "took too long",
    ),
    "a crash": (
        "def check(data):\n  import os, signal\n  os.kill(os.getpid(), signal.SIGSEGV)",
        "status -11",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_parser_with_a_planted_fault_fails(what: str) -> None:
    code, says = PLANTED[what]
    code += (
        "\nseen = []\n"
        "def first(data): seen.append(data); return check(data) if len(seen) > 1 else None\n"
        "fuzz.targets = lambda: {'it': fuzz.Target([bytes(100)], first)}\n"
        "fuzz.run('it', 3, 0)\n"
    )
    done = apart(code, 60)
    assert done.returncode != 0 and says in f"{done.stderr} status {done.returncode}"


# --- what fuzzing found, and what was looked for by hand ---


def test_keys_that_grow_when_they_are_unpacked_are_refused_before_they_are() -> None:
    """Zeros of any length are three bytes to Zstandard: SEAL would take gigabytes for this megabyte."""
    from secureinfer.backends.ckks.sealed import check_envelope, inflated

    blocks = b"".join(((1 << 17) << 3 | 2).to_bytes(3, "little") + b"\0" for _ in range(30_000))
    payload = b"\x28\xb5\x2f\xfd\x00\x68" + blocks + b"\1\0\0"
    data = struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 2, 0, 16 + len(payload)) + payload
    assert inflated(memoryview(data)) == 30_000 << 17
    with pytest.raises(WireError, match="would take up to"):
        check_envelope(data, "Galois keys", "peer", most=1 << 20)
    check_envelope(data, "Galois keys", "peer", most=30_000 << 17)


def test_what_the_bound_says_is_no_less_than_what_there_is() -> None:
    made = targets()
    from secureinfer.backends.ckks.sealed import SPLIT, inflated

    for name in ("inputs", "results", "relinearisation keys", "Galois keys", "public keys"):
        *packed, unpacked = made[name].valid
        for data in packed:
            seeded = name != "results" and name != "public keys" and data is not (packed[1:] or [None])[0]
            real = len(unpacked) // (2 if seeded else 1)
            assert real * 0.98 < inflated(memoryview(data)) < SPLIT * real, name


@pytest.mark.parametrize("mode", [1, 3, 255])
def test_a_compression_that_we_do_not_write_is_refused(mode: int) -> None:
    from secureinfer.backends.ckks.sealed import check_envelope

    data = struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, mode, 0, 20) + b"1234"
    with pytest.raises(SecureInferError, match="no envelope"):
        check_envelope(data, "keys", "peer")
