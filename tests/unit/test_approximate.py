"""si.compress with si.Approximate: what is swapped for what, on which ranges, what the report says, and tuning."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secureinfer as si
from secureinfer.compression.activations import PolynomialActivation
from secureinfer.compression.report import ActivationReport
from secureinfer.graph.polynomials import choose

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


def approximate(
    model: nn.Module, calibration: Any = None, **how: Any
) -> tuple[nn.Module, dict[str, ActivationReport], si.CompressionReport]:
    result, report = si.compress(
        model, [si.Approximate(**how)], calibration=[X] if calibration is None else calibration
    )
    rows = {}
    for row in report.transforms[0].layers:
        assert isinstance(row, ActivationReport)
        rows[row.path] = row
    return result, rows, report


def mlp(*activations: nn.Module) -> nn.Sequential:
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for activation in activations:
        layers += [nn.Linear(6, 6), activation]
    return nn.Sequential(*layers, nn.Linear(6, 3)).eval()


# What is put in place of what.

MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


@pytest.mark.parametrize("kind", MODULES)
def test_an_activation_becomes_the_least_polynomial_on_its_range(kind: str) -> None:
    model = mlp(MODULES[kind])
    small, rows, _ = approximate(model, greatest_degree=15)
    with torch.no_grad():
        greatest = float(model[0](X).abs().max())
    layer = small[1]
    assert isinstance(layer, PolynomialActivation) and isinstance(model[1], type(MODULES[kind]))
    assert layer.fit == choose(kind, 1.25 * greatest, 1e-2, 15)
    difference = (layer(model[0](X)) - model[1](model[0](X))).abs().max()
    assert float(difference.detach()) <= layer.fit.error * 1.001
    row = rows["1"]
    assert row.changed and (row.kind, row.degree, row.levels) == (kind, layer.fit.degree, layer.fit.depth)
    assert row.greatest == pytest.approx(greatest) and row.radius == pytest.approx(1.25 * greatest)
    assert (row.error, row.outside, row.values) == (layer.fit.error, 0, 240)
    assert (row.check_outside, row.check_values) == (None, None)
    assert set(small.state_dict()) == set(model.state_dict())


@pytest.mark.needs("hf")
def test_transformers_activations_are_what_they_are_taken_for() -> None:
    import transformers.activations as theirs

    from secureinfer.compression.approximate import _TRANSFORMERS
    from secureinfer.graph.polynomials import _KINDS

    x = torch.linspace(-5, 5, 101)
    found = {name: getattr(theirs, name)() for name in _TRANSFORMERS if hasattr(theirs, name)}
    assert len(found) > 4
    for name, module in found.items():
        assert torch.allclose(module(x), _KINDS[_TRANSFORMERS[name]].function(x), atol=1e-5), name
        _, rows, _ = approximate(nn.Sequential(module), [x])
        assert rows["0"].kind == _TRANSFORMERS[name]


def test_only_the_kinds_that_are_asked_for_are_swapped() -> None:
    small, rows, _ = approximate(mlp(nn.ReLU(), nn.Tanh()), kinds=("tanh",))
    assert (
        isinstance(small[1], nn.ReLU) and isinstance(small[3], PolynomialActivation) and list(rows) == ["3"]
    )


def test_a_subclass_with_a_forward_of_its_own_is_left_alone() -> None:
    class Shifted(nn.ReLU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) - 1

    class Plain(nn.ReLU):
        pass

    small, rows, _ = approximate(mlp(Shifted(), Plain()))
    assert isinstance(small[1], Shifted) and isinstance(small[3], PolynomialActivation)
    assert rows["1"].type == "relu" and "called as a function (1 times)" in rows["1"].reason


def test_a_module_of_several_places_has_one_fit_over_all_its_ranges() -> None:
    relu = nn.ReLU(inplace=True)
    model = mlp(relu, relu)
    with torch.no_grad():
        model[2].weight.mul_(5)
    small, rows, _ = approximate(model)
    assert small[1] is small[3] and rows["1"].reason.endswith("also at 3")
    with torch.no_grad():
        hidden = model[0](X)
        greatest = max(float(hidden.abs().max()), float(model[2](hidden.relu()).abs().max()))
    assert (
        small[1].fit.radius >= 1.25 * greatest * 0.999 and rows["1"].values == 480 and rows["1"].outside == 0
    )


def test_a_single_activation_is_a_model_too_and_modes_stay() -> None:
    small, rows, _ = approximate(nn.Tanh().train())
    assert isinstance(small, PolynomialActivation) and list(rows) == [""] and small.training
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU()).train()
    small, _, _ = approximate(model)
    assert all(m.training for m in (*small.modules(), *model.modules()))


def test_calibration_is_all_that_a_call_may_be() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.act(input=a - b)

    for batches in ([(X, X * 2)], [{"a": X, "b": X * 2}], [(X[:4], X[:4] * 2), (X, X * 2)]):
        small, _, _ = approximate(Two(), batches)
        assert small.act.fit.radius == pytest.approx(1.25 * float(X.abs().max()))
        assert small(X, X).shape == X.shape


def test_ranges_hold_in_the_model_with_polynomials_too() -> None:
    """A poor fit gives the layers behind it other values than the model had: their ranges are found in the new model."""
    model = mlp(nn.ReLU(), nn.Tanh())
    with torch.no_grad():
        model[0].bias.fill_(-9.0)  # the ReLU gives zeros, and its line does not
        model[2].weight.copy_(torch.eye(6) * 3)
        model[2].bias.fill_(0.5)
    small, rows, _ = approximate(model, greatest_degree=1, margin=1.0)
    assert rows["3"].greatest == 0.5 and rows["3"].outside == 0 and small[3].fit.radius > 2.0


def test_a_constant_zero_has_a_range_too() -> None:
    model = mlp(nn.ReLU())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    small, rows, _ = approximate(model)
    assert small[1].fit.radius == 1.25 and rows["1"].outside == 0


# What is not swapped is listed.


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act, self.unused = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.GELU(),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(F.relu(self.second(self.act(F.relu(self.first(x))))))


def test_functions_and_modules_that_are_never_reached_are_listed_with_what_to_do() -> None:
    small, report = si.compress(Functional(), [si.Approximate()], calibration=[X])
    found = {(r.path, r.type): (r.changed, r.reason) for r in report.transforms[0].layers}
    assert found["act", "GELU"] == (True, "")
    assert found["unused", "ReLU"] == (False, "calibration never reaches it")
    changed, reason = found["", "relu"]
    assert not changed and "called as a function (2 times)" in reason and "backend='ckks'" in reason
    assert "write nn.Sigmoid" in found["", "sigmoid"][1] and len(found) == 4
    assert isinstance(small.unused, nn.ReLU)
    assert "1 of 4 activations changed" in str(report)


def test_a_module_with_hooks_is_left_as_it_is() -> None:
    model = mlp(nn.ReLU())
    model[1].register_forward_hook(lambda m, a, y: y + 1)
    small, rows, _ = approximate(model)
    assert rows["1"].reason == "it has hooks, which would be lost" and torch.equal(small(X), model(X))


def test_a_model_that_cannot_be_exported_says_that_functions_were_not_looked_for() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x) if x.sum() > -1e9 else x

    _, rows, _ = approximate(Branches())
    assert rows["act"].changed and "could not be looked for" in rows[""].reason


# The report.


def test_the_report_shows_each_fit() -> None:
    small, rows, report = approximate(mlp(nn.GELU(), nn.ReLU()), greatest_degree=4, check=[X, X * 3])
    text, data = str(report), report.to_dict()
    assert "2 of 2 activations changed" in text and f"±{small[1].fit.radius:.3g}" in text
    assert json.loads(json.dumps(data)) == data
    row = data["transforms"][0]["layers"][1]
    assert row["kind"] == "relu" and row["degree"] == 4 and row["levels"] == 3 and row["error"] > 0.01
    assert rows["3"].reason.startswith("misses error=0.01")
    assert (
        rows["1"].check_values == 480 and rows["1"].check_outside and "outside its range" in rows["1"].reason
    )
    assert f"{rows['1'].check_outside} of 480" in text


def test_a_fit_with_too_small_an_error_in_a_report_would_be_found() -> None:
    small, _, _ = approximate(mlp(nn.GELU()))
    assert small[1].fit.check() is None
    assert dataclasses.replace(small[1].fit, error=small[1].fit.error * 0.9).check() is not None


# Refusals.


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"error": 0.0}, "error=0.0"),
        ({"error": math.nan}, "positive"),
        ({"greatest_degree": 0}, "1 to 63"),
        ({"greatest_degree": 2.0}, "integer"),
        ({"margin": 0.9}, "margin=0.9"),
        ({"kinds": ("relu", "softmax")}, "some of relu, gelu"),
        ({"kinds": "relu"}, "is not a list"),
        ({"fine_tune": [X]}, r"si\.FineTune"),
    ],
)
def test_choices_that_do_not_exist_are_refused_at_once(how: dict[str, Any], match: str) -> None:
    with pytest.raises(si.SettingsError, match=match):
        si.Approximate(**how)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"loss": None}, "cross_entropy"),
        ({"batches": 3}, "DataLoader"),
        ({"batches": iter([]), "epochs": 2}, "gone through once"),
    ],
)
def test_tuning_that_cannot_work_is_refused_at_once(how: dict[str, Any], match: str) -> None:
    with pytest.raises(si.SettingsError, match=match):
        si.FineTune(**{"batches": [], "loss": F.mse_loss, **how})


@pytest.mark.parametrize("calibration", [None, []])
def test_without_calibration_there_is_no_range(calibration: Any) -> None:
    with pytest.raises(si.SettingsError, match="calibration="):
        si.compress(mlp(nn.ReLU()), [si.Approximate()], calibration=calibration)


def test_calibration_that_says_nothing_is_refused() -> None:
    with pytest.raises(si.CompileError, match="not finite on calibration inputs at 1"):
        approximate(mlp(nn.ReLU()), [X * math.nan])
    with pytest.raises(si.CompileError, match="does not run on calibration"):
        approximate(mlp(nn.ReLU()), [torch.rand(2, 7)])


def test_polynomials_that_explode_are_an_error_that_says_what_to_do() -> None:
    class Feedback(nn.Module):
        """Zeros, again and again; where a line stands in for the ReLU, a quarter of its range instead."""

        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.act(self.act(-x.abs()) * 8) * 8)

    with pytest.raises(si.CompileError, match="values at act leave every range.*raise greatest_degree"):
        approximate(Feedback(), greatest_degree=1)


# Tuning.


def digits() -> tuple[
    nn.Sequential, list[tuple[torch.Tensor, torch.Tensor]], Callable[[nn.Module], float], torch.Tensor
]:
    """A trained classifier, its training batches, its accuracy on held-out images, and those."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)  # layers of 64: threads only wait for each other
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    widths = [64, 64, 32, 32]
    layers = [m for a, b in zip(widths, widths[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x[train]), y[train]).backward()
        optimizer.step()

    def accuracy(m: nn.Module) -> float:
        with torch.no_grad():
            return float((m(x[test]).argmax(1) == y[test]).float().mean())

    return model, [(x[i], y[i]) for i in train.split(100)], accuracy, x[test]


def test_tuning_keeps_the_accuracy_of_squares_and_without_it_there_is_none() -> None:
    model, batches, accuracy, held = digits()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    calibration = [x for x, _ in batches]
    tune = si.FineTune(batches, F.cross_entropy, epochs=3, learning_rate=2e-3)
    square, rows, report = approximate(model, calibration, greatest_degree=2, fine_tune=tune, check=[held])
    twin, _, _ = approximate(model, calibration, greatest_degree=2)
    assert accuracy(square) >= accuracy(model) - 0.02 and accuracy(model) > 0.93
    assert accuracy(twin) < accuracy(model) - 0.1
    assert [rows[p].degree for p in ("1", "3", "5")] == [2, 2, 2]
    assert all(
        r.check_values and r.check_outside is not None and r.check_outside < 0.01 * r.check_values
        for r in rows.values()
    )
    assert "fine_tune='3 epochs, learning_rate=0.002'" in str(report) and json.dumps(report.to_dict())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in square.parameters())
    assert not square[1]._forward_pre_hooks


