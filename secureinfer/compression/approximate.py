"""Polynomials in place of activations, fitted to the values that calibration sees."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CompileError, SettingsError
from ..graph.export import as_call, traced_calls
from ..graph.polynomials import MOST_DEGREE, choose
from .activations import PolynomialActivation, operand_of
from .report import ActivationReport, TransformReport
from .transform import copied, evaluating, model_bytes, module_places
from .tune import FineTune

_CLASSES: tuple[tuple[type[torch.nn.Module], str], ...] = (
    (torch.nn.ReLU, "relu"),
    (torch.nn.SiLU, "silu"),
    (torch.nn.Sigmoid, "sigmoid"),
    (torch.nn.Tanh, "tanh"),
)
_TRANSFORMERS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}
"""Of transformers.activations, which need not be installed."""

KINDS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")

_FUNCTIONS = {
    "aten.relu.default": (("relu",), "nn.ReLU"),
    "aten.leaky_relu.default": (("relu",), "nn.ReLU"),
    "aten.gelu.default": (("gelu", "gelu_tanh"), "nn.GELU"),
    "aten.silu.default": (("silu",), "nn.SiLU"),
    "aten.sigmoid.default": (("sigmoid",), "nn.Sigmoid"),
    "aten.tanh.default": (("tanh",), "nn.Tanh"),
}
"""Operator -> the kinds that it may be, and the module that would have been seen."""

_ROUNDS = 12
"""How often ranges are looked at again in the model with polynomials, since each changes what those behind it see."""


@dataclass(frozen=True)
class Approximate:
    """Polynomials in place of nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh and transformers' forms of them.

    Each is the minimax fit of least degree whose error is at most `error`, else the best of `greatest_degree`, on a range
    that is `margin` times the greatest |value| of calibration. A module that is used in several places has one fit for all.
    kinds: which functions, of relu, gelu, gelu_tanh, silu, sigmoid and tanh; None for all. fine_tune: tunes the weights
    afterwards. check: held-out inputs, of which the report counts the values outside the ranges. For backend="ckks", which
    only adds and multiplies: levels are ceil(log2(degree + 1)). Before Quantize, since tuning changes float weights.

    Raises SettingsError for a choice that does not exist, at once, and without calibration, when it runs; CompileError
    where the model does not run, or its values are not finite.
    """

    error: float = 1e-2
    greatest_degree: int = 7
    margin: float = 1.25
    kinds: tuple[str, ...] | None = None
    fine_tune: FineTune | None = None
    check: Sequence[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.error, int | float) and 0 < self.error < math.inf):
            raise SettingsError(f"error={self.error!r} is not a positive number")
        if type(self.greatest_degree) is not int or not 1 <= self.greatest_degree <= MOST_DEGREE:
            raise SettingsError(
                f"greatest_degree={self.greatest_degree!r} is not an integer from 1 to {MOST_DEGREE}"
            )
        if not (isinstance(self.margin, int | float) and 1 <= self.margin < math.inf):
            raise SettingsError(f"margin={self.margin!r} is not a number from 1 on")
        if self.kinds is not None:
            unknown = (
                [self.kinds] if isinstance(self.kinds, str) else [k for k in self.kinds if k not in KINDS]
            )
            if unknown:
                raise SettingsError(f"kinds={self.kinds!r} is not a list of some of {', '.join(KINDS)}")
            object.__setattr__(self, "kinds", tuple(self.kinds))
        if not isinstance(self.fine_tune, FineTune | None):
            raise SettingsError("fine_tune is a si.FineTune(batches=..., loss=...)")

    def apply(
        self, model: torch.nn.Module, calibration: Sequence[Any] | None = None
    ) -> tuple[torch.nn.Module, TransformReport]:
        """The model with polynomials, and what became of each activation."""
        batches = list(calibration or ())
        if not batches:
            raise SettingsError(
                "Approximate needs si.compress(..., calibration=[inputs, ...]): ranges are taken from it"
            )
        places = [
            (m, paths, kind) for m, paths in module_places(model) if (kind := self._kind(m)) is not None
        ]
        seen = _observe(copied(model, {}), batches, {paths[0]: math.inf for _, paths, _ in places})
        wild = [path for path, s in seen.items() if not math.isfinite(s.greatest)]
        if wild:
            raise CompileError(f"values are not finite on calibration inputs at {', '.join(wild[:5])}")
        swapped: dict[str, PolynomialActivation] = {}
        memo: dict[int, Any] = {}
        refused: dict[str, str] = {}
        for module, paths, kind in places:
            reason = _refusal(module, seen[paths[0]])
            if reason is not None:
                refused[paths[0]] = reason
                continue
            fit = self._fit(kind, self.margin * (seen[paths[0]].greatest or 1.0))
            swapped[paths[0]] = memo[id(module)] = PolynomialActivation(fit).train(module.training)
        result = copied(model, memo)
        self._widen(result, batches, swapped)
        if self.fine_tune is not None and swapped:
            self.fine_tune.run(result, swapped.values())
        radii = {path: a.fit.radius for path, a in swapped.items()}
        after = _observe(result, batches, radii)
        held = _observe(result, list(self.check), radii) if self.check is not None else None
        rows = []
        for module, paths, kind in places:
            path, name = paths[0], type(module).__name__
            if path in refused:
                rows.append(ActivationReport(path, name, False, refused[path], 0, 0, kind=kind))
                continue
            row = self._row(swapped[path], paths, name, seen[path], after[path])
            if held is not None:
                row = replace(row, check_outside=held[path].outside, check_values=held[path].values)
            rows.append(
                replace(
                    row, reason="; ".join([*_remarks(row, self.error), *([row.reason] if row.reason else [])])
                )
            )
        rows.extend(self._functions(result, batches[0], refused))
        sizes = model_bytes(model), model_bytes(result)
        return result, TransformReport("Approximate", self._settings(), tuple(rows), *sizes, ActivationReport)

    def _settings(self) -> dict[str, Any]:
        tune = self.fine_tune
        chosen: dict[str, Any] = {
            "error": self.error,
            "greatest_degree": self.greatest_degree,
            "margin": self.margin,
            "kinds": self.kinds,
        }
        if tune is not None:
            chosen["fine_tune"] = f"{tune.epochs} epochs, learning_rate={tune.learning_rate}"
        return chosen

    def _kind(self, module: torch.nn.Module) -> str | None:
        """The function that a module computes, if it is one of those wanted."""
        kind = _kind_of(module)
        return kind if kind is not None and (self.kinds is None or kind in self.kinds) else None

    def _fit(self, kind: str, radius: float) -> Any:
        return choose(kind, radius, self.error, self.greatest_degree)

    def _widen(
        self, model: torch.nn.Module, batches: Sequence[Any], swapped: Mapping[str, PolynomialActivation]
    ) -> None:
        """Ranges that hold what calibration gives in the model with polynomials.

        At most doubled at a time: what one that is too narrow throws out says little about those behind it.
        """
        for _ in range(_ROUNDS):
            seen = _observe(model, batches, {path: a.fit.radius for path, a in swapped.items()})
            narrow = [path for path, s in seen.items() if s.outside]
            if not narrow:
                return
            for path in narrow:
                fit = swapped[path].fit
                radius = min(self.margin * seen[path].greatest, 2 * fit.radius)
                swapped[path].fit = self._fit(fit.kind, radius)
        raise CompileError(
            f"with polynomials of degree {self.greatest_degree}, values at {', '.join(narrow[:5])} leave every range on "
            "calibration inputs: raise greatest_degree, or leave some activations as they are (kinds)"
        )

    def _row(
        self, activation: PolynomialActivation, paths: Sequence[str], name: str, before: _Seen, after: _Seen
    ) -> ActivationReport:
        fit = activation.fit
        reason = f"also at {', '.join(paths[1:])}" if len(paths) > 1 else ""
        return ActivationReport(
            paths[0], name, True, reason, 0, 0, kind=fit.kind, degree=fit.degree, levels=fit.depth, radius=fit.radius,
            error=fit.error, greatest=before.greatest, outside=after.outside, values=after.values,
        )  # fmt: skip

    def _functions(
        self, model: torch.nn.Module, example: Any, refused: Mapping[str, str]
    ) -> Iterator[ActivationReport]:
        """Calls of functions, which are not modules to put something in place of."""
        try:
            calls = traced_calls(model, example)
        except CompileError as error:
            yield ActivationReport("", "any function", False, f"could not be looked for: {error}", 0, 0)
            return
        counts = collections.Counter(
            (path, operator) for path, operator in calls if operator in _FUNCTIONS and path not in refused
        )
        for (path, operator), n in counts.items():
            kinds, module = _FUNCTIONS[operator]
            if self.kinds is None or set(kinds).intersection(self.kinds):
                reason = (
                    f"called as a function ({n} times), not as a module: write {module} to have it fitted here; "
                    "si.compile(..., backend='ckks') fits it by itself"
                )
                yield ActivationReport(path, operator.split(".")[1], False, reason, 0, 0, kind=kinds[0])


def _kind_of(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.nn.GELU) and type(module).forward is torch.nn.GELU.forward:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    for cls, kind in _CLASSES:
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return kind
    cls = type(module)
    return _TRANSFORMERS.get(cls.__name__) if cls.__module__ == "transformers.activations" else None


def _refusal(module: torch.nn.Module, seen: _Seen) -> str | None:
    if not seen.values:
        return "calibration never reaches it"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return "it has hooks, which would be lost" if any(hooks) else None


def _remarks(row: ActivationReport, target: float) -> list[str]:
    remarks = []
    if row.error is not None and row.error > target:
        remarks.append(f"misses error={target:g}")
    if row.outside or row.check_outside:
        remarks.append("values outside its range come out wrong: raise margin, or give more calibration")
    return remarks


# Running the model.


@dataclass
class _Seen:
    """What came into one activation. outside: values beyond a radius."""

    greatest: float = 0.0
    outside: int = 0
    values: int = 0

    def add(self, x: torch.Tensor, radius: float) -> None:
        if x.numel():
            size = x.detach().abs()
            greatest = float(size.max())
            self.greatest = max(self.greatest, math.inf if math.isnan(greatest) else greatest)
            self.outside += int((~(size <= radius)).sum())
            self.values += x.numel()


def _observe(model: torch.nn.Module, batches: Sequence[Any], radii: Mapping[str, float]) -> dict[str, _Seen]:
    """What comes into the modules at these paths, over all batches, in evaluation mode."""
    seen = {path: _Seen() for path in radii}
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        for path, radius in radii.items():

            def look(_: Any, args: Any, kwargs: Any, to: _Seen = seen[path], radius: float = radius) -> None:
                to.add(operand_of(args, kwargs), radius)

            hook = model.get_submodule(path).register_forward_pre_hook(look, with_kwargs=True)
            stack.callback(hook.remove)
        for batch in batches:
            args, kwargs = as_call(batch)
            try:
                model(*args, **kwargs)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                raise CompileError(f"the model does not run on calibration inputs: {error}") from error
    return seen
