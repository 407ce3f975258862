"""Every kernel of the MPC catalog against float64, and against the cost and error that its row declares."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secureinfer.backends.mpc import kernels, windows
from secureinfer.backends.mpc.fast.catalog import CATALOG
from secureinfer.graph.ir import Edge, Graph, Node, Visibility
from secureinfer.plan.spec import longest_chain, step_context

from . import fast_cases  # noqa: F401  (registers its cases)
from .cases import CASES, INT8_CASES, Case
from .harness import Operand, one_step, run

EXAMPLES = int(os.environ.get("SECUREINFER_EXAMPLES", "3"))
ROW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
FRAME = ("begin", "reveal")


def test_every_row_has_code_and_every_code_a_row() -> None:
    import secureinfer.backends.mpc.engine  # noqa: F401  (binds)

    assert kernels.bound() == frozenset(CATALOG.specs)


def test_every_row_has_a_case() -> None:
    assert frozenset(CASES) | frozenset(FRAME) == frozenset(CATALOG.specs)


def test_code_without_a_row_cannot_be_bound() -> None:
    with pytest.raises(ValueError, match="no row"):
        kernels.kernel("gelu.invented")


def test_two_codes_cannot_be_bound_to_one_row() -> None:
    with pytest.raises(ValueError, match="twice"):
        kernels.kernel("gelu.series")


def check(kernel: str, case: Case, parties: int) -> None:
    """Value within the declared error; rounds, bytes and dealt bytes exactly as declared."""
    expected = case.expected()
    program, inputs, step = one_step(
        case.op,
        case.operands,
        case.attrs,
        expected.shape,
        kernel=kernel,
        output_dtype=case.output_dtype,
        output_bound=case.output_bound,
        output_scale=case.output_scale,
        output_ring_bits=case.output_ring_bits,
        parties=parties,
        private=kernel.startswith("private."),
    )
    context = step_context(program.graph, step.node, parties, program.options)
    measured = run(program, inputs, parties=parties, step=step.index)
    got = measured.outputs["y"]
    assert got.shape == expected.shape
    shown = "1" if program.graph.edge("y").visibility is Visibility.SHARED else ""
    declared = (
        longest_chain(step.cost.messages + shown, parties),
        step.cost.bytes,
        step.cost.dealt_bytes,
        step.cost.setup_bytes + setup_of_seeds(parties),
    )
    assert (measured.rounds, measured.bytes, measured.dealt_bytes, measured.setup_bytes) == declared
    if expected.numel():
        bound = CATALOG.specs[kernel].error_bound(context)
        # The output comes back as the model's float32, which rounds once more.
        rounding = expected.double().abs() * 2.0**-23
        error = (got.double() - expected.double()).abs() - rounding
        assert float(error.max()) <= bound, f"{kernel}: error {float(error.max())} above {bound}"


def setup_of_seeds(parties: int) -> int:
    begin = CATALOG.specs["begin"]
    from secureinfer.plan.spec import StepContext

    return begin.cost(StepContext(Node("begin", "begin", (), ()), (), (), parties, {})).setup_bytes


@pytest.mark.parametrize("kernel", sorted(CASES))
@ROW
@given(data=st.data())
def test_kernel_holds_to_its_row(kernel: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    parties = data.draw(st.sampled_from([2, 2, 3]))
    check(kernel, CASES[kernel](data.draw), parties)


@pytest.mark.parametrize("kernel", sorted(INT8_CASES))
@settings(ROW, max_examples=2 * EXAMPLES)
@given(data=st.data())
def test_kernel_holds_to_its_row_on_int8_weights(kernel: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    parties = 2 if CATALOG.specs[kernel].parties == 2 else data.draw(st.sampled_from([2, 2, 3]))
    check(kernel, INT8_CASES[kernel](data.draw), parties)


def test_a_beaver_product_refuses_an_int8_weight() -> None:
    """A plan from a file could name it, and it would take the scales for a bias."""
    int8 = Operand(torch.ones(3, 2, dtype=torch.int8), "weight")
    operands = [Operand(torch.ones(1, 2)), int8, Operand(torch.ones(3), "weight")]
    with pytest.raises(ValueError, match="the weight is int8"):
        one_step("linear", operands, {"quantized": True, "has_bias": False}, (1, 3), kernel="linear.beaver")


@pytest.mark.parametrize("limits", [(-1e30, 1.0), (-math.inf, 1.0), (-1.0, math.inf), (-math.inf, 1e30)])
def test_a_limit_beyond_every_value_limits_nothing_and_costs_nothing(limits: tuple[float, float]) -> None:
    x = torch.tensor([-(2.0**40), -3.5, 0.0, 2.25, 2.0**40])
    check("clamp.compare", Case("clamp", [Operand(x)], {"min": limits[0], "max": limits[1]}), 2)
    context = step_context(*_clamped(math.inf, None))
    assert "does not fit into the ring" in str(CATALOG.specs["clamp.compare"].accepts(context))


def _clamped(low: float | None, high: float | None) -> tuple[Graph, Node, int, dict[str, int]]:
    edges = {n: Edge(n, (2,), "float32", scale=16) for n in ("x", "y")}
    node = Node("clamp", "clamp", ("x",), ("y",), {"min": low, "max": high})
    return Graph((node,), edges, (), (), (), ("y",)), node, 2, {"precision_bits": 16}


@pytest.mark.parametrize("kernel", sorted(k for k in CASES if "window" in k))
@ROW
@given(data=st.data())
def test_kernel_holds_to_its_row_where_many_values_are_compared(
    kernel: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(windows, "DIRECT_BYTES", 0)
    torch.manual_seed(1)
    check(kernel, CASES[kernel](data.draw), data.draw(st.sampled_from([2, 3])))
