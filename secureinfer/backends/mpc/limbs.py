"""Products of int64 matrices over Z_2^k from products of short limbs, which processors multiply much faster.

Each method cuts the left operand into limbs (`split`), holds the right operand in a form made once (`form`), and adds
up the products of limbs that reach below 2**k (`combine`). All are exact modulo 2**k; bits from k up are unspecified
unless k is 64. Whether a back end really computes what a method relies on is for selection.py to test.

Shapes: left [G, M, K], right [G, K, N], limbs [S, G, M, K]; G is a batch, of convolution groups for example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .fast import fused

BYTE_SIGNS = -0x7F7F7F7F7F7F7F80  # 0x80 in each byte
MAX_INT32 = (1 << 31) - 1
# Longest sums in one float64 product; longer ones are cut, since each further doubling costs a bit of every limb.
FLOAT_INNER = 2048


@dataclass(frozen=True)
class Work:
    """What a product costs. products: matrix products of limbs, as multiples of M K N, in `calls` calls for each of G.

    packing: what ordering a left limb for the processor costs, in multiply-adds (as measured with AVX-512).
    split: limbs made of each left element. sums: additions into each element of the result. form: size of the form,
    in int64 elements for each element of w.
    """

    products: int
    calls: int
    packing: int
    split: int
    sums: int
    form: float


class Method(Protocol):
    """One way to multiply. `width` is the signed width of the right operand: |w| < 2**(width - 1), or any int8."""

    name: str
    longest: int
    """The longest sum that it forms in one go; longer ones are cut."""

    def form(self, w: torch.Tensor, width: int) -> Any:
        """w [G, K, N], int64 or int8, as `combine` takes it."""

    def split(self, x: torch.Tensor, form: Any, ring_bits: int) -> torch.Tensor:
        """Limbs [S, *x.shape] of int64 x; elementwise."""

    def combine(self, limbs: torch.Tensor, form: Any, ring_bits: int) -> torch.Tensor:
        """[G, M, N] from limbs [S, G, M, K]. The result is a new tensor."""

    def work(self, inner: int, width: int, ring_bits: int) -> Work: ...


class Int64:
    """Torch's own product of int64 matrices. CUDA has none."""

    name = "int64"
    longest = 64  # wraps around by itself at any length

    def form(self, w: torch.Tensor, width: int) -> torch.Tensor:
        return w.long().contiguous()

    def split(self, x: torch.Tensor, form: torch.Tensor, ring_bits: int) -> torch.Tensor:
        return x.unsqueeze(0)

    def combine(self, limbs: torch.Tensor, form: torch.Tensor, ring_bits: int) -> torch.Tensor:
        if form.shape[0] == 1:
            return torch.mm(limbs[0, 0], form[0]).unsqueeze(0)
        return torch.bmm(limbs[0], form)

    def work(self, inner: int, width: int, ring_bits: int) -> Work:
        return Work(1, 1, 0, 0, 0, 1.0)


# --- bytes ---------------------------------------------------------------------------------------------------------


