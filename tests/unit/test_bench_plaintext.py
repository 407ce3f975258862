"""Plaintext engines: they compute the same model, say what int8 covers, and none of their faults leaves its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secureinfer.bench import engines as e
from secureinfer.bench.plaintext import PlaintextProcess, max_absolute_error
from secureinfer.bench.plaintext_worker import choose_threads, timed
from secureinfer.bench.subject import CLOSE, Built, close, save_state
from secureinfer.errors import UsageError

pytestmark = pytest.mark.needs("bench")

CPU = torch.device("cpu")
HERE = Path(__file__)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def rows(count: int, *shape: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, *shape, generator=g) for _ in range(count)]


def reference() -> tuple[nn.Module, Any, list[Any]]:
    """A user's own model, as the child finds it: example, then two calls more, the last of which gives no numbers."""
    a, b, c = rows(3, 16)
    return perceptron(), (a,), [(b,), (c * torch.nan,)]


def built(module: nn.Module, *inputs: Tensor) -> Built:
    calls = tuple((t,) for t in inputs)
    return Built(module.eval().requires_grad_(False), calls[0], calls, calls, None, CLOSE, close)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    save_state(perceptron(), tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def started(state: Path, engine: str = e.EAGER, dtype: str = "fp32", **options: Any) -> PlaintextProcess:
    return PlaintextProcess(f"{HERE}:reference", 2, engine, dtype, state=state, **options)


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.05)
    return False


# A process of its own.


