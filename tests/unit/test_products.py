"""Products over the ring: every method equals Python's integers, an inexact back end is refused, bad operands are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secureinfer.backends.mpc import limbs, patches, products, ring, selection
from secureinfer.bench.products import Row, as_json, table
from secureinfer.errors import InputError, RangeError

CPU = torch.device("cpu")
METHODS = [None, *limbs.METHODS]
WIDTHS = st.sampled_from([8, 9, 15, 16, 20, 24, 33, 56, 63, 64])
RINGS = st.integers(1, 64)
EXTREMES = torch.tensor(selection.LEFT)


def ring_elements(*shape: int) -> torch.Tensor:
    """Uniform, with extremes strewn in."""
    x = torch.randint(-(1 << 63), (1 << 63) - 1, shape)
    extremes = EXTREMES[torch.randint(len(EXTREMES), shape)]
    return torch.where(torch.rand(shape) < 0.3, extremes, x)


def weights(width: int, *shape: int) -> torch.Tensor:
    """Uniform within the width, with both ends strewn in; int8 of all values at width 8."""
    if width == 8:
        w, ends = torch.randint(-128, 128, shape), (-128, 127)
    elif width == 64:
        return ring_elements(*shape)
    else:
        bound = 1 << (width - 1)
        w, ends = torch.randint(1 - bound, bound, shape), (1 - bound, bound - 1)
    end = torch.tensor(ends)[torch.randint(2, shape)]
    w = torch.where(torch.rand(shape) < 0.3, end, w)
    return w.to(torch.int8) if width == 8 else w


def bits_of(width: int) -> int | None:
    return None if width in (8, 64) else width


def same(a: torch.Tensor, b: torch.Tensor, ring_bits: int) -> bool:
    return torch.equal(a << (64 - ring_bits), b << (64 - ring_bits))


def python_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    columns = list(zip(*w.tolist(), strict=True))
    rows = [[sum(a * b for a, b in zip(row, c, strict=True)) for c in columns] for row in x.tolist()]
    return torch.tensor([[(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in row] for row in rows])


@pytest.fixture
def fresh() -> Iterator[None]:
    selection.forget()
    yield
    selection.forget()


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 20),
    k=st.integers(1, 70),
    n=st.integers(1, 20),
    width=WIDTHS,
    ring_bits=RINGS,
    seed=st.integers(0, 999),
)
def test_every_method_equals_pythons_integers(
    method: str | None, m: int, k: int, n: int, width: int, ring_bits: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w = ring_elements(m, k), weights(width, k, n)
    expected = python_product(x, w)
    prepared = products.prepare(w, bits_of(width))
    assert same(products.matmul(x, prepared, ring_bits, method=method), expected, ring_bits)
    assert same(products.matmul(x, w, ring_bits, method=method), expected, ring_bits)
    transposed = products.prepare_linear(w.t().contiguous(), bits_of(width))
    assert same(products.linear(x, transposed, ring_bits, method=method), expected, ring_bits)
    assert same(products.linear(x, w.t(), ring_bits, method=method), expected, ring_bits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [8, 20, 64])
def test_the_longest_sums_of_extremes_are_exact_and_longer_ones_are_cut(
    method: str | None, width: int
) -> None:
    ends = {8: (-128, 127), 20: (1 - (1 << 19), (1 << 19) - 1), 64: (-(1 << 63), (1 << 63) - 1)}[width]
    for inner in (2048, 2049, 65_793 // limbs.byte_digits(width), 65_794, 131_080):
        x = EXTREMES[:, None].expand(-1, inner)
        w = torch.tensor(ends).expand(inner, 2)
        w = w.to(torch.int8) if width == 8 else w
        expected = inner * EXTREMES[:, None] * torch.tensor(ends)[None, :]
        assert torch.equal(products.matmul(x, products.prepare(w, bits_of(width)), method=method), expected)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.sampled_from(
        [((), (3,)), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((4,), ())]
    ),
    m=st.integers(1, 9),
    k=st.integers(1, 40),
    n=st.integers(1, 9),
    ring_bits=RINGS,
)
def test_batches_broadcast_as_in_torch(
    method: str | None, batch: tuple[tuple[int, ...], tuple[int, ...]], m: int, k: int, n: int, ring_bits: int
) -> None:
    x, w = ring_elements(*batch[0], m, k), ring_elements(*batch[1], k, n)
    assert same(products.matmul(x, w, ring_bits, method=method), torch.matmul(x, w), ring_bits)
    if len(batch[1]) == 1 and batch[0][-1:] == batch[1]:
        assert same(
            products.matmul(x, products.prepare(w), ring_bits, method=method), torch.matmul(x, w), ring_bits
        )


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=st.sampled_from([1, 2]), width=WIDTHS, ring_bits=RINGS)
def test_convolutions_equal_torchs_on_the_processor(
    method: str | None, data: st.DataObject, places: int, width: int, ring_bits: int
) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    groups, inner, outer = draw(1, 4), draw(1, 4), draw(1, 3)
    kernel = [draw(1, 4) for _ in range(places)]
    stride, padding, dilation = ([draw(low, 3) for _ in range(places)] for low in (1, 0, 1))
    size = [d * (k - 1) + 1 + draw(0, 9) for d, k in zip(dilation, kernel, strict=True)]
    x = ring_elements(draw(1, 3), groups * inner, *size)
    w = weights(width, groups * outer, inner, *kernel)
    torchs: Callable[..., torch.Tensor] = (torch.conv1d, torch.conv2d)[places - 1]
    ours: Callable[..., torch.Tensor] = (products.conv1d, products.conv2d)[places - 1]
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    expected = torchs(x, w.long(), None, **options)
    prepared = products.prepare_conv(w, groups, bits_of(width))
    for weight in (w, prepared):
        result = ours(x, weight, **options, ring_bits=ring_bits, method=method)
        assert result.is_contiguous() and same(result, expected, ring_bits)
    assert torch.equal(ring.apply(f"conv{places}d", x, w, options), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [8, 64])
def test_patches_that_overlap_as_rows_of_a_matrix(method: str | None, width: int) -> None:
    # One column of one channel: the patches are a matrix without a copy, whose columns lie in each other.
    x, w = ring_elements(1, 1, 11, 5), weights(width, 3, 1, 4, 1)
    expected = torch.conv2d(x, w.long(), padding=(1, 3))
    assert torch.equal(products.conv2d(x, w, 1, (1, 3), method=method), expected)


def test_a_convolution_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = ring_elements(5, 6, 17, 13), weights(8, 4, 3, 3, 3)
    expected = torch.conv2d(x, w.long(), padding=1, groups=2)
    for size in (1, 5000, 40_000, 1 << 22):
        monkeypatch.setattr(patches, "BLOCK_BYTES", size)
        assert torch.equal(products.conv2d(x, w, 1, 1, 1, 2, method="int8"), expected)


def test_a_long_product_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = ring_elements(2, 50, 30), weights(8, 2, 30, 7)
    expected = torch.matmul(x, w.long())
    monkeypatch.setattr(products, "BLOCK_BYTES", 4096)
    for method in limbs.METHODS:
        assert torch.equal(products.matmul(x, w, method=method), expected)


def test_large_products_are_exact_whatever_is_chosen() -> None:
    x = ring_elements(64, 768)
    for width in (8, 20, 64):
        w = weights(width, 768, 320)
        for ring_bits in (64, 48, 40, 32):
            assert same(
                products.matmul(x, products.prepare(w, bits_of(width)), ring_bits),
                torch.matmul(x, w.long()),
                ring_bits,
            )
    assert torch.equal(ring.apply("linear", x, w.t(), {}), torch.matmul(x, w))
    assert torch.equal(ring.apply("matmul", x, w, {}), torch.matmul(x, w))


def test_operands_need_not_be_contiguous() -> None:
    x, w = ring_elements(40, 30).t()[:, ::2], weights(8, 9, 40).t()[::2]
    for method in METHODS:
        assert torch.equal(products.matmul(x, w, method=method), torch.matmul(x, w.long()))
    single = ring_elements(3, 2)[:, :1]  # contiguous as torch has it, with stride 2
    for method in METHODS:
        assert torch.equal(products.matmul(single[:1], single[:1], method=method), single[:1] * single[:1])
    image = ring_elements(2, 9, 8, 6).permute(0, 2, 1, 3)
    kernel = weights(8, 5, 8, 3, 3)
    for method in METHODS:
        assert torch.equal(products.conv2d(image, kernel, method=method), torch.conv2d(image, kernel.long()))


# --- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("m,k,n", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_operands_give_zeros(method: str | None, m: int, k: int, n: int) -> None:
    x, w = ring_elements(m, k), ring_elements(k, n)
    for right in (w, products.prepare(w), products.prepare(w.clamp(-99, 99), 20)):
        assert torch.equal(products.matmul(x, right, method=method), torch.zeros(m, n, dtype=torch.int64))
    assert products.matmul(ring_elements(0, m, k), w, method=method).shape == (0, m, n)


def test_meta_tensors_give_shapes() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for w in (meta(7, 5), meta(7, 5, dtype=torch.int8), weights(8, 7, 5)):
        for right in (w, products.prepare(w)):
            result = products.matmul(meta(2, 3, 7), right)
            assert result.is_meta and result.shape == (2, 3, 5)
        assert products.linear(meta(3, 5), w).shape == (3, 7)
    assert products.prepare(meta(7, 5), 20).width == 20
    assert products.matmul(meta(2, 3, 4, 7), meta(3, 7, 5)).shape == (2, 3, 4, 5)
    for kernel in (meta(6, 2, 3, 3), weights(8, 6, 2, 3, 3)):
        result = products.conv2d(meta(2, 4, 9, 8), kernel, (2, 1), 1, 1, 2)
        assert result.is_meta and result.shape == (2, 6, 5, 8)
        assert products.conv2d(meta(2, 4, 9, 8), products.prepare_conv(kernel, 2)).shape == (2, 6, 7, 6)
    assert products.conv1d(meta(2, 4, 9), meta(6, 4, 3)).shape == (2, 6, 7)


def test_a_vector_is_a_row() -> None:
    x, w = ring_elements(30), ring_elements(30, 4)
    assert torch.equal(products.matmul(x, products.prepare(w)), torch.matmul(x, w))
    assert torch.equal(ring.apply("matmul", w.t(), x, {}), torch.matmul(w.t(), x))


# --- what is refused -----------------------------------------------------------------------------------------------

X, W = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(6, 3, dtype=torch.int64)
IMAGE, KERNEL = torch.zeros(1, 4, 5, 5, dtype=torch.int64), torch.zeros(6, 2, 3, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: products.matmul(X.float(), W),
        lambda: products.matmul(X.int(), products.prepare(W)),
        lambda: products.matmul(X, W.float()),
        lambda: products.matmul(X, W[:5]),
        lambda: products.matmul(X, products.prepare(W[:5])),
        lambda: products.matmul(X, W[:, 0]),
        lambda: products.matmul(X, W, 0),
        lambda: products.matmul(X, W, 65),
        lambda: products.matmul(X.expand(2, 4, 6), W.expand(3, 6, 3)),
        lambda: products.matmul(X, products.prepare(W.expand(3, 6, 3))),
        lambda: products.matmul(X, W, method="int7"),
        lambda: products.linear(X, W.expand(2, 6, 3)),
        lambda: products.prepare(W.float()),
        lambda: products.prepare(W[0]),
        lambda: products.prepare(W, 0),
        lambda: products.prepare(W, 65),
        lambda: products.prepare_linear(W[0]),
        lambda: products.prepare_conv(W),
        lambda: products.prepare_conv(KERNEL, 4),
        lambda: products.conv2d(IMAGE, KERNEL),
        lambda: products.conv2d(IMAGE, KERNEL, groups=3),
        lambda: products.conv2d(IMAGE, products.prepare_conv(KERNEL, 2), groups=1),
        lambda: products.conv2d(IMAGE, KERNEL, 0, groups=2),
        lambda: products.conv2d(IMAGE, KERNEL, 1, -1, groups=2),
        lambda: products.conv2d(IMAGE, KERNEL, 1, "same", groups=2),
        lambda: products.conv2d(IMAGE, KERNEL, 1, 0, 3, groups=2),
        lambda: products.conv2d(IMAGE[0], KERNEL, groups=2),
        lambda: products.conv1d(IMAGE, KERNEL, groups=2),
        lambda: products.conv1d(IMAGE[0], KERNEL, groups=2),
    ],
)
def test_operands_that_do_not_fit_are_a_typed_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        wrong()


@pytest.mark.parametrize(
    "bits,value", [(8, 128), (8, -128), (20, 1 << 19), (2, -2), (63, -(1 << 62)), (63, -(1 << 63))]
)
def test_a_weight_wider_than_said_is_refused(bits: int, value: int) -> None:
    w = torch.zeros(3, 2, dtype=torch.int64)
    w[1, 1] = value
    with pytest.raises(RangeError, match=f"{bits} bits"):
        products.prepare(w, bits)
    assert products.prepare(w, bits + 1).width == bits + 1


# --- the choice ----------------------------------------------------------------------------------------------------


def test_the_methods_pass_their_test_here() -> None:
    assert selection.usable("int64", CPU) and selection.usable("float64", CPU)


def _saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As processors without VNNI do it: pairs of neighbours are added up in 16 bits, with saturation."""
    a, b = a.int(), b.int()
    if a.shape[1] % 2:
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    pairs = a[:, 0::2, None] * b[None, 0::2] + a[:, 1::2, None] * b[None, 1::2]
    return pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(1, dtype=torch.int32)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("method", ["int8", "int8-signed"])
