"""Fraction bits that are dropped without a message, at the price of a smaller ring."""

from __future__ import annotations

import torch


def shrink(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x / 2**bits of a share known modulo 2**k, as a share known modulo 2**(k - bits); x itself for bits <= 0, shifted up.

    Every party rounds its own share to the nearest: without bias, and p parties' sum is within p / 2 units. Where the sum of
    the shares wraps, it does so by 2**k, which is 2**(k - bits) afterwards: so that no error is large, as it would be if the
    result were read in the whole ring.
    """
    if bits <= 0:
        return x << -bits if bits else x
    return (x + (1 << (bits - 1))) >> bits