def test_an_engine_computes_and_is_timed_in_its_own_process_and_its_death_is_a_reason(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(state) as process:
        assert process.ready(60), process.reason
        expected = [perceptron()(x) for x in rows(2, 16)]
        for i, outputs in enumerate(expected):
            assert max_absolute_error(process.outputs(i), [outputs]) < 1e-6
        assert len(process.time(1, least_runs=3)) == 3
        assert sum(process.time(0, 1, 0.05)) >= 50
        found = process.baseline(max_absolute_error=0.0)
        assert (found.status, found.name, found.max_absolute_error) == ("ok", "torch eager fp32", 0.0)
        assert found.threads in (1, e.cores())
        assert found.model_bytes == 4 * (16 * 32 + 32 + 32 * 4 + 4)
        assert found.peak_memory_bytes is not None and found.peak_memory_bytes > 50_000_000
        assert found.peak_gpu_memory_bytes is None and found.load_seconds is not None

        folder, pid = process._folder, process.pid
        assert pid is not None and folder.exists()
        os.kill(pid, signal.SIGKILL)
        assert process.time(0) == [] and process.outputs(0) == []
        dead = process.baseline()
        assert dead.status == "failed" and dead.reason == "its process was ended by SIGKILL"
        assert dead.model_bytes == found.model_bytes and dead.peak_memory_bytes == found.peak_memory_bytes
        assert gone(pid) and not folder.exists()
    assert "".join(capfd.readouterr()) == ""


def test_what_onnx_runtime_has_no_kernels_for_is_unavailable_in_its_own_words(state: Path) -> None:
    with started(state, e.ONNX, "bf16") as process:
        assert not process.ready(60)
        found = process.baseline()
    assert found.status == "unavailable" and found.reason is not None
    assert re.match(r"ONNX Runtime (takes no session of this model: |computes \d+ of 2)", found.reason)
    assert process.time(0) == []


def test_without_a_compiler_torch_compile_is_unavailable(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with started(state, e.COMPILED) as process:
        assert not process.ready(60)
        assert process.status == "unavailable" and "compiler" in (process.reason or "")


def test_a_process_that_is_not_ready_in_time_is_ended(state: Path) -> None:
    with started(state) as process:
        pid = process.pid
        assert pid is not None and not process.ready(0.01)
        assert process.baseline().reason == "no answer within 0.01 s"
        assert gone(pid)


@pytest.mark.slow
def test_outputs_that_are_not_finite_are_a_failure(state: Path) -> None:
    with started(state, threads=1) as process:
        assert process.ready(60) and process.baseline().threads == 1
        assert process.outputs(2) == []
        assert process.baseline().status == "failed" and "not finite" in (process.reason or "")


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it_and_leaves_no_files(state: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from secureinfer.bench.plaintext import PlaintextProcess\n"
        f"p = PlaintextProcess({f'{HERE}:reference'!r}, 2, 'torch eager', 'fp32', state=Path({str(state)!r}))\n"
        "p.ready(60); print(p.status, p.pid, p._folder, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    status, pid, folder = parent.stdout.readline().split()
    assert status == "ok" and Path(folder).exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(int(pid))
    assert not Path(folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_torch_compile_computes_the_same_model(state: Path, dtype: str) -> None:
    with started(state, e.COMPILED, dtype, threads=1) as process:
        if not process.ready(300):
            assert process.status == "unavailable", process.reason
            pytest.skip(str(process.reason))
        [x] = rows(1, 16)
        assert max_absolute_error(process.outputs(0), [perceptron()(x)]) < (1e-5 if dtype == "fp32" else 0.05)


# What is timed.


class Toy:
    """An engine whose call takes milliseconds by its threads, and whose inputs take longer to make."""

    model_bytes, quantized = 0, None

    def __init__(self, milliseconds: dict[int, float]) -> None:
        self.milliseconds, self.threads = milliseconds, 0

    def set_threads(self, count: int) -> None:
        self.threads = count

    def inputs(self, tensors: Sequence[Tensor]) -> None:
        time.sleep(0.05)

    def run(self, inputs: Any) -> None:
        time.sleep(self.milliseconds[self.threads] / 1000)

    def outputs(self, found: Any) -> list[Tensor]:
        return []


@pytest.mark.parametrize(("one", "all_"), [(2.0, 20.0), (20.0, 2.0)])
def test_an_engine_gets_the_number_of_threads_with_which_it_is_quickest(one: float, all_: float) -> None:
    toy = Toy({1: one, 8: all_})
    assert choose_threads(toy, [], [8, 1]) == toy.threads == (1 if one < all_ else 8)


def test_nothing_but_the_models_call_is_timed() -> None:
    toy = Toy({0: 2.0})
    assert min(timed(toy, [], 5)) < 40  # inputs take 50 ms


def test_wrong_outputs_are_found_by_their_error() -> None:
    right = [torch.ones(2, 3), torch.zeros(4)]
    assert max_absolute_error([t.clone() for t in right], right) == 0.0
    assert max_absolute_error([right[0], right[1] - 2], right) == 2.0
    assert max_absolute_error([right[0], right[1] * torch.nan], right) == float("inf")
    assert max_absolute_error(right[:1], right) == float("inf")
    assert max_absolute_error([right[0].T, right[1]], right) == float("inf")


# torch.


def test_int8_says_what_it_covers_and_what_not(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 4))
    case = built(model, *rows(2, 1, 8, 8))
    engine = e.load(e.EAGER, "int8", case, "cpu", tmp_path)
    assert engine.quantized is not None
    assert engine.quantized.startswith("0 of 1 Conv2d; 2 of 2 Linear (by ")
    with torch.inference_mode():
        expected = e.flat(case.module(*case.examples))
        found = engine.outputs(engine.run(engine.inputs(case.examples)))
    assert 0 < max_absolute_error(found, expected) < 0.1
    fp32 = e.load(e.EAGER, "fp32", case, "cpu", tmp_path)
    assert engine.model_bytes < fp32.model_bytes / 2


class OwnLinear(nn.Linear):
    """What quantisation by a layer's type passes over in silence."""


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 3, 3), OwnLinear(6, 3)])
def test_an_int8_that_covers_nothing_is_not_one(layer: nn.Module, tmp_path: Path) -> None:
    case = built(nn.Sequential(layer), *rows(1, 2, 6))
    with pytest.raises(UsageError, match=rf"covers nothing of this model: 0 of 1 {type(layer).__name__} "):
        e.load(e.EAGER, "int8", case, "cpu", tmp_path)