def multiply_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] uint8 or int8 times b [K, N] int8, int32. CUDA's needs M > 16, K and N multiples of 8, and int8 a."""
    if a.is_cuda:
        m, k, n = a.shape[0], a.shape[1], b.shape[1]
        a = torch.nn.functional.pad(a, (0, -k % 8, 0, max(0, 17 - m)))
        b = torch.nn.functional.pad(b, (0, -n % 8, 0, -k % 8))
        return torch._int_mm(a.contiguous(), b.contiguous())[:m, :n]
    return torch._int_mm(_in_rows(a), _in_rows(b))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """x with whole rows one after the other. Of overlapping ones, as patches can be, torch 2.14 makes wrong products:

    oneDNN refuses them, and so it does odd strides of a single row or column; what runs in its place misreads them.
    """
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def byte_digits(width: int) -> int:
    """Balanced digits (-128 to 127) that hold |w| < 2**(width - 1): two hold up to 127 * 257 and no 16-bit number."""
    return 1 if width <= 8 else min(width // 8 + 1, 8)


def _bytes(x: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` lowest bytes of int64 x as uint8 [count, *x.shape], lowest first (little-endian processors)."""
    x = x.contiguous()
    flat = x.as_strided((x.numel(),), (1,))  # a dimension of size 1 may have any stride, which `view` refuses
    return flat.view(torch.uint8).view(*x.shape, 8)[..., :count].movedim(-1, 0).contiguous()


def _signed_bytes(x: torch.Tensor, count: int) -> torch.Tensor:
    """The same as int8 digits of -128 to 127: the carries come from one addition, and each byte is its digit + 128."""
    return _bytes((x + BYTE_SIGNS) ^ BYTE_SIGNS, count).view(torch.int8)


def _shift_add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of parts[s] << 8 s, int64, from exact int32 sums. Overwrites parts[0] and parts[4].

    Parts from 2**32 up count modulo 2**32 only, so they are added as int32, which is three times as fast.
    """
    low = parts[0] if len(parts) <= 4 else parts[0].long()
    for s, part in enumerate(parts[1:4], 1):
        low.add_(part, alpha=1 << 8 * s)
    if len(parts) <= 4:
        return low.long()
    high = parts[4]
    for s, part in enumerate(parts[5:], 1):
        high.add_(part, alpha=1 << 8 * s)
    return low.add_(high, alpha=1 << 32)


class Int8:
    """Bytes of x times balanced byte digits of w in int32.

    One digit: all bytes of x in one product. Several: for each sum s of the places of byte and digit, the bytes
    s - d and the digits d stand side by side along K, so that one product gives the whole sum.
    signed: x in balanced digits too, for processors that multiply only int8 by int8.
    """

    def __init__(self, signed: bool) -> None:
        self.name = "int8-signed" if signed else "int8"
        self._signed = signed
        # The longest sum of products that fits int32: 65,793 of 255 * 128 and 131,071 of 128 * 128.
        self.longest = MAX_INT32 // (128 * (128 if signed else 255))

    def form(self, w: torch.Tensor, width: int) -> torch.Tensor:
        """[G, D, K, N], highest digit first, so that the digits below any place are the last ones."""
        if w.dtype == torch.int8:
            return w.contiguous().unsqueeze(1)
        digits = byte_digits(width)
        if digits == 1:
            return w.to(torch.int8).contiguous().unsqueeze(1)
        return _signed_bytes(w, digits).flip(0).transpose(0, 1).contiguous()

    def split(self, x: torch.Tensor, form: torch.Tensor, ring_bits: int) -> torch.Tensor:
        count = -(-ring_bits // 8)
        return _signed_bytes(x, count) if self._signed else _bytes(x, count)

    def combine(self, limbs: torch.Tensor, form: torch.Tensor, ring_bits: int) -> torch.Tensor:
        groups = [self._group(limbs[:, g], form[g]) for g in range(form.shape[0])]
        return groups[0].unsqueeze(0) if len(groups) == 1 else torch.stack(groups)

    def _group(self, limbs: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
        inner, chunk = form.shape[1], self.longest // form.shape[0]
        if inner <= chunk:
            return _shift_add(_byte_sums(limbs, form))
        spans = [slice(k, k + chunk) for k in range(0, inner, chunk)]
        total = _shift_add(_byte_sums(limbs[:, :, spans[0]], form[:, spans[0]]))
        for span in spans[1:]:
            total += _shift_add(_byte_sums(limbs[:, :, span], form[:, span]))
        return total

    def work(self, inner: int, width: int, ring_bits: int) -> Work:
        count, digits = -(-ring_bits // 8), byte_digits(width)
        pairs = sum(min(s + 1, digits) for s in range(count))
        chunks = -(-inner // (self.longest // digits))
        return Work(pairs, chunks * (1 if digits == 1 else count), 64, count, count * chunks, digits / 8)


def _byte_sums(limbs: torch.Tensor, form: torch.Tensor) -> Sequence[torch.Tensor]:
    """For each place s the products of byte s - d and digit d, added up: int32 [M, N] each."""
    count, rows, inner = limbs.shape
    digits, _, columns = form.shape
    if digits == 1:
        return multiply_bytes(limbs.reshape(-1, inner), form[0]).view(count, rows, columns).unbind()
    sums = []
    for s in range(count):
        used = min(s + 1, digits)
        left = limbs[s + 1 - used : s + 1].transpose(0, 1).reshape(rows, -1)
        sums.append(multiply_bytes(left, form[digits - used :].reshape(-1, columns)))
    return sums


# --- float64 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatPlan:
    """x in `left` limbs of left_bits, w in `right` limbs of right_bits, all balanced; sums of at most `inner` products.

    (2**(left_bits - 1)) (2**(right_bits - 1)) inner <= 2**53: every partial sum is an integer that float64 holds.
    """

    left_bits: int
    right_bits: int
    right: int
    inner: int

    def pairs(self, ring_bits: int) -> list[tuple[int, int, int]]:
        """(limb of x, limb of w, place) of the products that reach below 2**ring_bits."""
        left = -(-ring_bits // self.left_bits)
        all_pairs = [
            (i, j, i * self.left_bits + j * self.right_bits) for i in range(left) for j in range(self.right)
        ]
        return [p for p in all_pairs if p[2] < ring_bits]


def float_plan(inner: int, width: int) -> FloatPlan:
    """The limb sizes with the fewest products modulo 2**64."""
    chunk = max(1, min(inner, FLOAT_INNER))
    both = 53 + 2 - math.ceil(math.log2(chunk))
    plans = []
    for right in (1, 2, 3, 4):
        right_bits = (
            width if right == 1 else -(-(width + 1) // right)
        )  # a balanced low limb carries one into the next
        if right_bits < both - 8:
            plans.append(FloatPlan(min(both - right_bits, 53), right_bits, right, chunk))
    return min(plans, key=lambda p: len(p.pairs(64)))


@dataclass(frozen=True)
class FloatForm:
    plan: FloatPlan
    limbs: torch.Tensor  # [right, G, K, N]


def _balanced(x: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` limbs of -2**(bits - 1) to 2**(bits - 1) - 1 as float64; they add up to x modulo 2**(count * bits)."""
    limbs: torch.Tensor = fused.run(_digits, x.long().reshape(-1), bits, count)
    return limbs.view(count, *x.shape)


def _digits(x: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    digits, rest = [], x
    for _ in range(count):
        digit = ((rest + half) & mask) - half
        digits.append(digit.double())
        rest = (rest - digit) >> bits
    return torch.stack(digits)


class Float64:
    """Limbs of about 22 bits whose products and sums float64 holds exactly."""

    name = "float64"
    longest = FLOAT_INNER

    def form(self, w: torch.Tensor, width: int) -> FloatForm:
        plan = float_plan(w.shape[1], 8 if w.dtype == torch.int8 else width)
        return FloatForm(plan, _balanced(w, plan.right_bits, plan.right))

    def split(self, x: torch.Tensor, form: FloatForm, ring_bits: int) -> torch.Tensor:
        bits = form.plan.left_bits
        return _balanced(x, bits, -(-ring_bits // bits))

    def combine(self, limbs: torch.Tensor, form: FloatForm, ring_bits: int) -> torch.Tensor:
        plan, total = form.plan, None
        for k in range(0, limbs.shape[3], plan.inner):
            span = slice(k, k + plan.inner)
            for i, j, place in plan.pairs(ring_bits):
                part = (
                    torch.matmul(limbs[i, :, :, span], form.limbs[j, :, span])
                    .long()
                    .bitwise_left_shift_(place)
                )
                total = part if total is None else total.add_(part)
        if total is None:
            return torch.zeros(
                (*limbs.shape[1:3], form.limbs.shape[3]), dtype=torch.int64, device=limbs.device
            )
        return total

    def work(self, inner: int, width: int, ring_bits: int) -> Work:
        plan = float_plan(inner, width)
        pairs = len(plan.pairs(ring_bits))
        calls = pairs * -(-inner // plan.inner)
        return Work(pairs, calls, 64, 2 * -(-ring_bits // plan.left_bits), 2 * calls, plan.right)


METHODS: dict[str, Method] = {m.name: m for m in (Int64(), Int8(False), Int8(True), Float64())}
