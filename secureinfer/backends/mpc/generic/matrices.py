"""Matrix products, linear layers, convolutions and the private embedding."""

from __future__ import annotations

import torch

from ....graph.int8 import is_quantized
from .. import protocols, ring
from ..kernels import StepCall, kernel
from ..values import Share
from .common import add_plain, align, beaver, fixed_product
from .local import Values


def _finish(call: StepCall, product: torch.Tensor, scale: int, bias: int | None) -> Values:
    """Add the bias at the product's own scale, then cut the product back to the program's scale."""
    if bias is not None and len(call.operands) > bias:
        operand = call.operands[bias]
        if operand.share is not None:
            product = product + align(operand.share, scale).reshape(bias_shape(call, operand.edge.shape))
        elif operand.plain is not None and not call.party.tracing:
            zero = torch.zeros(operand.edge.shape, dtype=torch.int64)
            product = product + add_plain(call, zero, operand, scale).reshape(bias_shape(call, zero.shape))
    return [Share(protocols.truncate(call.party, product, scale - call.scale), call.scale)]


def bias_shape(call: StepCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    if call.node.op != "convolution":
        return tuple(shape)
    return (1, shape[0], *([1] * (len(call.outputs[0].shape) - 2)))


def _scale(call: StepCall) -> int:
    return call.share_scale(0) + (call.scale if is_quantized(call.node) else call.share_scale(1))


def _bias(call: StepCall) -> int | None:
    """The operand that is the bias, if there is one: an int8 weight has its scales in the last place."""
    return 2 if len(call.operands) > 2 + is_quantized(call.node) else None


def ring_options(call: StepCall) -> tuple[str, dict[str, object]]:
    """The ring operation of a node and its options."""
    if call.node.op != "convolution":
        return call.node.op, {}
    kind = "conv2d" if len(call.operands[0].edge.shape) == 4 else "conv1d"
    names = ("stride", "padding", "dilation")
    options: dict[str, object] = {n: tuple(call.attr(n)) for n in names}
    options["groups"] = int(call.attr("groups"))
    return kind, options


def _weight(call: StepCall) -> Values:
    op, options = ring_options(call)
    x = call.share(0)
    product = fixed_product(call, x.tensor, call.operands[1], op, call.outputs[0].shape, **options)
    return _finish(call, product, _scale(call), _bias(call))


for _name in ("matmul.weight", "linear.weight", "convolution.weight"):
    kernel(_name)(_weight)


def _public(call: StepCall) -> Values:
    op, options = ring_options(call)
    tensors = []
    for i, operand in enumerate(call.operands[:2]):
        if operand.is_public and operand.plain is not None:
            plain = ring.encode(operand.plain, operand.edge.scale, operand.edge.name)
            tensors.append(plain)
        else:
            tensors.append(call.share(i).tensor)
    return _finish(call, ring.apply(op, tensors[0], tensors[1], options), _scale(call), 2)


for _name in ("matmul.public", "linear.public", "convolution.public"):
    kernel(_name)(_public)


def _beaver(call: StepCall) -> Values:
    op, options = ring_options(call)
    a, b = call.share(0).tensor, call.share(1).tensor
    if op == "linear":
        op, b = "matmul", b.t().contiguous()
    return _finish(call, beaver(op, a, b, **options), _scale(call), 2)


for _name in ("matmul.beaver", "linear.beaver", "convolution.beaver"):
    kernel(_name)(_beaver)


@kernel("embedding.one_hot")
def _embedding(call: StepCall) -> Values:
    """One-hot rows of the ids, made by their owner in plain, times the table: the ids are never opened.

    What the owner sends is masked by A, which is uniform over the ring, so its one-hots need no sharing first.
    """
    ids, table = call.operands[:2]
    rows = ids.edge.numel
    shape = (rows, table.edge.shape[0])
    if call.party.tracing:
        one_hot = torch.empty(shape, dtype=torch.int64, device="meta")
    else:
        one_hot = torch.zeros(shape, dtype=torch.int64)
        if ids.plain is not None:
            one_hot.scatter_(1, ids.plain.reshape(rows, 1).long(), 1)
    width = table.edge.shape[1]
    product = fixed_product(call, one_hot, table, "matmul", (rows, width))
    return [Share(product.reshape(call.outputs[0].shape), call.scale)]
