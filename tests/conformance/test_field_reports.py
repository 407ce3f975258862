"""Inputs that broke others, by the number of their report: the whole kind of each is right here."""

from __future__ import annotations

import math

import pytest
import torch

from .harness import Operand, exact_grid, one_step, run


def secure(
    op: str, operands: list[Operand], attrs: dict[str, object], shape: tuple[int, ...], parties: int = 2
) -> torch.Tensor:
    program, inputs, _ = one_step(op, operands, attrs, shape, parties=parties)
    return run(program, inputs, parties=parties).outputs["y"]


def test_7_gelu_is_right_on_minus_10_to_10_and_far_beyond() -> None:
    """CrypTen's erf of 1, 2, 3, 5 gives 0.84, -175, -277843, 668780."""
    x = exact_grid(
        torch.cat([torch.linspace(-10, 10, 2001), torch.tensor([-1e4, -100.0, 100.0, 1e4])])
    ).float()
    for form in ("none", "tanh"):
        got = secure("gelu", [Operand(x)], {"approximate": form}, tuple(x.shape))
        assert float((got - torch.nn.functional.gelu(x.double(), approximate=form)).abs().max()) < 1e-3
    erf = secure("erf", [Operand(x)], {}, tuple(x.shape))
    assert float((erf - torch.erf(x.double())).abs().max()) < 1e-4


def test_32_the_two_forms_of_gelu_are_told_apart() -> None:
    x = exact_grid(torch.linspace(-4, 4, 801)).float()
    plain = [torch.nn.functional.gelu(x.double(), approximate=f) for f in ("none", "tanh")]
    got = [secure("gelu", [Operand(x)], {"approximate": f}, tuple(x.shape)) for f in ("none", "tanh")]
    assert float((plain[0] - plain[1]).abs().max()) > 4e-4
    for i in range(2):
        assert float((got[i] - plain[i]).abs().max()) < 5e-5
        assert float((got[i] - plain[1 - i]).abs().max()) > 4e-4


@pytest.mark.parametrize("n", [1, 2, 3, 100, 200, 256, 1000])
def test_9_softmax_of_equal_logits_is_one_over_n(n: int) -> None:
    """CrypTen: 256 equal logits give garbage, 200 give 0.0077."""
    for level in (0.0, 7.5, -300.0):
        got = secure("softmax", [Operand(torch.full((2, n), level))], {"dim": -1}, (2, n))
        assert float((got.double() - 1 / n).abs().max()) < 3e-5


@pytest.mark.parametrize("low", [-30.0, -500.0, -512.0, -1e4, -1e9])
def test_10_a_very_negative_logit_gets_nothing(low: float) -> None:
    x = torch.tensor([[0.0, 1.0, low]])
    got = secure("softmax", [Operand(x)], {"dim": -1}, (1, 3))
    assert got[0, 2] == 0
    assert float((got.double() - torch.softmax(x.double(), -1)).abs().max()) < 3e-5


def test_11_a_masked_place_gets_exactly_0() -> None:
    scores = exact_grid(torch.randn(4, 12) * 20).float()
    keep = torch.arange(12) < torch.tensor([[12], [5], [1], [7]])
    for kind in ("data", "public", "shared"):
        got = secure("masked_softmax", [Operand(scores), Operand(keep, kind)], {"dim": -1}, (4, 12))
        expected = torch.softmax(scores.double().masked_fill(~keep, float("-inf")), -1)
        assert bool((got[~keep] == 0).all())
        assert float((got - expected).abs().max()) < 3e-5


def test_12_a_row_that_is_masked_entirely_gives_zeros() -> None:
    scores = exact_grid(torch.randn(3, 5) * 20).float()
    keep = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    got = secure("masked_softmax", [Operand(scores), Operand(keep, "data")], {"dim": -1}, (3, 5))
    assert torch.equal(got[1], torch.zeros(5))
    assert float((got.sum(-1) - torch.tensor([1.0, 0.0, 1.0])).abs().max()) < 1e-4