def test_tuning_keeps_values_inside_their_ranges() -> None:
    """The twin: tuned without the penalty, the same model throws values out of its ranges."""
    from secureinfer.compression import tune

    torch.manual_seed(3)
    x = torch.randn(64, 6)
    model = mlp(nn.ReLU(), nn.ReLU())
    target = model(x).detach() * 4  # what the loss wants is larger values everywhere
    how = si.FineTune([(x, target)], F.mse_loss, epochs=50, learning_rate=3e-2)

    def outside() -> int:
        _, rows, _ = approximate(model, [x], greatest_degree=2, margin=1.1, fine_tune=how)
        return sum(r.outside or 0 for r in rows.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_PENALTY", 0.0)
        twin = outside()
    assert outside() < twin


def test_tuning_works_under_no_grad_and_leaves_dropout_and_statistics_alone() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.9), nn.ReLU(), nn.Linear(6, 2)
    ).train()
    how = si.FineTune([((X,), torch.zeros(40, 2))], F.mse_loss, epochs=2)
    with torch.no_grad():
        first, _, _ = approximate(model, fine_tune=how)
        second, _, _ = approximate(model, fine_tune=how)
    assert torch.equal(first[0].weight, second[0].weight) and not torch.equal(
        first[0].weight, model[0].weight
    )
    assert torch.equal(first[1].running_mean, model[1].running_mean)
    assert first[2].training and first[3].training


