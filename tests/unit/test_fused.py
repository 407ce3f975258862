"""Compiled local steps: the same values, nothing secret given to the compiler, and the step itself until it is ready."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc.fast import fused, opening, tables
from tests.conformance.harness import run
from tests.conformance.models import compiled

N = fused.LEAST


def doubled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x * by


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    yield
    fused.disable()


def compiler(seen: list[torch.Tensor], gate: threading.Event | None = None) -> fused.Compiler:
    """One that records what it is given, and marks what comes out of a compiled step."""

    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        def compiled_step(x: torch.Tensor, *rest: Any) -> Any:
            seen.append(x)
            if gate is not None:
                gate.wait(5)
            return step(x, *rest) + 1

        return compiled_step

    return fused.Compiler(compile)


def test_a_step_runs_as_it_is_until_its_compiled_form_is_ready() -> None:
    gate = threading.Event()
    made = compiler([], gate)
    x = torch.arange(N)
    assert torch.equal(made.call(doubled, x, 3), 3 * x)
    gate.set()
    assert made.wait(5)
    assert torch.equal(made.call(doubled, x, 3), 3 * x + 1)


def test_the_compiler_gets_zeros_and_never_a_share() -> None:
    seen: list[torch.Tensor] = []
    made = compiler(seen)
    made.call(doubled, torch.full((2, N), 7), 3)
    assert made.wait(5)
    assert len(seen) == 1 and not seen[0].any() and seen[0].shape[0] == 2


def test_each_form_of_a_step_is_compiled_once_whatever_its_length() -> None:
    seen: list[torch.Tensor] = []
    made = compiler(seen)
    for length, dtype, by in (
        (N, torch.int64, 3),
        (2 * N, torch.int64, 3),
        (N, torch.int32, 3),
        (N, torch.int64, 4),
    ):
        made.call(doubled, torch.zeros(length, dtype=dtype), by)
        assert made.wait(5)
    assert len(seen) - 1 == 3  # the second call ran what the first had compiled


def test_what_cannot_be_compiled_stays_as_it_is() -> None:
    def fails(_: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("no C++ compiler")

    made = fused.Compiler(fails)
    x = torch.arange(N)
    for _ in range(2):
        assert torch.equal(made.call(doubled, x, 3), 3 * x)
        assert made.wait(5)


def test_few_values_are_not_worth_it() -> None:
    seen: list[torch.Tensor] = []
    fused._compiler = compiler(seen)
    fused.run(doubled, torch.zeros(N - 1), 3)
    assert fused._compiler.wait(5) and not seen


def test_compiled_code_is_loaded_from_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    fused.enable(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    fused.disable()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="written by others"):
        fused.enable(folder)


@pytest.mark.slow
def test_compiled_steps_give_what_they_give_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on random words, with the real compiler; then a model whose steps are all compiled."""
    made = fused.enable(tmp_path / "compiled")
    words = {d: torch.randint(-(2**30), 2**30, (8, N)).to(d) for d in (torch.int64, torch.int32)}
    few = torch.randint(0, 2, (4, 2, N), dtype=torch.uint8)
    c, z = words[torch.int64][0], words[torch.int64][:1] > 0
    dealt = (words[torch.int64][1:2], words[torch.int64][2:3], words[torch.int64][3])
    steps: list[tuple[Any, ...]] = [
        (tables._look_up_narrow, words[torch.int32], c.unsqueeze(0), 16, 47),
        (tables._merge_index, few, few, few[0], True),
        (tables._merge_result, few[0], few[1], 4, words[torch.int64][:2], words[torch.int64][2:4]),
        (opening.gate, c, z, 1, 48, 16, *dealt, *dealt[1:]),
    ]
    for step, *args in steps:
        expected = step(*args)
        made.call(step, *args)
        assert made.wait(300)
        assert made._ready[fused._key(step, tuple(args))] is not None
        torch.testing.assert_close(made.call(step, *args), expected, rtol=0, atol=0)
    monkeypatch.setattr(fused, "LEAST", 1)
    monkeypatch.setattr("secureinfer.backends.mpc.windows.DIRECT_BYTES", 0)
    program, model, inputs = compiled("lenet")
    for _ in range(2):
        got = run(program, dict(zip(program.graph.inputs, inputs, strict=True)), deadline=300)
        assert made.wait(300)
    (output,) = got.outputs.values()
    with torch.no_grad():
        assert float((output - model(*inputs)).abs().max()) < 1e-3
