"""Polynomials in place of activations, between real MPC parties: no kernel of their own, and the plaintext values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.compression.activations import PolynomialActivation
from secureinfer.graph.polynomials import fit

from .parties import Parties


def model() -> nn.Module:
    torch.manual_seed(4)
    first, second = PolynomialActivation(fit("relu", 2.0, 4)), PolynomialActivation(fit("tanh", 2.0, 7))
    return nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 5), second, nn.Linear(5, 3)).eval()


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
def test_a_model_with_polynomials_gives_its_plaintext_values(protocol: str) -> None:
    network, x = model(), torch.rand(4, 6, generator=torch.Generator().manual_seed(5)) * 2 - 1
    program = si.compile(network, x, protocol=protocol)
    with torch.no_grad():
        expected = network.double()(x.double())
    with Parties(program) as parties:
        for _ in range(2):
            (came,) = parties.infer(x)
            assert float((came.double() - expected).abs().max()) < 3e-4


def test_a_polynomial_of_another_range_is_seen() -> None:
    """The twin: the comparison above sees a power too few or a range that is off by a tenth."""
    network, x = model(), torch.rand(4, 6, generator=torch.Generator().manual_seed(5)) * 2 - 1
    with torch.no_grad():
        expected = network(x)
        network[1] = PolynomialActivation(fit("relu", 2.2, 4))
        assert float((network(x) - expected).abs().max()) > 1e-3
