"""Steps without communication: operands of one owner, and changes of shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....graph.ops import OPS
from .. import ring
from ..catalog import PRIVATE_OPS, SHAPE_OPS
from ..kernels import StepCall, kernel
from ..values import Share
from .common import add_plain, align

Values = Sequence[Share | torch.Tensor | None]


def _private(call: StepCall) -> Values:
    """The owner of all operands computes the reference function in plain, in float64; the others hold nothing."""
    plain = [o.plain for o in call.operands]
    if any(p is None for p in plain):
        return [None]
    values = [p.double() if p.dtype.is_floating_point else p for p in plain if p is not None]
    out = OPS[call.node.op](call.node.attrs, values)
    return [out.to(getattr(torch, call.outputs[0].dtype)) if out.dtype.is_floating_point else out]


for _op in PRIVATE_OPS:
    kernel(f"private.{_op}")(_private)


def _shape(call: StepCall) -> Values:
    """The reference function on the shares themselves: it only moves elements. A pad's value is the first party's."""
    scale = call.outputs[0].scale
    tensors = [align(call.share(i), scale) for i in range(len(call.operands))]
    attrs = dict(call.node.attrs)
    if call.node.op == "pad":
        value = round(float(attrs.get("value") or 0.0) * (1 << scale))
        attrs["value"] = value if call.party.first else 0
    return [Share(OPS[call.node.op](attrs, tensors).contiguous(), scale)]


for _op in SHAPE_OPS:
    kernel(f"shape.{_op}")(_shape)


@kernel("shape.index_select")
def _index_select(call: StepCall) -> Values:
    x, index = call.share(0), call.operands[1].plain
    tensors = [x.tensor] if index is None else [x.tensor, index]
    return [Share(OPS["index_select"](call.node.attrs, tensors).contiguous(), x.scale)]


@kernel("shape.cast")
def _cast(call: StepCall) -> Values:
    return [Share(align(call.share(0), call.outputs[0].scale), call.outputs[0].scale)]


@kernel("reveal")
def _reveal(call: StepCall) -> Values:
    """Every other party sends its shares of the declared outputs to each receiver, and to nobody else (R5).

    Of each share only the bits of its edge's ring are sent.

    An output that one party holds in plain is shared first, for the receivers that do not hold it. Of three or more
    parties each hides its share by a sharing of zero, fresh for each receiver, who sees them one by one: z + w and z, with
    w added by one party to its own share, would tell w where the sums do not (R4). Of two, one share follows from the sum.
    """
    party = call.party
    out: list[torch.Tensor | None] = [o.plain for o in call.operands]
    for rank in call.attr("ranks"):
        hidden = [
            i
            for i, (o, owner) in enumerate(zip(call.operands, call.attr("owners"), strict=True))
            if not o.is_public and owner != rank
        ]
        if not hidden:
            continue
        shares = [call.share(i) for i in hidden]
        sent = [s.tensor for s in shares]
        if party.size > 2:
            sent = [t + party.zero_share(t.shape) for t in sent]
        widths = [call.operands[i].edge.ring_bits for i in hidden]
        opened = party.open_words_to(list(zip(sent, widths, strict=True)), rank, "output")
        if opened is None:
            continue
        for i, word, share, bits in zip(hidden, opened, shares, widths, strict=True):
            out[i] = ring.signed(word, bits).double() / float(1 << share.scale)
    edges = [o.edge for o in call.operands]
    return [
        None if value is None else value.to(getattr(torch, edge.dtype))
        for value, edge in zip(out, edges, strict=True)
    ]


def _add(call: StepCall) -> Values:
    """Shares add up locally; what one party holds in plain is added by that party."""
    scale = max(o.share.scale if o.share is not None else o.edge.scale for o in call.operands)
    scale = max(scale, call.outputs[0].scale)
    shape = call.outputs[0].shape
    if any(o.share is not None for o in call.operands):
        device = "meta" if call.party.tracing else call.party.device
        total = torch.zeros(shape, dtype=torch.int64, device=device)
    else:  # two owners' plain values: what each adds must not be all of its share (R4)
        total = call.party.zero_share(shape)
    for i, operand in enumerate(call.operands):
        if operand.share is not None:
            term = align(operand.share, scale)
        elif call.party.tracing:
            continue
        else:
            term = add_plain(call, torch.zeros(operand.edge.shape, dtype=torch.int64), operand, scale)
        total = total - term if call.node.op == "sub" and i == 1 else total + term
    return [Share(total, scale)]


kernel("linear.add")(_add)
kernel("linear.sub")(_add)


@kernel("linear.neg")
def _neg(call: StepCall) -> Values:
    x = call.share(0)
    return [Share(-x.tensor, x.scale)]


def _reduce(call: StepCall) -> Values:
    x = call.share(0)
    return [Share(OPS[call.node.op](call.node.attrs, [x.tensor]), x.scale)]


kernel("linear.sum")(_reduce)
kernel("linear.cumsum")(_reduce)


@kernel("begin")
def _begin(call: StepCall) -> Values:
    return []
