"""si.compress with si.Quantize: the numbers against torch, what the report says, and models as people have them."""

from __future__ import annotations

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import secureinfer as si
from secureinfer.backends.plaintext.engine import PlaintextEngine
from secureinfer.compression.int8 import Int8Weight, quantized

hf = pytest.mark.needs("hf")
Layers = dict[str, tuple[bool, str]]


def quantize(model: nn.Module, **how: Any) -> tuple[nn.Module, si.CompressionReport]:
    return si.compress(model, [si.Quantize(**how)])


def rows(report: si.CompressionReport) -> Layers:
    """Path -> (changed, remark)."""
    return {r.path: (r.changed, r.reason) for r in report.transforms[0].layers}


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.eval()


# The numbers.

LAYERS: dict[str, tuple[nn.Module, torch.Tensor, int]] = {
    "linear": (nn.Linear(7, 5), torch.randn(3, 7), 0),
    "linear without bias": (nn.Linear(7, 5, bias=False), torch.randn(2, 3, 7), 0),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(2, 4, 9), 0),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2), torch.randn(2, 4, 9, 8), 0),
    "padded": (nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), torch.randn(1, 3, 6, 6), 0),
    "embedding": (nn.Embedding(11, 4, padding_idx=0), torch.tensor([[0, 3, 10]]), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_with_int8_times_a_scale_a_channel(name: str) -> None:
    layer, x, dim = LAYERS[name]
    model = nn.Sequential(seeded(layer))
    small, report = quantize(model)
    inner = small[0]
    assert isinstance(inner, type(layer)) and isinstance(inner, Int8Weight)
    assert inner.weight_int8.dtype == torch.int8 and inner.weight_int8.shape == layer.weight.shape
    assert (
        inner.weight_scale.dtype == torch.float32
        and inner.weight_scale.shape == layer.weight.shape[dim : dim + 1]
    )
    assert int(inner.weight_int8.abs().amax()) == 127
    shape = [1] * layer.weight.dim()
    shape[dim] = -1
    weight = inner.weight_int8.to(torch.float32) * inner.weight_scale.reshape(shape)
    same = copy.deepcopy(layer)
    with torch.no_grad():
        same.weight.copy_(weight)
        assert torch.equal(small(x), same(x))
        half_step = inner.weight_scale.reshape(shape) / 2
        assert bool(((weight - layer.weight).abs() <= half_step * (1 + 1e-6)).all())
        relative = float((weight - layer.weight).norm() / layer.weight.norm())
    assert report.transforms[0].layers[0].relative_error == pytest.approx(relative, rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    size=st.sampled_from([1e-4, 1.0, 100.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_scales_are_whole_multiples_of_one_power_of_two(
    seed: int, spread: float, size: float, dtype: torch.dtype
) -> None:
    """What a secure kernel multiplies by is then the scale itself, and no value is clipped."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 9, generator=g) * torch.exp(torch.randn(6, 1, generator=g) * spread)
    weight = (weight * (size / float(weight.abs().max()))).to(dtype)
    made = quantized(weight, 0)
    assert made is not None
    values, scale = made
    assert scale.dtype == dtype and bool((scale > 0).all())
    bits = 8 if dtype == torch.bfloat16 else 11
    step = 2.0 ** (torch.tensor(float(scale.max())).log2().floor() - (bits - 1))
    if dtype == torch.float16:
        step = max(step, torch.tensor(2.0**-24))
    multiples = scale.double() / step.double()
    assert torch.equal(multiples, multiples.round()) and float(multiples.max()) < 2**bits
    error = (values.double() * scale.double()[:, None] - weight.double()).abs()
    assert bool((error <= scale.double()[:, None] / 2 * (1 + 1e-9)).all())


def test_channels_and_layers_of_zeros() -> None:
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight[1:3] = 0
    none = nn.Linear(4, 2)
    nn.init.zeros_(none.weight)
    small, report = quantize(nn.Sequential(layer, none).eval())
    assert bool((small[0].weight[1:3] == 0).all()) and bool((small[1].weight == 0).all())
    assert bool((small[0].weight_scale > 0).all()) and bool((small[1].weight_scale > 0).all())
    assert report.transforms[0].layers[1].relative_error == 0.0
    x = torch.randn(2, 3)
    program = si.compile(small, (x,), backend="plaintext")
    assert torch.allclose(PlaintextEngine(program).run(0, {"input": x})["linear_1"], small(x), atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error_that_names_the_layer(bad: float) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = bad
    with pytest.raises(si.CompileError, match="layer 1 holds values that are not finite"):
        quantize(model)


@pytest.mark.parametrize("size", [1e-20, 1e7])
def test_weights_without_a_place_in_fixed_point_stay_floats_and_the_report_says_so(size: float) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.mul_(size / float(model[0].weight.abs().max()))
    small, report = quantize(model)
    assert type(small[0]) is nn.Linear and isinstance(small[1], Int8Weight)
    assert "too large or too small" in rows(report)["0"][1]


def test_weights_that_are_not_there_are_errors() -> None:
    with pytest.raises(si.CompileError, match="run the model once"):
        quantize(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(si.CompileError, match="meta"):
        quantize(nn.Sequential(nn.Linear(3, 2, device="meta")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_float_type_keeps_it(dtype: torch.dtype) -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))).to(dtype)
    small, _ = quantize(model)
    x = torch.randn(3, 8).to(dtype)
    with torch.no_grad():
        y = small(x)
        assert y.dtype == dtype and torch.allclose(y.double(), model(x).double(), atol=0.05)
        wide = copy.deepcopy(small).float()
        assert wide(x.float()).dtype == torch.float32 and torch.allclose(
            wide(x.float()), y.float(), atol=0.05
        )


# It is an ordinary module.


def test_the_given_model_is_unchanged_and_nothing_is_shared_with_it() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    small, _ = quantize(model)
    assert small.training and small[0].training
    with torch.no_grad():
        for t in [*small.parameters(), *small.buffers()]:
            t.fill_(7)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(model[0]) is nn.Linear


def test_its_state_goes_through_safetensors_into_another_instance(tmp_path: Path) -> None:
    small, _ = quantize(seeded(nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 4))))
    state = small.state_dict()
    assert set(state) == {
        "0.bias", "0.weight_int8", "0.weight_scale", "1.weight_int8", "1.weight_scale"
    }  # fmt: skip
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    other, _ = quantize(nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 4)))
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert other.state_dict()["0.weight_int8"].dtype == torch.int8
    x = torch.randn(2, 4)
    assert torch.equal(other[0](x), small[0](x)) and torch.equal(other[1].weight, small[1].weight)


def test_it_can_be_copied_and_saved_whole() -> None:
    small, _ = quantize(seeded(nn.Sequential(nn.Linear(4, 3), nn.ReLU())))
    x = torch.randn(2, 4)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    for other in (copy.deepcopy(small), torch.load(file, weights_only=False)):
        assert type(other[0]) is type(small[0]) and torch.equal(other(x), small(x))
        assert other[0].weight_int8 is not small[0].weight_int8
    assert "Int8Linear(in_features=4, out_features=3, bias=True)" in repr(small)


def test_a_single_layer_is_a_model_too() -> None:
    small, report = quantize(seeded(nn.Linear(4, 3)))
    assert isinstance(small, Int8Weight) and list(rows(report)) == [""]


def test_hooks_and_attributes_come_along() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    layer = seeded(Scaled(4, 3))
    layer.factor = 3.0  # type: ignore[assignment]
    layer.register_forward_hook(lambda m, a, y: y + 1)
    small, _ = quantize(nn.Sequential(layer))
    x = torch.randn(2, 4)
    expected = F.linear(x, small[0].weight, layer.bias) * 3 + 1
    assert torch.allclose(small(x), expected) and isinstance(small[0], Scaled)


# Nothing is skipped in silence (field report 47).


class Zoo(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv1, self.conv2 = nn.Linear(4, 4), nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.conv3, self.up = nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)
        self.norm, self.attention, self.lstm = nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
        self.table, self.limited = nn.Embedding(3, 4), nn.Embedding(3, 4, max_norm=1.0)
        self.bag, self.free = nn.EmbeddingBag(3, 4), nn.Parameter(torch.ones(2, 2))


def test_the_report_lists_every_layer_with_parameters_and_why_not() -> None:
    _, report = quantize(Zoo(), skip=["conv2"])
    found = rows(report)
    assert {p for p, (changed, _) in found.items() if changed} == {
        "linear", "conv1", "table", "attention.out_proj"
    }  # fmt: skip
    assert found["conv2"] == (False, "skipped, as asked")
    assert "max_norm" in found["limited"][1] and "no matrices" in found["norm"][1]
    for path in ("", "conv3", "up", "attention", "lstm", "bag"):
        assert "has no int8 form" in found[path][1], path
    assert len(found) == 13
    text, data = str(report), report.to_dict()
    assert all(p in text for p in found) and "4 of 13 layers" in text
    assert json.loads(json.dumps(data)) == data
    row = next(r for r in data["transforms"][0]["layers"] if r["path"] == "linear")
    assert (row["bytes_before"], row["bytes_after"]) == (80, 16 + 16 + 16)
    assert data["bytes_after"] < data["bytes_before"] == sum(p.numel() * 4 for p in Zoo().parameters())


def test_a_model_without_any_layer_gives_a_report_that_says_so() -> None:
    small, report = quantize(nn.Sequential(nn.ReLU(), nn.LayerNorm(3)))
    assert torch.equal(small(torch.ones(3)), torch.zeros(3))
    assert report.transforms[0].changed == () and "0 of 1 layers" in str(report)
    nothing, empty = si.compress(nn.ReLU(), [])
    assert isinstance(nothing, nn.ReLU) and "copy" in str(empty) and empty.to_dict()["transforms"] == []


def test_quantising_twice_changes_nothing_more() -> None:
    small, report = si.compress(nn.Sequential(seeded(nn.Linear(4, 3))), [si.Quantize(), si.Quantize()])
    assert [len(t.changed) for t in report.transforms] == [1, 0]
    assert report.transforms[1].layers[0].reason == "int8 already"
    assert report.bytes_after == report.transforms[0].bytes_after == 12 + 12 + 12
    assert isinstance(small[0], Int8Weight)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"weights": "int4"}, "weights='int4' does not exist; there is weights='int8'"),
        ({"granularity": "group"}, "there is granularity='channel'"),
        ({"skip": "lm_head"}, "list of module paths"),
    ],
)
def test_choices_that_do_not_exist_are_refused_at_once(how: dict[str, Any], match: str) -> None:
    with pytest.raises(si.SettingsError, match=match):
        si.Quantize(**how)


def test_requests_that_cannot_be_meant_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(si.SettingsError, match="skip names 1.linear"):
        quantize(model, skip=["1.linear"])
    for wrong in (si.Quantize(), si.Quantize, [si.Quantize], ["int8"]):
        with pytest.raises(si.SettingsError, match="Quantize"):
            si.compress(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(si.CompileError, match="state dictionary"):
        si.compress(model.state_dict(), [si.Quantize()])  # type: ignore[arg-type]


def test_skip_takes_paths_with_all_below_them_and_patterns() -> None:
    model = nn.ModuleDict({n: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for n in ("a", "ab", "c")})
    _, report = quantize(model, skip=["a", "c.1", "*b.0"])
    assert {p for p, (changed, _) in rows(report).items() if changed} == {"ab.1", "c.0"}


# Shared weights.


def test_a_module_that_is_used_twice_stays_one() -> None:
    layer = seeded(nn.Linear(3, 3))
    small, report = quantize(nn.Sequential(layer, nn.ReLU(), layer))
    assert small[0] is small[2] and rows(report) == {"0": (True, "also at 2")}
    program = si.compile(small, torch.randn(2, 3), backend="plaintext")
    assert len(program.graph.weights) == 3


def test_tied_weights_share_where_their_channels_are_the_same() -> None:
    table, head, twin = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    head.weight = twin.weight = table.weight
    model = seeded(nn.ModuleDict({"table": table, "head": head, "twin": twin}))
    small, report = quantize(model)
    assert small["head"].weight_int8 is small["twin"].weight_int8 is not small["table"].weight_int8
    assert small["table"].weight_scale.shape == (4,) and small["head"].weight_scale.shape == (6,)
    assert rows(report)["head"] == (
        True, "was one tensor with table.weight, twin.weight, which only layers of one kind still share"
    )  # fmt: skip
    assert (report.bytes_before, report.bytes_after) == (96, 24 + 16 + 24 + 24)


# Weights that something makes (field report 49).


def pruned(layer: nn.Module, name: str = "weight") -> nn.Module:
    prune.random_unstructured(layer, name, amount=0.5)
    prune.l1_unstructured(layer, name, amount=0.1)
    return layer


def made_layers() -> dict[str, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older norms are deprecated, and people have them
        return {
            "pruned": pruned(nn.Linear(6, 5)),
            "pruned with its bias": pruned(pruned(nn.Linear(6, 5)), "bias"),
            "weight norm": nn.utils.weight_norm(nn.Linear(6, 5)),
            "spectral norm": nn.utils.spectral_norm(nn.Linear(6, 5)),
            "parametrized weight norm": parametrizations.weight_norm(nn.Linear(6, 5)),
            "parametrized spectral norm": parametrizations.spectral_norm(nn.Linear(6, 5)),
            "orthogonal": parametrizations.orthogonal(nn.Linear(6, 5)),
        }


@pytest.mark.parametrize("name", sorted(made_layers()))
def test_a_weight_that_is_computed_is_quantised_as_it_is_used(name: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(made_layers()[name], nn.ReLU()).eval()
    x = torch.randn(4, 6)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(x)
    small, report = quantize(model.train())
    assert set(small.state_dict()) == {"0.bias", "0.weight_int8", "0.weight_scale"}
    assert not small[0]._forward_pre_hooks and not hasattr(small[0], "parametrizations")
    assert len(rows(report)) == 1 and rows(report)["0"][0]
    with torch.no_grad():
        difference = small.eval()(x) - expected
    greatest = float(expected.detach().abs().max())
    assert float(difference.detach().abs().max()) < 0.02 * max(1.0, greatest)
    if "pruned" in name:  # what is pruned is exactly 0
        assert bool((small[0].weight_int8[before["0.weight_mask"] == 0] == 0).all())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_pruned_layer_that_is_not_quantised_is_copied_as_it_is() -> None:
    model = nn.Sequential(pruned(nn.Linear(6, 5)), pruned(nn.Conv3d(1, 2, 1)), pruned(nn.Linear(6, 5)))
    model[0](torch.randn(1, 6)).sum()  # leaves a computed tensor behind, which deepcopy refuses
    small, report = quantize(model, skip=["2"])
    assert [rows(report)[str(i)][0] for i in range(3)] == [True, False, False]
    assert torch.equal(small[2](torch.ones(6)), model[2](torch.ones(6)))


def test_a_weight_that_a_stranger_makes_is_left_and_reported() -> None:
    layer = nn.Linear(3, 2)
    weight = layer._parameters.pop("weight")
    layer.weight = (weight.detach() * 2,)  # type: ignore[assignment]
    _, report = quantize(nn.Sequential(layer))
    assert rows(report)["0"] == (False, "its weight is made in a way that is not known (tuple)")


# Layers that torch has quantised (field report 48).


def dynamic(model: nn.Module, dtype: torch.dtype = torch.qint8, layers: Any = None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        result: nn.Module = torch.ao.quantization.quantize_dynamic(model, layers or {nn.Linear}, dtype=dtype)
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_a_dynamically_quantised_linear_is_taken_in_with_its_scales(dtype: torch.dtype) -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)))
    theirs = dynamic(model, dtype)
    x = torch.randn(5, 8)
    program = si.compile(theirs, (x,), backend="plaintext")
    came = PlaintextEngine(program).run(0, {"input": x})["linear_1"]
    assert torch.allclose(came, theirs(x), atol=0.05)  # it rounds activations, which the program does not
    assert program.weights is not None
    if dtype == torch.qint8:
        packed = theirs[0].weight()
        assert torch.equal(program.weights["0.weight_int8"], packed.int_repr())
        assert torch.allclose(program.weights["0.weight_scale"], torch.tensor(packed.q_scale()).float())
        weights = [packed.dequantize(), theirs[2].weight().dequantize()]
        exact = F.linear(F.linear(x, weights[0], model[0].bias).relu(), weights[1])
        assert torch.allclose(came, exact, atol=1e-5)
    assert type(theirs[0]).__module__.startswith("torch.ao")  # left as it was


@pytest.mark.filterwarnings("ignore")
def test_one_scale_a_channel_is_taken_in_too() -> None:
    layer = seeded(nn.Linear(8, 6))
    config = torch.ao.quantization.per_channel_dynamic_qconfig
    theirs = dynamic(nn.Sequential(layer), layers={"0": config})
    packed = theirs[0].weight()
    program = si.compile(theirs, torch.randn(2, 8), backend="plaintext")
    assert program.weights is not None
    assert torch.allclose(program.weights["0.weight_scale"], packed.q_per_channel_scales().float())


@pytest.mark.filterwarnings("ignore")
def test_what_torch_quantised_otherwise_is_an_error_that_says_what_to_do() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "head": nn.Linear(4, 2)})
    theirs = dynamic(model, layers={nn.LSTM, nn.Linear})
    with pytest.raises(si.CompileError, match=r"rnn \(LSTM\).*float model.*si\.Quantize"):
        si.compile(theirs, torch.randn(2, 4), backend="plaintext")
    _, report = quantize(theirs)
    assert "by torch already" in rows(report)["head"][1]


# Programs.


def test_a_program_holds_int8_in_memory_and_in_its_file(tmp_path: Path) -> None:
    small, _ = quantize(seeded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))))
    x = torch.randn(2, 64)
    program = si.compile(small, (x,), backend="plaintext")
    program.save(tmp_path / "p.si")
    loaded = si.Program.load(tmp_path / "p.si")
    for p in (program, loaded):
        assert p.weights is not None
        assert (
            p.weights["0.weight_int8"].dtype == torch.int8 and p.graph.edge("0.weight_int8").dtype == "int8"
        )
        assert torch.equal(p.weights["0.weight_int8"], small[0].weight_int8)
        assert torch.equal(p.weights["0.weight_scale"], small[0].weight_scale)
    assert (tmp_path / "p.si").stat().st_size < 64 * 72 * 2
    engine = PlaintextEngine(loaded)
    assert torch.allclose(engine.run(0, {"input": x})["linear_1"], small(x), atol=1e-6)


def test_scales_of_one_width_are_not_in_anything_public(tmp_path: Path) -> None:
    """Rule R6: the exponent of the greatest scale is public, a width rounded to a power of two, and nothing else."""
    small, _ = quantize(seeded(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))))
    exponents, files = [], []
    for change in (1.0, None, 2.0):
        model = copy.deepcopy(small)
        if change is None:
            greatest = model[0].weight_scale.argmax()
            model[0].weight_scale[torch.arange(8) != greatest] *= 0.75
            model[0].weight_int8 += 1
        else:
            model[0].weight_scale *= change
        program = si.compile(model, torch.ones(2, 16) * 0.01, backend="mpc", protocol="crypten")
        program.public().save(tmp_path / "p.si")
        file = (tmp_path / "p.si").read_bytes()
        files.append(file.replace(str(program.weights_digest).encode(), b""))
        exponents.append(program.graph.edge("0.weight_scale").scale)
        scale, values = model[0].weight_scale.numpy().tobytes(), model[0].weight_int8.numpy().tobytes()
        assert scale[:8] not in file and values[:8] not in file
    assert exponents[0] == exponents[1] == exponents[2] + 1
    first, second, third = (_public_parts(f, tmp_path) for f in files)
    assert first == second != third  # the twin: a change of the width is seen


def _public_parts(file: bytes, folder: Path) -> bytes:
    """The bytes without what a zip archive says about them."""
    return (
        file[: file.rindex(b"PK\x01\x02")].split(b"manifest.json", 1)[1].split(b"public.safetensors")[0][8:]
    )


def test_accuracy_on_digits_stays() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x[train]), y[train]).backward()
        optimizer.step()
    small, report = quantize(model.eval())
    with torch.no_grad():
        answers = [m(x[test]).argmax(1) for m in (model, small)]
    before, after = (float((a == y[test]).float().mean()) for a in answers)
    assert before > 0.93 and after > before - 0.01
    assert float((answers[0] == answers[1]).float().mean()) > 0.99
    assert all(r.relative_error is not None and r.relative_error < 0.01 for r in report.transforms[0].changed)