def test_tuning_that_fails_says_why() -> None:
    model = mlp(nn.ReLU())
    for batches, loss, error, match in (
        ([X], F.mse_loss, si.SettingsError, "pairs"),
        ([], F.mse_loss, si.SettingsError, "empty"),
        ([(X, 0)], lambda y, t: y.sum() * math.nan, si.CompileError, "not finite in step 0"),
    ):
        with pytest.raises(error, match=match):
            approximate(model, fine_tune=si.FineTune(batches, loss))
    with pytest.raises(si.SettingsError, match="requires_grad"):
        approximate(
            mlp(nn.ReLU()).requires_grad_(False), fine_tune=si.FineTune([(X, 0)], lambda y, t: y.sum())
        )


# With what comes afterwards.


def test_an_approximated_model_quantises_and_compiles() -> None:
    model = mlp(nn.GELU(), nn.ReLU())
    small, report = si.compress(model, [si.Approximate(), si.Quantize()], calibration=[X])
    assert [t.name for t in report.transforms] == ["Approximate", "Quantize"]
    plain = si.compile(small, X[:2], backend="plaintext")
    assert [n.op for n in plain.graph.nodes] == ["linear", "polynomial", "linear", "polynomial", "linear"]
    secret = si.compile(small, X[:2])
    assert "relu" not in {n.op for n in secret.graph.nodes}