class Casting(nn.Module):
    """A model that goes back to fp32 for itself: its bf16 would be half of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).float(), self.second.weight.float())


def test_bf16_is_computed_in_bf16_or_is_not_there(tmp_path: Path) -> None:
    [x] = rows(1, 16)
    half = x.bfloat16()
    e.check_computes_in(torch.bfloat16, perceptron().bfloat16(), (half,))
    with pytest.raises(UsageError, match="not all products of this model are computed in bf16: 1 in fp32"):
        e.check_computes_in(torch.bfloat16, Casting().bfloat16(), (half,))
    try:
        engine = e.load(e.EAGER, "bf16", built(perceptron(), x), "cpu", tmp_path)
    except UsageError as error:
        assert "bf16" in str(error) and not e.cpu_has_bf16()
    else:
        with torch.inference_mode():
            assert (
                0
                < max_absolute_error(engine.outputs(engine.run(engine.inputs([x]))), [perceptron()(x)])
                < 0.05
            )


def test_every_engine_and_type_that_is_promised_is_tried() -> None:
    assert len(e.engines("cpu")) == 9 and ("torch eager", "fp32") in e.engines("cpu")
    assert {d for _, d in e.engines("cpu")} == {"fp32", "bf16", "int8"}
    assert {("torch eager", "fp16"), ("torch-tensorrt", "fp16")} <= set(e.engines("cuda"))


@pytest.mark.parametrize(
    ("engine", "dtype", "device", "why"),
    [
        ("torch-tensorrt", "fp32", "cpu", "CUDA"),
        ("torch eager", "fp4", "cpu", "no plaintext engine"),
        ("tea leaves", "fp32", "cpu", "no plaintext engine"),
    ],
)
def test_an_engine_that_cannot_be_here_says_why(
    engine: str, dtype: str, device: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        e.load(engine, dtype, built(perceptron(), *rows(1, 16)), device, tmp_path)


# ONNX Runtime.


def onnx(dtype: str, case: Built, folder: Path) -> Any:
    return e.load(e.ONNX, dtype, case, "cpu", folder)


class Several(nn.Module):
    """Integers in, a mapping out, and an input that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, unused: Tensor) -> dict[str, Tensor]:
        hidden = self.table(ids)
        return {"logits": self.head(hidden), "best": self.head(hidden).argmax(-1)}


def test_onnx_runtime_computes_the_same_model_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    # The exporter once put the model into training mode, and dropout made each answer another one.
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 4))
    case = built(model, *rows(3, 16))
    engine = onnx("fp32", case, tmp_path)
    assert not any(m.training for m in case.module.modules())
    engine.set_threads(2)
    for inputs in case.held_out:
        found = engine.outputs(engine.run(engine.inputs(inputs)))
        assert max_absolute_error(found, [case.module(*inputs)]) < 1e-6


def test_onnx_runtime_takes_integers_and_gives_structures(tmp_path: Path) -> None:
    ids = torch.arange(6).reshape(2, 3)
    call = (ids, torch.zeros(2))
    case = Built(Several().eval().requires_grad_(False), call, (call,), (call,), None, CLOSE, close)
    engine = onnx("fp32", case, tmp_path)
    found = engine.outputs(engine.run(engine.inputs(call)))
    assert [t.shape for t in found] == [(2, 3, 3), (2, 3)]
    assert max_absolute_error(found, e.flat(case.module(*call))) < 1e-6


class Branching(nn.Module):
    """Takes one of two ways by its input, of which a trace sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found if x.sum() > 0 else -found


def test_an_export_that_computes_something_else_is_no_baseline(tmp_path: Path) -> None:
    x = rows(1, 16)[0].abs()
    assert onnx("fp32", built(Branching(), x), tmp_path) is not None
    with pytest.raises(UsageError, match="computes something else: off by"):
        onnx("fp32", built(Branching(), x, -x), tmp_path)


def test_onnx_int8_covers_convolutions_and_matrix_products(tmp_path: Path) -> None:
    convolutions = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 4)
    )
    for name, case, covers in (
        ("static", built(convolutions, *rows(8, 1, 8, 8)), "2 of 2 Conv; 1 of 1 MatMul (by static QDQ"),
        ("dynamic", built(perceptron(), *rows(3, 16)), "2 of 2 MatMul (by dynamic"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        engine = onnx("int8", case, folder)
        assert engine.quantized.startswith(covers)
        expected = [case.module(*case.examples)]
        error = max_absolute_error(engine.outputs(engine.run(engine.inputs(case.examples))), expected)
        assert 0 < error < 0.1 * float(expected[0].abs().max())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


def test_onnx_int8_tells_products_of_activations_apart(tmp_path: Path) -> None:
    engine = onnx("int8", built(Attention(), *rows(2, 5, 16)), tmp_path)
    assert engine.quantized.startswith("1 of 1 MatMul; 0 of 2 MatMul of activations (by dynamic")


def test_coverage_is_counted_in_the_graph_that_runs(tmp_path: Path) -> None:
    from secureinfer.bench.onnx_engine import covered

    engine = onnx("fp32", built(perceptron(), *rows(2, 16)), tmp_path)
    # A quantiser that did nothing, or whose casts the session took apart again.
    with pytest.raises(UsageError, match="covers nothing of this model: 0 of 2 MatMul"):
        covered(tmp_path / "fp32.onnx", engine._as_it_runs, "no")


def test_half_precision_that_the_session_computes_in_fp32_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"computes 2 of 2 products in fp32, not in fp16|has no|no session"):
        onnx("fp16", built(perceptron(), *rows(2, 16)), tmp_path)
