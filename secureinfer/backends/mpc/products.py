"""Exact products over Z_2^k, k up to 64: matrices, linear layers and convolutions of int64 ring elements.

`ring_bits` is k: the result equals the product modulo 2**k. Its bits from k up are unspecified unless k is 64, and less
is computed for a smaller k. A right operand that serves many products, a weight or a session's mask, is prepared once.
The method is chosen by limbs and selection; `method` forces one, for tests and benchmarks. Nothing here depends on the
values of x, and only `prepare` looks at those of w. Runs on the device of x; not yet run on a GPU.

Errors: InputError for operands that do not fit each other, RangeError for a weight wider than it was said to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import InputError, RangeError
from . import patches, selection
from .limbs import Method

# Up to so many multiply-adds torch's int64 product takes less time than one cut into limbs.
TINY = 1 << 17
# Left rows and int32 sums of one block; larger products go block by block.
BLOCK_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class Factor:
    """A right operand made ready once. Make one by `prepare`, `prepare_linear` or `prepare_conv`.

    weight: [K, N] or [groups, K, N], int8 or int64. width: |w| < 2**(width - 1), or any int8. kernel: of a convolution,
    whose K is (kernel places, input channels of a group). Limbs are made when a method first needs them, and kept:
    about the size of the weight for each method in use.
    """

    weight: torch.Tensor
    width: int
    kernel: tuple[int, ...] = ()
    _forms: dict[str, Any] = field(default_factory=dict, repr=False)
    _wide: torch.Tensor | None = field(default=None, repr=False)

    @property
    def groups(self) -> int:
        return self.weight.shape[0] if self.weight.dim() == 3 else 1

    def form(self, method: Method) -> Any:
        if (made := self._forms.get(method.name)) is None:
            weight = self.weight if self.weight.dim() == 3 else self.weight.unsqueeze(0)
            made = self._forms[method.name] = method.form(weight, self.width)
        return made


def prepare(w: torch.Tensor, bits: int | None = None) -> Factor:
    """w as a right operand: int8, or int64 with |w| < 2**(bits - 1), any int64 without bits. [K, N] or [groups, K, N]."""
    return _factor(w, bits, ())


def prepare_linear(w: torch.Tensor, bits: int | None = None) -> Factor:
    """w [N, K] of a linear layer, for `linear`."""
    if w.dim() != 2:
        raise InputError(f"the weight of a linear layer has two dimensions, not {w.dim()}")
    return _factor(w.t(), bits, ())


def prepare_conv(w: torch.Tensor, groups: int = 1, bits: int | None = None) -> Factor:
    """w [O, C / groups, kh, kw] for `conv2d`, or [O, C / groups, k] for `conv1d`."""
    if w.dim() not in (3, 4) or groups < 1 or w.shape[0] % groups:
        raise InputError(f"a weight of shape {tuple(w.shape)} is not a convolution's in {groups} groups")
    kernel = tuple(w.shape[2:])
    matrix = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1).permute(0, 3, 2, 1)
    return _factor(matrix.reshape(groups, -1, w.shape[0] // groups), bits, kernel)


def _factor(w: torch.Tensor, bits: int | None, kernel: tuple[int, ...]) -> Factor:
    if w.dtype not in (torch.int8, torch.int64) or w.dim() not in (2, 3):
        raise InputError(
            f"a right operand is int8 or int64, [K, N] or [groups, K, N], not {w.dtype} of {tuple(w.shape)}"
        )
    if bits is not None and not 1 <= bits <= 64:
        raise InputError(f"a width is 1 to 64 bits, not {bits}")
    if w.dtype == torch.int8:
        width = 8
    elif bits is None or bits == 64:
        width = 64
    else:
        width = bits
        if not w.is_meta and w.numel():
            low, high = (int(v) for v in torch.aminmax(w))
            if max(-low, high) >= 1 << (bits - 1):
                raise RangeError(f"a weight said to have {bits} bits has values beyond them")
    small = w.numel() <= TINY and not w.is_meta and w.device.type == "cpu"
    return Factor(w, width, kernel, _wide=w.long().contiguous() if small else None)


def matmul(
    x: torch.Tensor, w: Factor | torch.Tensor, ring_bits: int = 64, *, method: str | None = None
) -> torch.Tensor:
    """x [..., M, K] int64 times w modulo 2**ring_bits, int64.

    w: a Factor [K, N]; a Factor [groups, K, N] for x [..., groups, M, K]; or a tensor, of which leading dimensions
    broadcast against x's as in torch.matmul. x may also be [K].
    """
    weight = w.weight if isinstance(w, Factor) else w
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), w, ring_bits, method=method).squeeze(-2)
    _check(x, weight, ring_bits)
    if x.shape[-1] != weight.shape[-2]:
        raise InputError(f"{tuple(x.shape)} and {tuple(weight.shape)} do not share an inner dimension")
    if method is None and x.device.type == "cpu" and x.numel() * weight.shape[-1] <= TINY:
        wide = w._wide if isinstance(w, Factor) else w.long()
        if wide is not None and (wide.dim() == 2 or wide.shape[:-2] == x.shape[:-2]):
            return torch.matmul(x, wide)
    if weight.dim() == 2:
        shape = (*x.shape[:-1], weight.shape[1])
        if x.is_meta or x.numel() == 0 or weight.numel() == 0:
            return torch.zeros(shape, dtype=torch.int64, device=x.device)
        return _product(x.reshape(1, -1, weight.shape[0]), w, ring_bits, method).reshape(shape)
    return _batched(x, w, weight, ring_bits, method)


def linear(
    x: torch.Tensor, w: Factor | torch.Tensor, ring_bits: int = 64, *, method: str | None = None
) -> torch.Tensor:
    """x [..., K] times the transpose of w [N, K] (a tensor, or what `prepare_linear` made of it)."""
    if isinstance(w, torch.Tensor):
        if w.dim() != 2:
            raise InputError(f"the weight of a linear layer has two dimensions, not {w.dim()}")
        w = w.t()
    return matmul(x, w, ring_bits, method=method)


def conv2d(
    x: torch.Tensor,
    w: Factor | torch.Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    ring_bits: int = 64,
    *,
    method: str | None = None,
) -> torch.Tensor:
    """2-d cross-correlation of x [N, C, H, W] with w [O, C / groups, kh, kw] (a tensor or what `prepare_conv` made)."""
    if x.dim() != 4:
        raise InputError(f"an input of a 2-d convolution has four dimensions, not {x.dim()}")
    return _convolution(x, w, (stride, padding, dilation), groups, ring_bits, method)


def conv1d(
    x: torch.Tensor,
    w: Factor | torch.Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    ring_bits: int = 64,
    *,
    method: str | None = None,
) -> torch.Tensor:
    """1-d cross-correlation of x [N, C, L] with w [O, C / groups, k] (a tensor or what `prepare_conv` made of it)."""
    if x.dim() != 3:
        raise InputError(f"an input of a 1-d convolution has three dimensions, not {x.dim()}")
    return _convolution(x, w, (stride, padding, dilation), groups, ring_bits, method)


def _check(x: torch.Tensor, w: torch.Tensor, ring_bits: int) -> None:
    if x.dtype != torch.int64 or w.dtype not in (torch.int8, torch.int64):
        raise InputError(f"products are of int64 by int64 or int8, not of {x.dtype} by {w.dtype}")
    if w.dim() < 2:
        raise InputError("a right operand has at least two dimensions")
    if not 1 <= ring_bits <= 64:
        raise InputError(f"a ring has 1 to 64 bits, not {ring_bits}")
    if x.device != w.device and not x.is_meta:
        raise InputError(f"operands are on {x.device} and {w.device}; move them to one device")


def _method(
    size: selection.Size, w: Factor | torch.Tensor, ring_bits: int, name: str | None, device: torch.device
) -> tuple[Method, Any]:
    """The method for a product and the form of w for it."""
    width = w.width if isinstance(w, Factor) else 8 if w.dtype == torch.int8 else 64
    if name is not None:
        method = selection.forced(name, device)
    else:
        method = selection.choose(device, size, width, ring_bits, isinstance(w, Factor))
    if isinstance(w, Factor):
        return method, w.form(method)
    return method, method.form(w if w.dim() == 3 else w.unsqueeze(0), width)


def _product(x: torch.Tensor, w: Factor | torch.Tensor, ring_bits: int, name: str | None) -> torch.Tensor:
    """x [G, M, K] by w [G, K, N], or [K, N] where G is 1."""
    weight = w.weight if isinstance(w, Factor) else w
    (groups, m, k), n = x.shape, weight.shape[-1]
    method, form = _method(selection.Size(groups, m, k, n, x.numel()), w, ring_bits, name, x.device)
    rows = max(1, BLOCK_BYTES // (groups * max(8 * k, 4 * -(-ring_bits // 8) * n)))
    if rows >= m:
        return method.combine(method.split(x, form, ring_bits), form, ring_bits)
    out = torch.empty((groups, m, n), dtype=torch.int64, device=x.device)
    for i in range(0, m, rows):
        part = x[:, i : i + rows]
        out[:, i : i + rows] = method.combine(method.split(part, form, ring_bits), form, ring_bits)
    return out


def _batched(
    x: torch.Tensor, w: Factor | torch.Tensor, weight: torch.Tensor, ring_bits: int, name: str | None
) -> torch.Tensor:
    (m, k), n = x.shape[-2:], weight.shape[-1]
    try:
        batch = tuple(torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2]))  # type: ignore[no-untyped-call]
    except RuntimeError as e:
        raise InputError(f"{tuple(x.shape)} and {tuple(weight.shape)} do not broadcast") from e
    shape = (*batch, m, n)
    if x.is_meta or x.numel() == 0 or weight.numel() == 0:
        return torch.zeros(shape, dtype=torch.int64, device=x.device)
    if isinstance(w, Factor):
        groups = weight.shape[0]
        if x.dim() < 3 or x.shape[-3] != groups:
            raise InputError(f"a weight of {groups} groups takes [..., {groups}, M, K], not {tuple(x.shape)}")
        # the rows of all outer dimensions of one group stand together
        rows = x.reshape(-1, groups, m, k).transpose(0, 1).reshape(groups, -1, k)
        out = _product(rows, w, ring_bits, name).view(groups, -1, m, n)
        return out.transpose(0, 1).reshape(shape)
    left = x.expand(*batch, m, k).reshape(-1, m, k)
    right = weight.expand(*batch, k, n).reshape(-1, k, n)
    return _product(left, right, ring_bits, name).view(shape)


def _convolution(
    x: torch.Tensor,
    w: Factor | torch.Tensor,
    geometry: tuple[Any, Any, Any],
    groups: int | None,
    ring_bits: int,
    name: str | None,
) -> torch.Tensor:
    """x [N, C, *places] with one or two places."""
    factor = w if isinstance(w, Factor) else prepare_conv(w, groups or 1)
    if len(factor.kernel) != x.dim() - 2:
        raise InputError(
            f"a kernel of {len(factor.kernel)} dimensions for an input of {tuple(x.shape)}; see prepare_conv"
        )
    if groups is not None and groups != factor.groups:
        raise InputError(f"a weight prepared for {factor.groups} groups is used with {groups}")
    _check(x, factor.weight, ring_bits)
    window = patches.window(x.shape, factor.kernel, *geometry)
    (g, inner, n), places = factor.weight.shape, window.kernel[0] * window.kernel[1]
    if x.shape[1] * places != g * inner:
        raise InputError(f"{x.shape[1]} channels for a weight of {g} groups of {inner // max(places, 1)}")
    shape = (x.shape[0], g * n, *window.out[2 - len(factor.kernel) :])
    if x.is_meta or 0 in shape or inner == 0:
        return torch.zeros(shape, dtype=torch.int64, device=x.device)
    image = x if x.dim() == 4 else x.unsqueeze(2)
    if inner == places and g > 1 and name is None:
        return patches.depthwise(image, factor.weight.long(), window).reshape(shape)
    size = selection.Size(g, x.shape[0] * window.out[0] * window.out[1], inner, n, x.numel())
    method, form = _method(size, w if isinstance(w, Factor) else factor.weight, ring_bits, name, x.device)
    limbs = method.split(patches.padded(image, window), form, ring_bits)
    out = torch.empty((x.shape[0], g, n, *window.out), dtype=torch.int64, device=x.device)
    for block, left in patches.blocks(limbs, g, window, 4 * -(-ring_bits // 8) * n):
        part = method.combine(left, form, ring_bits)
        target = out[block]  # [images, G, N, oh, ow]
        target.copy_(part.view(g, target.shape[0], *target.shape[3:], n).permute(1, 0, 4, 2, 3))
    return out.reshape(shape)
