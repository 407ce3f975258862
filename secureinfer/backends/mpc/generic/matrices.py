"""Matrix products, linear layers, convolutions and the private embedding."""

from __future__ import annotations

import torch

from ....graph.int8 import is_quantized
from .. import protocols, ring
from ..kernels import StepCall, kernel
from ..values import Share
from .common import add_plain, align, beaver, fixed_product
from .local import Values


def with_bias(call: StepCall, product: torch.Tensor, scale: int) -> torch.Tensor:
    """The product, at `scale`, plus the node's bias, if it has one: an int8 weight has its scales in the last place."""
    if len(call.operands) <= 2 + is_quantized(call.node):
        return product
    bias = call.operands[2]
    shape = _bias_shape(call, bias.edge.shape)
    if bias.share is not None:
        return product + align(bias.share, scale).reshape(shape)
    if bias.plain is None or call.party.tracing:
        return product
    zero = torch.zeros(bias.edge.shape, dtype=torch.int64)
    return product + add_plain(call, zero, bias, scale).reshape(shape)


def _finish(call: StepCall, product: torch.Tensor, scale: int) -> Values:
    """Add the bias at the product's own scale, then cut the product back to the program's scale."""
    product = with_bias(call, product, scale)
    return [Share(protocols.truncate(call.party, product, scale - call.scale), call.scale)]


def _bias_shape(call: StepCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    if call.node.op != "convolution":
        return tuple(shape)
    return (1, shape[0], *([1] * (len(call.outputs[0].shape) - 2)))


def _scale(call: StepCall) -> int:
    return call.share_scale(0) + (call.scale if is_quantized(call.node) else call.share_scale(1))


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
    return _finish(call, product, _scale(call))


for _name in ("matmul.weight", "linear.weight", "convolution.weight"):
    kernel(_name)(_weight)


def local_product(call: StepCall) -> torch.Tensor:
    """The product of a share with a public factor, on either side: no communication."""
    op, options = ring_options(call)
    tensors = []
    for i, operand in enumerate(call.operands[:2]):
        if operand.is_public and operand.plain is not None:
            encoded = ring.encode(operand.plain, operand.edge.scale, operand.edge.name)
            tensors.append(encoded.to("meta") if call.party.tracing else encoded)
        else:
            tensors.append(call.share(i).tensor)
    return ring.apply(op, tensors[0], tensors[1], options)


def _public(call: StepCall) -> Values:
    return _finish(call, local_product(call), _scale(call))


for _name in ("matmul.public", "linear.public", "convolution.public"):
    kernel(_name)(_public)


def _beaver(call: StepCall) -> Values:
    op, options = ring_options(call)
    a, b = call.share(0).tensor, call.share(1).tensor
    if op == "linear":
        op, b = "matmul", b.t().contiguous()
    return _finish(call, beaver(op, a, b, **options), _scale(call))


for _name in ("matmul.beaver", "linear.beaver", "convolution.beaver"):
    kernel(_name)(_beaver)


def one_hot_rows(call: StepCall) -> torch.Tensor:
    """[ids, rows of the table]: one-hot rows of the ids, made by their owner in plain; the ids are never opened.

    What the owner sends is masked by A, which is uniform over the ring, so its one-hots need no sharing first.
    """
    ids, table = call.operands[:2]
    count = ids.edge.numel
    shape = (count, table.edge.shape[0])
    if call.party.tracing:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    one_hot = torch.zeros(shape, dtype=torch.int64)
    if ids.plain is not None:
        one_hot.scatter_(1, ids.plain.reshape(count, 1).long(), 1)
    return one_hot


@kernel("embedding.one_hot")
def _embedding(call: StepCall) -> Values:
    one_hot, table = one_hot_rows(call), call.operands[1]
    product = fixed_product(call, one_hot, table, "matmul", (one_hot.shape[0], table.edge.shape[1]))
    return [Share(product.reshape(call.outputs[0].shape), call.scale)]
