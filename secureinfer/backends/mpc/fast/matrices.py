"""Products in a window: raw results, which keep the fraction bits of both factors until something cuts them."""

from __future__ import annotations

import torch

from ....errors import SessionError
from ....graph.int8 import is_quantized
from .. import ring
from ..correlations import FixedProduct, Product
from ..generic.common import add_plain, align
from ..generic.matrices import bias_shape, ring_options
from ..kernels import StepCall, factors, kernel
from ..values import Operand, Share
from .choices import Values


def _operand(call: StepCall) -> torch.Tensor:
    """The left operand as a share. What its owner alone holds needs no sharing: what it sends is masked."""
    x = call.operands[0]
    if x.share is not None:
        return x.share.tensor
    if x.plain is None or call.party.tracing:
        return torch.zeros(x.edge.shape, dtype=torch.int64, device="meta" if call.party.tracing else "cpu")
    return ring.encode(x.plain, x.edge.scale, x.edge.name)


def _with_bias(call: StepCall, product: torch.Tensor, bias: Operand | None) -> Values:
    scale = call.outputs[0].scale
    if bias is not None:
        shape = bias_shape(call, bias.edge.shape)
        if bias.share is not None:
            product = product + align(bias.share, scale).reshape(shape)
        elif bias.plain is not None and not call.party.tracing:
            zero = torch.zeros(bias.edge.shape, dtype=torch.int64)
            product = product + add_plain(call, zero, bias, scale).reshape(shape)
    return [Share(product, scale)]


def _bias(call: StepCall) -> Operand | None:
    count = len(call.operands) - (1 if is_quantized(call.node) else 0)
    return call.operands[2] if count > 2 else None


def masked_product(call: StepCall, x: torch.Tensor, op: str, options: dict[str, object]) -> torch.Tensor:
    """op(x, W) modulo 2**k with W known to rank 0: one message from each other party to rank 0, one round.

    An int8 weight is multiplied as it is, and its channels by their integer factors afterwards.
    """
    party, weight, out = call.party, call.operands[1], call.outputs[0]
    k, quantized = out.ring_bits, is_quantized(call.node)
    packed = tuple(sorted((n, tuple(v) if isinstance(v, list) else v) for n, v in options.items()))
    shape = (x.shape[0], out.shape[-1]) if call.node.op == "embedding" else out.shape
    kind = FixedProduct(op, tuple(x.shape), tuple(shape), weight.edge.name, 0, packed, k, quantized)
    parts = party.take(kind)
    if party.tracing:
        return parts["c"]
    opened = party.open_words_to([(x - parts["A"], k)], 0, "masked operand")
    if opened is None:
        return parts["c"]
    if weight.plain is None:
        raise SessionError(f"the model owner does not hold weight {weight.edge.name!r}")
    if not quantized:
        return call.encoded(weight).apply(op, opened[0], options, k) + parts["c"]
    product = call.int8(weight).apply(op, opened[0], options, k)
    scales = factors(call.weights, call.node, call.operands[-1].edge)
    if op.startswith("conv"):
        scales = scales.reshape(-1, *([1] * (product.dim() - 2)))
    return product * scales + parts["c"]


def _weight(call: StepCall) -> Values:
    op, options = ring_options(call)
    return _with_bias(call, masked_product(call, _operand(call), op, options), _bias(call))


def _public(call: StepCall) -> Values:
    op, options = ring_options(call)
    tensors = []
    for i, operand in enumerate(call.operands[:2]):
        if operand.is_public and operand.plain is not None:
            encoded = ring.encode(operand.plain, operand.edge.scale, operand.edge.name)
            tensors.append(encoded.to("meta") if call.party.tracing else encoded)
        else:
            tensors.append(call.share(i).tensor)
    return _with_bias(call, ring.apply(op, tensors[0], tensors[1], options), _bias(call))


def _beaver(call: StepCall) -> Values:
    op, options = ring_options(call)
    party, out = call.party, call.outputs[0]
    x, y = call.share(0).tensor, call.share(1).tensor
    k = out.ring_bits
    packed = tuple(sorted((n, tuple(v) if isinstance(v, list) else v) for n, v in options.items()))
    parts = party.take(Product(op, tuple(x.shape), tuple(y.shape), out.shape, packed, k))
    if party.tracing:
        return _with_bias(call, parts["c"], _bias(call))
    e, d = party.open_words([(x - parts["a"], k), (y - parts["b"], k)], "beaver")
    product = parts["c"] + ring.apply(op, e, parts["b"], options) + ring.apply(op, parts["a"], d, options)
    if party.first:
        product += ring.apply(op, e, d, options)
    return _with_bias(call, product, _bias(call))


for _op in ("linear", "matmul", "convolution"):
    kernel(f"{_op}.window.weight")(_weight)
    kernel(f"{_op}.window.public")(_public)
    kernel(f"{_op}.window.beaver")(_beaver)


@kernel("embedding.window.one_hot")
def _embedding(call: StepCall) -> Values:
    """One-hot rows of the ids, made by their owner in plain, times the table: the ids are never opened."""
    ids, table = call.operands[:2]
    rows = ids.edge.numel
    shape = (rows, table.edge.shape[0])
    if call.party.tracing:
        one_hot = torch.empty(shape, dtype=torch.int64, device="meta")
    else:
        one_hot = torch.zeros(shape, dtype=torch.int64)
        if ids.plain is not None:
            one_hot.scatter_(1, ids.plain.reshape(rows, 1).long(), 1)
    product = masked_product(call, one_hot, "matmul", {})
    return [Share(product.reshape(call.outputs[0].shape), call.outputs[0].scale)]
