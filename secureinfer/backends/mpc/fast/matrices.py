"""Products in a window: raw results, which keep the fraction bits of both factors until something cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....errors import SessionError
from ....graph.int8 import is_quantized
from .. import ring
from ..correlations import FixedProduct, Product, frozen
from ..generic.matrices import local_product, one_hot_rows, ring_options, with_bias
from ..kernels import StepCall, factors, kernel
from ..party import Party
from ..values import Share
from .choices import Values
from .talk import Talk, run


def _operand(call: StepCall) -> torch.Tensor:
    """The left operand as a share. What its owner alone holds needs no sharing: what it sends is masked."""
    x = call.operands[0]
    if x.share is not None:
        return x.share.tensor
    if x.plain is None or call.party.tracing:
        return torch.zeros(x.edge.shape, dtype=torch.int64, device="meta" if call.party.tracing else "cpu")
    return ring.encode(x.plain, x.edge.scale, x.edge.name)


def _raw(call: StepCall, product: torch.Tensor) -> Values:
    scale = call.outputs[0].scale
    return [Share(with_bias(call, product, scale), scale)]


def masked_product(call: StepCall, x: torch.Tensor, op: str, options: dict[str, object]) -> torch.Tensor:
    """op(x, W) modulo 2**k with W known to rank 0: one message from each other party to rank 0, one round.

    An int8 weight is multiplied as it is, and its channels by their integer factors afterwards.
    """
    party, weight, out = call.party, call.operands[1], call.outputs[0]
    k, quantized = out.ring_bits, is_quantized(call.node)
    shape = (x.shape[0], out.shape[-1]) if call.node.op == "embedding" else out.shape
    kind = FixedProduct(op, tuple(x.shape), tuple(shape), weight.edge.name, 0, frozen(options), k, quantized)
    parts = party.take(kind)
    if party.tracing:
        return parts["c"]
    opened = party.open_words_to([(x - parts["A"], k)], 0, "masked operand")
    if opened is None:
        return parts["c"]
    if weight.plain is None:
        raise SessionError(f"the model owner does not hold weight {weight.edge.name!r}")
    with party.alone():
        if not quantized:
            return call.encoded(weight).apply(op, opened[0], options, k) + parts["c"]
        product = call.int8(weight).apply(op, opened[0], options, k)
    scales = factors(call.weights, call.node, call.operands[-1].edge)
    if op.startswith("conv"):
        scales = scales.reshape(-1, *([1] * (product.dim() - 2)))
    return product * scales + parts["c"]


def _weight(call: StepCall) -> Values:
    op, options = ring_options(call)
    return _raw(call, masked_product(call, _operand(call), op, options))


def _public(call: StepCall) -> Values:
    return _raw(call, local_product(call))


def _beaver(call: StepCall) -> Values:
    op, options = ring_options(call)
    party, out = call.party, call.outputs[0]
    x, y = call.share(0).tensor, call.share(1).tensor
    return _raw(call, run(party, beaver(party, op, x, y, out.shape, options, out.ring_bits)))


def beaver(
    p: Party, op: str, x: torch.Tensor, y: torch.Tensor, shape: Sequence[int], options: Mapping[str, Any], bits: int
) -> Talk[torch.Tensor]:  # fmt: skip
    """op(x, y) modulo 2**bits of two shares: one round. Source: Beaver, CRYPTO 1991."""
    parts = p.take(Product(op, tuple(x.shape), tuple(y.shape), tuple(shape), frozen(options), bits))
    items = ((x, bits), (y, bits)) if p.tracing else ((x - parts["a"], bits), (y - parts["b"], bits))
    e, d = yield [p.word("beaver", *items)]
    if p.tracing:
        return parts["c"]
    right = parts["b"] + d if p.first else parts["b"]  # e d, which is public, is added once
    product = ring.apply(op, e, right, options, bits) + ring.apply(op, parts["a"], d, options, bits)
    return parts["c"] + product


for _op in ("linear", "matmul", "convolution"):
    kernel(f"{_op}.window.weight")(_weight)
    kernel(f"{_op}.window.public")(_public)
    kernel(f"{_op}.window.beaver")(_beaver)


@kernel("embedding.window.one_hot")
def _embedding(call: StepCall) -> Values:
    product = masked_product(call, one_hot_rows(call), "matmul", {})
    return [Share(product.reshape(call.outputs[0].shape), call.outputs[0].scale)]