@pytest.mark.parametrize("size", [1e5, 1e6, 1e7, 1e8])
def test_17_times_one_is_right_for_large_values(size: float) -> None:
    x = exact_grid((torch.rand(20_000, dtype=torch.float64) * 2 - 1) * size)
    program, inputs, _ = one_step(
        "mul",
        [Operand(x.float(), bound=size), Operand(torch.ones(20_000), bound=1.0)],
        {},
        (20_000,),
        output_bound=size,
    )
    got = run(program, inputs).outputs["y"].double()
    rounding = x.abs() * 2.0**-23 + 2.0**-16
    assert bool(((got - x.float().double()).abs() <= rounding).all())


@pytest.mark.parametrize("parties", [2, 3])
def test_18_a_convolution_is_right_with_two_and_three_parties(parties: int) -> None:
    """Conv2d(1, 16, 5) with three parties once gave 4.29e9."""
    torch.manual_seed(18)
    x = exact_grid(torch.randn(2, 1, 12, 12)).float()
    weight, bias = (exact_grid(torch.randn(s)).float() for s in ((16, 1, 5, 5), (16,)))
    attrs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    expected = torch.conv2d(x.double(), weight.double(), bias.double())
    for kind in ("weight", "shared"):
        operands = [Operand(x), Operand(weight, kind), Operand(bias, kind)]
        got = secure("convolution", operands, attrs, (2, 16, 8, 8), parties)
        assert float((got - expected).abs().max()) < 1e-4


def test_27_average_pooling_with_padding() -> None:
    x = exact_grid(torch.randn(2, 3, 32, 32)).float()
    attrs = {
        "kernel_size": [3, 3],
        "stride": [2, 2],
        "padding": [1, 1],
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    }
    got = secure("avg_pool2d", [Operand(x, bound=8.0)], attrs, (2, 3, 16, 16))
    expected = torch.nn.functional.avg_pool2d(x.double(), 3, 2, 1)
    assert float((got - expected).abs().max()) < 5e-5


def test_layer_norm_holds_over_the_spreads_of_real_models() -> None:
    for spread in (0.05, 1.0, 50.0):
        x = exact_grid(torch.randn(4, 384, dtype=torch.float64) * spread).float()
        attrs = {"normalized_shape": [384], "eps": 1e-12, "has_weight": False, "has_bias": False}
        program, inputs, _ = one_step("layer_norm", [Operand(x, bound=spread * 16)], attrs, (4, 384))
        got = run(program, inputs).outputs["y"]
        expected = torch.nn.functional.layer_norm(x.double(), (384,), eps=1e-12)
        assert float((got - expected).abs().max()) < 1e-3


@pytest.mark.parametrize("op", ["reciprocal", "rsqrt", "sqrt", "log"])
def test_roots_and_reciprocals_hold_over_nine_decades(op: str) -> None:
    x = exact_grid(torch.logspace(-4, 5, 400, dtype=torch.float64)).float()
    x = x[x > 0]
    program, inputs, _ = one_step(op, [Operand(x, bound=1e5)], {}, tuple(x.shape), output_bound=2.0**14)
    got = run(program, inputs).outputs["y"].double()
    function = {"reciprocal": torch.reciprocal, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "log": torch.log}[
        op
    ]
    expected = function(x.double())
    assert bool(((got - expected).abs() <= 2.0**-14 + expected.abs() * 2.0**-16).all())


def test_exp_holds_from_minus_14_to_8() -> None:
    x = exact_grid(torch.linspace(-14, 8, 500)).float()
    program, inputs, _ = one_step(
        "exp", [Operand(x, bound=16.0)], {}, tuple(x.shape), output_bound=math.exp(8)
    )
    got = run(program, inputs).outputs["y"].double()
    expected = x.double().exp()
    assert bool(((got - expected).abs() <= 2.0**-14 + expected * 2.0**-17).all())
