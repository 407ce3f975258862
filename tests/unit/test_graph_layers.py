"""Single operators and idioms: each has a canonical form that gives torch's values."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .graph_oracle import Exported, agree, error

Z = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(2))


class Table(nn.Module):
    """All functions of a table on one input: one export for many small tests."""

    def __init__(self, functions: dict[str, Callable[..., object]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {name: function(x) for name, function in self.functions.items()}


@functools.cache
def table(name: str) -> tuple[dict[str, object], dict[str, object]]:
    """What the model and its exported graph make of other values than those of the export."""
    functions, example = {"shapes": (SHAPES, Z), "arithmetic": (ARITHMETIC, Z), "pools": (POOLS, IMAGE)}[name]
    exported = Exported(Table(functions), example)
    x = example * -0.7
    return Table(functions)(x.double()), exported(x)


SHAPES = {
    "view with batch size": lambda z: z.view(z.size(0), -1),
    "negative dims": lambda z: (
        z.transpose(-1, -2),
        z.unsqueeze(-1),
        z.flatten(-2),
        z.select(-1, -2),
        z.sum(-1),
    ),
    "chunk": lambda z: z.chunk(3, -1),
    "uneven chunk": lambda z: z.chunk(4, -1),
    "split": lambda z: z.split([1, 3], 1),
    "unbind": lambda z: z.unbind(1),
    "squeeze": lambda z: z[:, :1].squeeze(1).squeeze(-1),
    "slices": lambda z: (z[:, 1:, ::2], z[:, -2:], z[..., :-1], z[:, 4:]),
    "cat and stack": lambda z: (torch.cat([z, z + 1], -1), torch.stack([z, z * 2], 1)),
    "repeat": lambda z: (z.repeat(1, 2, 1), z.repeat(2, 1, 1, 3), z.repeat_interleave(2, 1)),
    "expand": lambda z: z[:, :1].expand(-1, 5, -1),
    "roll and flip": lambda z: (z.roll(1, -1), z.flip(-1), z.flip(0, 2)),
    "pad": lambda z: (F.pad(z, (1, 2)), F.pad(z, (0, 0, 1, 0), value=2.0)),
    "index": lambda z: (z[:, [3, 0]], z[..., [1, 0]], z[[0, 1], :, [1, 0]], z[:, [[0, 1], [2, 3]], [1, 5]]),
    "index_select and gather": lambda z: (
        z.index_select(1, torch.tensor([2, 2, 0])),
        z.gather(-1, torch.tensor([[[1, 0]] * 4] * 2)),
    ),
    "permute": lambda z: z.permute(2, 0, 1).contiguous().view(6, 8).t(),
    "tril": lambda z: (torch.tril(z), torch.triu(z, 1)),
    "scatter a slice": lambda z: torch.slice_scatter(z, z[:, :2] * 2, 1, 1, 3),
    "one-hot": lambda z: F.one_hot((z[:, :, 0] > 0).long(), 3),
    "nothing left": lambda z: z[:, :0] * 2,
}

ARITHMETIC = {
    "scalars": lambda z: (z + 1, 2 - z, z * 3, z / 4, -z, z.add(z, alpha=2), 1 / (z * z + 1)),
    "integers": lambda z: (z > 0).long() * 3 + 1,
    "promotion": lambda z: z * (z > 0) + (z > 0).sum(-1, keepdim=True),
    "powers": lambda z: (z**2, z**3, z.abs() ** 0.5, (z.abs() + 1) ** -0.5, (z.abs() + 1) ** -1, z.square(), z**1, z**0),
    "compare": lambda z: (z > 0, z >= z.flip(0), z < 1, z <= 0.5, z == z, z != 0, ~(z > 0), (z > 0) & (z < 1)),
    "or, xor": lambda z: ((z > 1) | (z < -1), (z > 0) ^ (z < 1)),
    "where": lambda z: (torch.where(z > 0, z, 0.0), z.masked_fill(z > 0, 1.5), torch.where(z > 0, 1.0, -1.0) * z),
    "clamp": lambda z: (z.clamp(-1, 1), z.clamp(min=0.1), z.clamp(max=0), F.hardtanh(z), F.relu6(z)),
    "min and max": lambda z: (torch.maximum(z, -z), torch.minimum(z, z.flip(0)), z.max(), z.min(), z.amax(-1), z.amin(1)),
    "reductions": lambda z: (z.sum(), z.sum((0, 2)), z.mean(-1, keepdim=True), z.mean(), (z > 0).any(-1), (z > 9).any()),
    "all": lambda z: ((z > -9).all(), (z > 0).all(-1)),
    "variance": lambda z: (z.var(), z.var(-1, correction=0), z.std(-1), *torch.var_mean(z, -1)),
    "norms": lambda z: (z.norm(dim=-1), z.norm(1, dim=-1), F.normalize(z, dim=-1), F.cosine_similarity(z, z + 1)),
    "exp and log": lambda z: (z.exp(), (z.abs() + 1).log(), z.erf(), z.sigmoid(), z.tanh(), z.abs().sqrt()),
    "log_softmax": lambda z: (F.log_softmax(z, -1), F.softmax(z, 1)),
    "activations": lambda z: (
        F.silu(z), F.leaky_relu(z, 0.2), F.elu(z), F.softplus(z), F.hardswish(z), F.hardsigmoid(z), F.mish(z), F.gelu(z),
        F.gelu(z, approximate="tanh"), z * torch.sigmoid(z),
    ),
    "products": lambda z: (z @ z.mT, torch.einsum("bcl,bdl->bcd", z, z), z @ z[0, 0], z[0, 0] @ z.mT, z[0, 0] @ z[1, 0]),
    "linear of data": lambda z: (F.linear(z, z[0]), torch.addmm(z[0], z[0] @ z[0].mT, z[1], beta=0.5, alpha=2)),
    "attention": lambda z: (
        F.scaled_dot_product_attention(z, z, z),
        F.scaled_dot_product_attention(z, z, z, is_causal=True),
        F.scaled_dot_product_attention(z, z, z, scale=0.1, attn_mask=torch.ones(4, 4).tril().bool()),
    ),
    "grouped attention": lambda z: F.scaled_dot_product_attention(
        z[:, :, None], z[:, :2, None], z[:, :2, None], enable_gqa=True
    ),
    "norm layers": lambda z: (F.rms_norm(z, (6,)), F.group_norm(z, 2), F.layer_norm(z, (4, 6)), F.layer_norm(z, (6,))),
}  # fmt: skip

POOLS = {
    "field report 27": lambda x: F.avg_pool2d(x, 3, 2, padding=1),
    "average": lambda x: (F.avg_pool2d(x, 2, ceil_mode=True), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    "max": lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, dilation=2, ceil_mode=True)),
    "adaptive": lambda x: (
        F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 4)), F.adaptive_avg_pool2d(x, (2, 3)),
        F.adaptive_max_pool2d(x, (3, 2)), F.adaptive_max_pool2d(x, (2, 5)), F.adaptive_avg_pool2d(x, (9, 8)),
    ),
    "lines": lambda x: (
        F.max_pool1d(x[:, 0], 2), F.avg_pool1d(x[:, 0], 3, 1, 1), F.adaptive_avg_pool1d(x[:, 0], 4),
        F.adaptive_avg_pool1d(x[:, 0], 3),
    ),
    "up-sampling": lambda x: F.interpolate(x, scale_factor=2),
}  # fmt: skip


CASES = [
    *(("shapes", n) for n in SHAPES),
    *(("arithmetic", n) for n in ARITHMETIC),
    *(("pools", n) for n in POOLS),
]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_operator(group: str, name: str) -> None:
    expected, came = table(group)
    assert error(expected[name], came[name]) < 1e-5


def test_a_planted_wrong_operator_is_noticed() -> None:
    """Twin: the comparison fails where the tanh form stands in for the exact GELU (field report 32)."""
    assert error(F.gelu(Z), F.gelu(Z, approximate="tanh")) > 1e-5


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1, stride=2),
        nn.Conv2d(3, 6, (2, 3), groups=3, dilation=2, bias=False),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 5, 4, stride=3)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 1)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.PReLU(4)),
        nn.LayerNorm([9, 8], bias=False),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers(layer: nn.Module) -> None:
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    agree(layer, IMAGE)


class FusedAttention(nn.Module):
    """One layer for Q, K and V, cut by chunk; a scale behind the scores; a factor for each channel behind the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(t.size(0), t.size(1), 2, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 3**0.5, -1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape)) * self.gain


def test_fused_qkv_and_layer_scale() -> None:
    torch.manual_seed(0)
    exported = agree(FusedAttention(), Z)
    assert (
        exported.operators["mul"] == 0 and exported.operators["linear"] == 2
    )  # the gain is in the output layer
    assert exported.operators["div"] == 1  # three uses of one layer: the scale stays on the scores


def test_a_scale_behind_a_product_moves_into_a_layer_before_it() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q(x) @ self.k(x).transpose(-2, -1)) * 0.25

    torch.manual_seed(0)
    exported = agree(Scores(), Z)
    assert set(exported.operators) == {"linear", "permute", "matmul"}
    factors = [exported.weights[f"{n}.weight"].abs().max() for n in ("q", "k")]
    assert min(factors) < 0.15 < max(factors)  # one of the two is a quarter of what it was


def test_a_scale_is_not_folded_into_a_layer_that_something_else_uses() -> None:
    """Planted fault: folding would change the other use."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y * 3.0, y

    torch.manual_seed(0)
    exported = agree(Twice(), Z)
    assert exported.operators == {"linear": 1, "mul": 1}
