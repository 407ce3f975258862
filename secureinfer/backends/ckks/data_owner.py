"""The data owner's engine: it encrypts inputs, and decrypts what comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from ...errors import SessionError
from ...graph.ir import Graph
from ...transport.base import Address
from .catalog import ciphertext_bytes
from .client import Client
from .common import STEP, CkksEngine, Common
from .messages import INPUT, KEYS, KEYS_MAGIC, OUTPUT
from .reading import Packing

Values = npt.NDArray[np.float64]


class DataOwnerEngine(CkksEngine):
    """Encrypts, and decrypts what comes back. Its secret key is made here and ends here."""

    def __init__(self, common: Common) -> None:
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

    def _receive(self, client: Client, index: int, step: int) -> Values:
        """[batch, rows]."""
        c, packing = self._common, self._common.packing
        count = packing.groups * packing.returned
        limit = ciphertext_bytes(c.parameters, 0, seeded=False)
        slots = np.empty((packing.returned if packing.outputs is not None else 0, c.parameters.slots))
        out = np.empty((packing.batch, packing.rows))
        spent = 0.0
        for ordinal in range(count):
            frame = c.link.receive(Address("online", index, step, ordinal), limit=limit)
            start = time.perf_counter()
            data = c.place(index, OUTPUT, ordinal, count).unpack(frame, c.link.peer)
            group, i = divmod(ordinal, packing.returned)
            values = client.decrypt(data, c.link.peer)
            if packing.outputs is None:
                first = group * c.parameters.slots
                size = min(c.parameters.slots, packing.batch - first)
                out[first : first + size, i] = values[:size]
            else:
                slots[i] = values
                if i == packing.returned - 1:
                    out[group] = packing.outputs.unpack(slots)
            spent += time.perf_counter() - start
        self._times[step] = spent
        return out

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _packed(packing: Packing, flat: Values) -> Iterator[Values]:
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


def _split(graph: Graph, values: Values) -> dict[str, torch.Tensor]:
    """Output edge -> tensor, float32. values: [batch, all rows]."""
    found, at = {}, 0
    for name in graph.outputs:
        edge = graph.edge(name)
        rows = edge.numel // len(values)
        found[name] = torch.from_numpy(values[:, at : at + rows].copy()).reshape(edge.shape).float()
        at += rows
    return found
