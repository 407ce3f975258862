"""The model owner's engine: it computes on ciphertexts that it cannot open, with weights that are encoded once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ProgramFileError, SessionError, UnsafeError, WireError
from ...graph.ir import Graph, Node
from ...transport.base import Address
from .arithmetic import Arithmetic, Ciphertext, Keys
from .catalog import ciphertext_bytes, key_bytes
from .common import STEP, CkksEngine, Common
from .messages import INPUT, KEYS, KEYS_MAGIC, OUTPUT
from .noise import PRIVACY, PRIVACY_MARGIN
from .pool import Blob, Pool
from .reading import Packing
from .sealed import check_envelope, dump, holds_secret_key, load, load_ciphertext
from .server import Matrix, Polynomial, Privacy, SpreadMatrix

KEY_NAMES = ("relinearisation keys", "Galois keys", "public key")


class ModelOwnerEngine(CkksEngine):
    """Its weights are encoded, here and in the processes that share the work, before the keys arrive."""

    def __init__(self, common: Common, me: str, processes: int) -> None:
        super().__init__(common)
        program = common.program
        if program.weights is None:
            raise ProgramFileError(
                "the model owner needs the program with its weights, and this is the public part"
            )
        self._arithmetic: Arithmetic | None = None
        self._keys: Keys | None = None
        self._encryptor: Any = None
        self._pool = Pool(common.parameters, processes, me)
        self._matrices: dict[str, Matrix | SpreadMatrix] = {}
        self._polynomials: dict[str, Polynomial] = {}
        self._encode()

    def _encode(self) -> None:
        c = self._common
        context, p, weights = c.context, c.parameters, c.program.weights or {}
        scales, late = {"inputs": p.scale}, bool(c.program.options.get("late_rescaling", False))
        for node in c.program.graph.nodes:
            level = node.attrs.get("level")
            if node.op == "linear" and type(level) is int:
                matrix = weights[node.inputs[1]].double().numpy()
                bias = weights[node.inputs[2]].double().numpy() if len(node.inputs) > 2 else None
                base = str(node.attrs["base"])
                pool = self._pool
                if c.packing.spread:
                    self._matrices[node.name] = SpreadMatrix(
                        context,
                        matrix,
                        bias,
                        level,
                        p.scale,
                        scales[base],
                        first=base == "inputs",
                        pool=pool,
                        serial=node.name,
                    )
                else:
                    plan = c.packing.plans[node.name]
                    self._matrices[node.name] = Matrix(
                        context,
                        plan,
                        matrix,
                        bias,
                        level,
                        p.scale,
                        scales[base],
                        late=late,
                        pool=pool,
                        serial=node.name,
                    )
            elif node.op == "polynomial" and type(level) is int:
                coefficients = [float(v) for v in node.attrs["coefficients"]]
                polynomial = Polynomial(coefficients, int(node.attrs["depth"]))
                self._polynomials[node.name] = polynomial
                scales[node.name] = polynomial.result_scale(context, level, p.scale)

    def setup(self) -> None:
        c, context = self._common, self._common.context
        galois_count = len(c.packing.steps())
        limit = key_bytes(c.parameters, galois_count, public=c.private)
        names = KEY_NAMES if c.private else KEY_NAMES[:2]
        frames = [c.link.receive(Address("setup", 0, 0, i), limit=limit) for i in range(len(names))]
        heads = {bytes(f[: KEYS.size]) for f in frames}
        parts = [f[KEYS.size :] for f in frames]
        c.bind(list(parts))
        if heads != {KEYS.pack(KEYS_MAGIC, c.context_id)}:
            raise WireError(
                f"{c.link.peer}: evaluation keys of another context or program",
                public_detail="evaluation keys",
            )
        api, peer = context.api, c.link.peer
        kinds = (api.RelinKeys, api.GaloisKeys, api.PublicKey)
        given = list(zip(names, kinds, parts, strict=False))
        with _secret_keys_refused(c, dict(zip(names, parts, strict=True))):
            for name, _, part in given:
                if len(part):
                    check_envelope(part, name, peer, most=limit)  # before any process unpacks it
            self._pool.keys(*parts[:2])  # they load side by side with this process
            loaded = [
                load(kind(), context.context, part, name, peer) if len(part) else None
                for name, kind, part in given
            ]
            self._check_keys(*loaded)
        self._keys = Keys(*loaded)
        self._arithmetic = Arithmetic(context, self._keys)
        if c.private:
            self._encryptor = api.Encryptor(context.context, self._keys.public)
        self._pool.wait()

    def _check_keys(self, relinearisation: Any, galois: Any, public: Any = None) -> None:
        """Exactly those of the plan: others would take memory, and without one of them SEAL fails in the middle."""
        context, steps, peer = self._common.context, self._common.packing.steps(), self._common.link.peer
        if relinearisation is None or not relinearisation.has_key(2) or relinearisation.size() != 1:
            raise WireError(f"{peer}: no relinearisation keys", public_detail="relinearisation keys")
        missing = [s for s in steps if galois is None or not galois.has_key(context.element(s))]
        if missing:
            raise WireError(
                f"{peer}: {len(missing)} Galois keys of the plan are missing", public_detail="Galois keys"
            )
        if galois is not None and galois.size() != len(steps):
            raise WireError(
                f"{peer}: {galois.size()} Galois keys, where the plan has {len(steps)} rotations",
                public_detail="Galois keys",
            )
        if self._common.private and (public is None or public.data().is_transparent()):
            raise WireError(f"{peer}: no public key, or one that hides nothing", public_detail="public key")

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> None:
        c, a = self._common, self._arithmetic
        if a is None:
            raise SessionError("this engine is not set up, or closed")
        self._burn(index)
        self._times = {}
        packing = c.packing
        for group in range(packing.groups):
            results = self._group(a, index, group)
            if c.private:
                self._hide(a, results, group)
            self._send(index, group, results)

    def _receive(self, a: Arithmetic, index: int, ordinal: int, count: int) -> tuple[Ciphertext, memoryview]:
        c = self._common
        limit = ciphertext_bytes(c.parameters, c.parameters.levels, seeded=False)
        frame = c.link.receive(Address("online", index, STEP, ordinal), limit=limit)
        data = c.place(index, INPUT, ordinal, count).unpack(frame, c.link.peer)
        x = load_ciphertext(a.context, data, c.parameters.levels, "an input", c.link.peer)
        return x, data

    def _group(self, a: Arithmetic, index: int, group: int) -> list[Ciphertext]:
        """The outputs of one sample, or of as many as there are slots."""
        c = self._common
        packing, graph = c.packing, c.program.graph
        count, first = packing.groups * packing.sent, group * packing.sent
        values: dict[str, list[Ciphertext]] = {}
        inputs = _Inputs(lambda i: self._receive(a, index, first + i, count), packing.sent, _readers(graph))
        for step in c.program.plan.steps[1:-1]:
            start, node = time.perf_counter(), step.node
            values[node.outputs[0]] = self._node(a, node, values, inputs)
            self._times[step.index] = self._times.get(step.index, 0.0) + time.perf_counter() - start
        return values[_output_edge(graph)]

    def _node(
        self, a: Arithmetic, node: Node, values: Mapping[str, list[Ciphertext]], inputs: _Inputs
    ) -> list[Ciphertext]:
        if node.op == "linear":
            work = self._matrices[node.name]
            from_inputs = node.attrs["base"] == "inputs"
            if isinstance(work, SpreadMatrix):
                return work.apply(
                    a, iter(inputs) if from_inputs else ((x, None) for x in values[node.inputs[0]])
                )
            return work.apply(a, *inputs.all()) if from_inputs else work.apply(a, values[node.inputs[0]])
        if node.op == "add":
            left, right = (values[e] for e in node.inputs)
            return [_sum(a, x, y) for x, y in zip(left, right, strict=True)]
        if node.op == "polynomial":
            return self._polynomials[node.name].apply(a, values[node.inputs[0]])
        given = values.get(node.inputs[0], [])
        if node.op == "avg_pool2d" and self._common.packing.spread:
            return _window_sums(a, given, self._common.program.graph, node)
        return given  # reshapes; and poolings over slots, which the matrix after them does

    def _hide(self, a: Arithmetic, results: list[Ciphertext], group: int) -> None:
        c = self._common
        noise = float(c.program.options["noise"]) * 2.0 ** (PRIVACY + PRIVACY_MARGIN)
        head = c.parameters.first_bits - c.parameters.scale_bits
        Privacy(noise, 2.0 ** (head - 3)).hide(a, self._encryptor, results, _read(c.packing, group))

    def _send(self, index: int, group: int, results: list[Ciphertext]) -> None:
        c = self._common
        count = c.packing.groups * c.packing.returned
        step = len(c.program.plan.steps) - 1
        start = time.perf_counter()
        for i, x in enumerate(results):
            ordinal = group * c.packing.returned + i
            x.scale = c.parameters.scale
            place = c.place(index, OUTPUT, ordinal, count)
            c.link.send(Address("online", index, step, ordinal), place.pack(dump(x)))
        self._times[step] = self._times.get(step, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        self._arithmetic = self._keys = self._encryptor = None
        self._matrices, self._polynomials = {}, {}
        self._pool.close()


def _read(packing: Packing, group: int) -> list[npt.NDArray[np.bool_]]:
    """Of each result, the slots that are read: of further copies of a value, and of samples that are not there, none. Their
    noise would be drawn anew, and the mean of them all has less.
    """
    slots = packing.parameters.slots
    if packing.outputs is None:
        return [np.arange(slots) < packing.batch - group * slots] * packing.returned
    read = np.zeros(packing.returned * slots, dtype=bool)
    read[packing.outputs.places()] = True
    return list(read.reshape(-1, slots))


@contextlib.contextmanager
def _secret_keys_refused(c: Common, parts: Mapping[str, memoryview]) -> Iterator[None]:
    """Where keys cannot be used, say so if one of them is a secret key: whose it is must know."""
    try:
        yield
    except WireError:
        name = next((n for n, part in parts.items() if holds_secret_key(c.context, part)), None)
        if name is None:
            raise
        raise UnsafeError(
            f"{c.link.peer} sent a secret key in place of {name}: whoever holds it reads every input. It was not used; "
            "its owner must make a new one",
            public_detail="a secret key was sent",
        ) from None


class _Inputs:
    """The ciphertexts of one group, as they arrive; kept if more than one matrix reads them."""

    def __init__(
        self, receive: Callable[[int], tuple[Ciphertext, memoryview]], count: int, readers: int
    ) -> None:
        self._receive = receive
        self._count = count
        self._readers = readers
        self._kept: list[tuple[Ciphertext, memoryview]] = []

    def __iter__(self) -> Iterator[tuple[Ciphertext, Blob | None]]:
        if self._kept:
            yield from self._kept
            return
        for i in range(self._count):
            item = self._receive(i)
            if self._readers > 1:
                self._kept.append(item)
            yield item

    def all(self) -> tuple[list[Ciphertext], dict[int, Blob]]:
        """All of them, and as they were serialised."""
        self._kept = self._kept or [self._receive(i) for i in range(self._count)]
        return [x for x, _ in self._kept], {i: data for i, (_, data) in enumerate(self._kept)}


def _readers(graph: Graph) -> int:
    return sum(n.op == "linear" and n.attrs.get("base") == "inputs" for n in graph.nodes)


def _window_sums(a: Arithmetic, given: list[Ciphertext], graph: Graph, node: Node) -> list[Ciphertext]:
    """Sum pooling of images whose values have a ciphertext each."""
    _, channels, height, width = graph.edge(node.inputs[0]).shape
    tall, wide = node.attrs["kernel_size"]
    at = np.arange(channels * height * width).reshape(channels, height // tall, tall, width // wide, wide)
    out = []
    for window in at.transpose(0, 1, 3, 2, 4).reshape(-1, tall * wide).tolist():
        total = given[window[0]]
        for i in window[1:]:
            total = a.add(total, given[i])
        out.append(total)
    return out


def _sum(a: Arithmetic, x: Ciphertext, y: Ciphertext) -> Ciphertext:
    level = min(a.context.level(x) or 0, a.context.level(y) or 0)
    return a.add(a.lower(x, level), a.lower(y, level))


def _output_edge(graph: Graph) -> str:
    """The edge with all outputs: what the last matrix of the stage "outputs", or the last sum of such, gives."""
    last = [n.outputs[0] for n in graph.nodes if n.op in ("linear", "add") and n.name.startswith("outputs.")]
    return last[-1]