def test_a_back_end_that_saturates_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limbs, "multiply_bytes", _saturating)
    assert not selection.usable(method, CPU)
    assert method not in selection.rates(CPU)
    x, w = ring_elements(64, 300), weights(8, 300, 200)
    assert torch.equal(products.matmul(x, w), torch.matmul(x, w.long()))
    with pytest.raises(InputError, match="not exact"):
        products.matmul(x, w, method=method)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "fault",
    [
        lambda out, inner: out + (inner > 60_000),
        lambda out, inner: torch.where(out == -128 * 255, out + 1, out),
        lambda out, inner: out.float().int(),
    ],
    ids=["long sums", "one value", "float32"],
)
def test_other_inexact_back_ends_are_refused(
    fault: Callable[[torch.Tensor, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = limbs.multiply_bytes
    monkeypatch.setattr(limbs, "multiply_bytes", lambda a, b: fault(exact(a, b), a.shape[1]).int())
    assert not selection.usable("int8", CPU)


@pytest.mark.usefixtures("fresh")
def test_a_device_without_a_method_does_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(limbs, "multiply_bytes", missing)
    assert set(selection.rates(CPU)) == {"int64", "float64"}


@pytest.mark.usefixtures("fresh")
def test_signed_bytes_take_the_place_of_unsigned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "passes", lambda method, device: method.name != "int8")
    assert "int8-signed" in selection.rates(CPU)


def test_the_choice_is_the_shortest_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**slow: float) -> str:
        rates = {
            n: selection.Rates(1e-6, slow.get(n, 1.0) * 1e-12, 1e-12) for n in ("int64", "int8", "float64")
        }
        monkeypatch.setattr(selection, "rates", lambda device: rates)
        monkeypatch.setattr(selection, "_choices", {})
        return selection.choose(CPU, selection.Size(1, 100, 700, 900, 70_000), 8, 40, True).name

    assert chosen() == "int64"
    assert chosen(int64=100) == "float64"
    assert chosen(int64=100, float64=100) == "int8"


def test_limbs_are_made_once() -> None:
    x, prepared = ring_elements(40, 70), products.prepare(weights(20, 70, 80), 20)
    products.matmul(x, prepared, method="int8")
    made = prepared.form(limbs.METHODS["int8"])
    assert made.shape == (1, 3, 70, 80)
    products.matmul(x, prepared, method="int8")
    assert prepared.form(limbs.METHODS["int8"]) is made


@given(width=st.integers(9, 63))
def test_byte_digits_hold_both_ends_of_a_width(width: int) -> None:
    top, digits = (1 << (width - 1)) - 1, limbs.byte_digits(width)
    assert 127 * (256**digits - 1) // 255 >= top
    assert digits <= width // 8 + 1


@given(inner=st.integers(1, 200_000), width=st.integers(2, 64))
def test_float_sums_stay_below_2_to_53(inner: int, width: int) -> None:
    plan = limbs.float_plan(inner, width)
    assert (plan.inner << (plan.left_bits - 1) << (plan.right_bits - 1)) <= 1 << 53
    assert plan.right == 1 and plan.right_bits == width or plan.right * plan.right_bits > width


# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.needs("gpu")
def test_products_on_a_gpu_equal_those_on_the_processor() -> None:
    device = torch.device("cuda")
    assert selection.usable("float64", device)
    x = ring_elements(33, 515)
    for width in (8, 20, 64):
        w = weights(width, 515, 77)
        expected = torch.matmul(x, w.long())
        prepared = products.prepare(w.to(device), bits_of(width))
        for method in (None, *(n for n in limbs.METHODS if selection.usable(n, device))):
            assert torch.equal(products.matmul(x.to(device), prepared, method=method).cpu(), expected)
    image, kernel = ring_elements(2, 6, 20, 20), weights(8, 8, 3, 3, 3)
    result = products.conv2d(image.to(device), kernel.to(device), 1, 1, 1, 2)
    assert torch.equal(result.cpu(), torch.conv2d(image, kernel.long(), padding=1, groups=2))


# --- the benchmark -------------------------------------------------------------------------------------------------


def test_the_benchmark_names_both_sides() -> None:
    rows = [Row("128x768 by 768x3072", 1, 8, 40, "chosen", 5.0, 2.5)]
    assert "float32" in table(rows) and "| 2.00 |" in table(rows)
    assert as_json(rows)["rows"][0]["ratio"] == 2.0
