"""Engines of the two parties of a CKKS session.

data owner                                   model owner
  setup:  fresh keys; relinearisation, Galois and, for circuit privacy, public key  ->  check, keep
  run:    inputs, packed and encrypted, one frame a ciphertext                      ->  matrices and polynomials
          decrypt, unpack                                        <-  outputs, one frame a ciphertext
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import CorrelationError, ProgramFileError, SessionError, UnsafeError, WireError
from ...graph.ir import Graph, Node
from ...plan.program import Program
from ...transport.base import Address, Clock, Link
from ..base import Engine
from .catalog import ciphertext_bytes, key_bytes
from .client import Client, is_secret_key, same_scale
from .context import Context, context_id
from .messages import INPUT, KEYS, KEYS_MAGIC, OUTPUT, Place
from .noise import PRIVACY, PRIVACY_MARGIN
from .params import from_options
from .reading import BadPlan, Packing
from .sealed import dump, load
from .server import Arithmetic, Ciphertext, Keys, Matrix, Polynomial, Privacy, SpreadMatrix

KEY_NAMES = ("relinearisation keys", "Galois keys", "public key")
STEP = 1


def make_engine(
    role: str,
    program: Program,
    *,
    me: str,
    compute_parties: Sequence[str],
    links: Mapping[str, Link],
    clock: Clock,
    session_id: bytes,
) -> Engine:
    """The engine of one party. Raises ProgramFileError for a program that no compilation gives."""
    if role not in ("data_owner", "model_owner"):
        raise SessionError("CKKS has a data owner and a model owner, and no dealer")
    (peer,) = (name for name in compute_parties if name != me)
    common = _Common(program, links[peer], session_id)
    return DataOwnerEngine(common) if role == "data_owner" else ModelOwnerEngine(common)


class _Common:
    def __init__(self, program: Program, link: Link, session_id: bytes) -> None:
        self.program, self.link, self.session_id = program, link, session_id
        self.parameters = from_options(program.options)
        try:
            self.packing = Packing(program.graph, program.constants, program.options, self.parameters)
        except (BadPlan, ValueError) as error:
            raise ProgramFileError(
                f"this program is not what compiling gives: {error}; compile the model again",
                public_detail="packing",
            ) from None
        self.private = bool(program.options.get("circuit_privacy", 0))
        self.context = Context(self.parameters)
        self.context_id = b""

    def bind(self, keys: list[Any]) -> None:
        """The context id of this session, program and keys."""
        self.context_id = context_id(self.session_id, self.program.manifest_digest, keys)

    def place(self, inference: int, kind: int, ordinal: int, count: int) -> Place:
        return Place(self.context_id, inference, kind, ordinal, count)


class _Engine(Engine):
    def __init__(self, common: _Common) -> None:
        self._common = common
        self._next = 0
        self._times: dict[int, float] = {}

    def prepare(self, index: int) -> None:
        """There is nothing to deal."""

    def _burn(self, index: int) -> None:
        if index < self._next:
            raise CorrelationError(f"inference {index} was already run")
        self._next = index + 1

    def step_times(self) -> dict[int, float]:
        return dict(self._times)


class DataOwnerEngine(_Engine):
    """Encrypts, and decrypts what comes back. Its secret key is made here and ends here."""

    def __init__(self, common: _Common) -> None:
        super().__init__(common)
        self._client: Client | None = None

    def setup(self) -> None:
        c = self._common
        self._client = Client(c.context, c.packing.steps())
        keys = self._client.evaluation_keys(public=c.private)
        c.bind(list(keys))
        head = KEYS.pack(KEYS_MAGIC, c.context_id)
        for i, key in enumerate(keys):
            c.link.send(Address("setup", 0, 0, i), bytearray(head) + key)

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        c, client = self._common, self._client
        if client is None:
            raise SessionError("this engine is not set up, or closed")
        self._burn(index)
        self._times = {}
        packing, graph = c.packing, c.program.graph
        given = inputs or {}
        flat = torch.cat([given[n].reshape(packing.batch, -1).double() for n in graph.inputs], 1).numpy()
        start = time.perf_counter()
        count = packing.groups * packing.sent
        for ordinal, slots in enumerate(_packed(packing, flat)):
            place = c.place(index, INPUT, ordinal, count)
            c.link.send(Address("online", index, STEP, ordinal), place.pack(client.encrypt(slots)))
        self._times[STEP] = time.perf_counter() - start
        values = self._receive(client, index, len(c.program.plan.steps) - 1)
        return _split(graph, values)

    def _receive(self, client: Client, index: int, step: int) -> np.ndarray:
        """[batch, rows]."""
        c, packing = self._common, self._common.packing
        count = packing.groups * packing.returned
        limit = ciphertext_bytes(c.parameters, 0, seeded=False)
        slots = np.empty((packing.returned, c.parameters.slots))
        out = np.empty((packing.batch, packing.rows))
        spent = 0.0
        for ordinal in range(count):
            frame = c.link.receive(Address("online", index, step, ordinal), limit=limit)
            start = time.perf_counter()
            data = c.place(index, OUTPUT, ordinal, count).unpack(frame, c.link.peer)
            group, i = divmod(ordinal, packing.returned)
            slots[i] = client.decrypt(data, c.parameters.scale, c.link.peer)
            if i == packing.returned - 1:
                if packing.outputs is not None:
                    out[group] = packing.outputs.unpack(slots)
                else:
                    first = group * c.parameters.slots
                    size = min(c.parameters.slots, packing.batch - first)
                    out[first : first + size] = slots[:, :size].T
            spent += time.perf_counter() - start
        self._times[step] = spent
        return out

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _packed(packing: Packing, flat: np.ndarray) -> Any:
    """The slots of every ciphertext, in the order in which they are sent. flat: [batch, values]."""
    slots = packing.parameters.slots
    for group in range(packing.groups):
        if packing.inputs is not None:
            yield from packing.inputs.pack(flat[group])
            continue
        part = flat[group * slots : (group + 1) * slots]
        for column in range(packing.values):
            padded = np.zeros(slots)
            padded[: len(part)] = part[:, column]
            yield padded


def _split(graph: Graph, values: np.ndarray) -> dict[str, torch.Tensor]:
    """Output edge -> tensor, float32. values: [batch, all rows]."""
    found, at = {}, 0
    for name in graph.outputs:
        edge = graph.edge(name)
        rows = edge.numel // len(values)
        found[name] = torch.from_numpy(values[:, at : at + rows].copy()).reshape(edge.shape).float()
        at += rows
    return found


class ModelOwnerEngine(_Engine):
    """Computes on ciphertexts that it cannot open. Its weights are encoded once, before the keys arrive."""

    def __init__(self, common: _Common) -> None:
        super().__init__(common)
        program = common.program
        if program.weights is None:
            raise ProgramFileError(
                "the model owner needs the program with its weights, and this is the public part"
            )
        self._arithmetic: Arithmetic | None = None
        self._keys: Keys | None = None
        self._encryptor: Any = None
        self._work: dict[str, Matrix | SpreadMatrix | Polynomial] = {}
        self._scale: dict[str, float] = {}
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
                operand = scales[str(node.attrs["base"])]
                if c.packing.spread:
                    self._work[node.name] = SpreadMatrix(context, matrix, bias, level, p.scale, operand)
                else:
                    plan = c.packing.plans[node.name]
                    self._work[node.name] = Matrix(
                        context, plan, matrix, bias, level, p.scale, operand, late=late
                    )
            elif node.op == "polynomial" and type(level) is int:
                polynomial = Polynomial(
                    [float(v) for v in node.attrs["coefficients"]], int(node.attrs["depth"])
                )
                self._work[node.name] = polynomial
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
        api = context.api
        kinds = (api.RelinKeys, api.GaloisKeys, api.PublicKey)
        loaded = []
        for name, kind, part in zip(names, kinds, parts, strict=False):
            loaded.append(self._load_key(kind(), part, name) if len(part) else None)
        missing = [
            s for s in c.packing.steps() if loaded[1] is None or not loaded[1].has_key(context.element(s))
        ]
        if missing:
            raise WireError(
                f"{c.link.peer}: {len(missing)} Galois keys of the plan are missing",
                public_detail="Galois keys",
            )
        self._keys = Keys(*loaded)
        self._arithmetic = Arithmetic(context, self._keys)
        if c.private:
            self._encryptor = api.Encryptor(context.context, self._keys.public)

    def _load_key(self, key: Any, part: memoryview, name: str) -> Any:
        c = self._common
        if is_secret_key(c.context, part):
            raise UnsafeError(
                f"{c.link.peer} sent a secret key in place of {name}: whoever holds it reads every input. It was not used; "
                "its owner must make a new one",
                public_detail="a secret key was sent",
            )
        return load(key, c.context.context, part, name, c.link.peer)

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
                self._hide(a, results, packing)
            self._send(index, group, results)

    def _receive(self, a: Arithmetic, index: int, ordinal: int, count: int) -> Ciphertext:
        c = self._common
        limit = ciphertext_bytes(c.parameters, c.parameters.levels, seeded=False)
        frame = c.link.receive(Address("online", index, STEP, ordinal), limit=limit)
        data = c.place(index, INPUT, ordinal, count).unpack(frame, c.link.peer)
        x = load(a.context.new(), a.context.context, data, "an input", c.link.peer)
        if (
            x.size() != 2
            or a.context.level(x) != c.parameters.levels
            or not same_scale(x.scale, c.parameters.scale)
        ):
            raise WireError(
                f"{c.link.peer}: an input of another size, level or scale", public_detail="an input"
            )
        return x

    def _group(self, a: Arithmetic, index: int, group: int) -> list[Ciphertext]:
        c = self._common
        packing, graph = c.packing, c.program.graph
        count = packing.groups * packing.sent
        first = group * packing.sent
        values: dict[str, list[Ciphertext]] = {}
        aliases: dict[str, str] = {}
        waiting = _Stream(lambda i: self._receive(a, index, first + i, count), packing.sent)
        for step in c.program.plan.steps[1:-1]:
            start, node = time.perf_counter(), step.node
            values[node.outputs[0]] = self._node(a, node, values, aliases, waiting)
            self._times[step.index] = self._times.get(step.index, 0.0) + time.perf_counter() - start
        total = values[_output_edge(graph)]
        return total

    def _node(
        self,
        a: Arithmetic,
        node: Node,
        values: Mapping[str, list[Ciphertext]],
        aliases: dict[str, str],
        waiting: _Stream,
    ) -> list[Ciphertext]:
        if node.op == "linear":
            work = self._work[node.name]
            if node.attrs["base"] != "inputs":
                given = values[str(node.attrs["base"])]
                return work.apply(a, given)
            if isinstance(work, SpreadMatrix) and not waiting.kept:
                totals, last = work.begin(), None
                for column, x in waiting.items(keep=self._reads_inputs > 1):
                    work.take(a, totals, column, x)
                    last = x
                return work.end(a, totals, last)
            return work.apply(a, waiting.all())
        if node.op == "add":
            left, right = (values[e] for e in node.inputs)
            return [_sum(a, x, y) for x, y in zip(left, right, strict=True)]
        if node.op == "polynomial":
            return self._work[node.name].apply(a, values[node.inputs[0]])
        given = values.get(node.inputs[0], [])  # reshapes and poolings: the matrix after them does it all
        return given

    @property
    def _reads_inputs(self) -> int:
        return sum(
            n.op == "linear" and n.attrs.get("base") == "inputs" for n in self._common.program.graph.nodes
        )

    def _hide(self, a: Arithmetic, results: list[Ciphertext], packing: Packing) -> None:
        options = self._common.program.options
        noise = float(options["noise"]) * 2.0 ** (PRIVACY + PRIVACY_MARGIN)
        head = self._common.parameters.first_bits - self._common.parameters.scale_bits
        where = packing.outputs.where if packing.outputs is not None else None
        slots = self._common.parameters.slots
        kept = [np.ones(slots, dtype=bool)] * len(results) if where is None else [w >= 0 for w in where]
        Privacy(noise, 2.0 ** (head - 3)).hide(a, self._encryptor, results, kept)

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
        self._work = {}


class _Stream:
    """Inputs as they arrive. kept: those that a later matrix reads again."""

    def __init__(self, receive: Any, count: int) -> None:
        self._receive = receive
        self._count = count
        self.kept: list[Ciphertext] = []

    def items(self, *, keep: bool) -> Any:
        for i in range(self._count):
            x = self._receive(i)
            if keep:
                self.kept.append(x)
            yield i, x

    def all(self) -> list[Ciphertext]:
        if not self.kept:
            self.kept = [x for _, x in self.items(keep=False)]
        return self.kept


def _sum(a: Arithmetic, x: Ciphertext, y: Ciphertext) -> Ciphertext:
    level = min(a.context.level(x) or 0, a.context.level(y) or 0)
    return a.add(a.lower(x, level), a.lower(y, level))


def _output_edge(graph: Graph) -> str:
    """The edge with all outputs: what the last matrix of the stage "outputs", or the last sum of such, gives."""
    last = [n.outputs[0] for n in graph.nodes if n.op in ("linear", "add") and n.name.startswith("outputs.")]
    return last[-1]
