"""A plan has a kernel for every node, or a reason for every node that has none."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from secureinfer.api import compile as compile_model
from secureinfer.errors import CompileError, SettingsError, UnsupportedModelError
from secureinfer.graph.export import export_graph
from secureinfer.graph.ops import OPS
from secureinfer.plan.planner import make_plan
from secureinfer.plan.spec import Cost, KernelSpec, Registry, StepContext

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
OPTIONS = {"precision_bits": 16}


def row(
    op: str,
    name: str = "",
    accepts: Callable[[StepContext], str | None] = lambda c: None,
    parties: int | None = None,
) -> KernelSpec:
    def cost(c: StepContext) -> Cost:
        return Cost("x", 100 * len(c.inputs), 7, frozenset({(c.node.op, 5)}))

    return KernelSpec(op, name or op, "dummy", accepts, cost, lambda c: 0.0, "nowhere", parties)


def registry(*specs: KernelSpec) -> Registry:
    return Registry("dummy", [row("begin"), *specs, row("reveal")])


def test_the_first_kernel_that_accepts_is_chosen() -> None:
    graph, _, _ = export_graph(MODEL, (X,))
    plan = make_plan(
        graph,
        registry(
            row("linear", "three", parties=3),
            row("linear", "narrow", lambda c: None if c.outputs[0].shape[-1] == 2 else "only two columns"),
            row("linear", "wide"),
            row("relu"),
        ),
        2,
        OPTIONS,
    )
    assert [s.kernel for s in plan.steps] == ["begin", "wide", "relu", "narrow", "reveal"]
    assert [s.index for s in plan.steps] == [0, 1, 2, 3, 4]
    assert plan.steps[0].node.inputs == () and plan.steps[-1].node.inputs == graph.outputs


def test_totals_are_the_sum_and_setup_counts_once() -> None:
    graph, _, _ = export_graph(MODEL, (X,))
    plan = make_plan(graph, registry(row("linear"), row("relu")), 2, OPTIONS)
    assert plan.totals.bytes == 100 * (0 + 3 + 1 + 3 + 1)
    assert plan.totals.dealt_bytes == 35 and plan.totals.rounds == 5
    assert plan.totals.setup_bytes == 4 * 5  # begin, linear, relu, reveal


def test_the_table_has_a_row_a_step_and_the_totals() -> None:
    graph, _, _ = export_graph(MODEL, (X,))
    plan = make_plan(graph, registry(row("linear", "linear.weight"), row("relu")), 2, OPTIONS)
    lines = str(plan).splitlines()
    assert len(lines) == 1 + 1 + 5 + 1 + 1
    assert lines[0].split() == ["step", "path", "operator", "kernel", "rounds", "bytes", "dealt", "bytes"]
    assert lines[3].split() == ["1", "0", "linear", "linear.weight", "1", "300", "7"]
    assert lines[-1].split() == ["total", "5", "800", "35"]
    assert all(line == line.rstrip() or line.endswith(" ") for line in lines)


def test_every_node_without_a_kernel_is_listed_with_every_reason() -> None:
    graph, _, _ = export_graph(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (X,))
    catalog = registry(row("linear", "three", parties=3), row("linear", "never", lambda c: "too wide"))
    with pytest.raises(UnsupportedModelError) as caught:
        make_plan(graph, catalog, 2, OPTIONS)
    nodes = caught.value.nodes
    assert [(n.node, n.path, n.operator) for n in nodes] == [
        ("linear_0", "0", "aten.linear.default"),
        ("tanh_0", "1", "aten.tanh.default"),
        ("linear_1", "2", "aten.linear.default"),
    ]
    assert nodes[0].reason == "three takes 3 parties, not 2; never: too wide"
    assert "no kernel for tanh" in nodes[1].reason


def test_operators_without_canonical_form_and_without_kernel_are_listed_together() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x.erf())[0]

    graph, _, _ = export_graph(nn.Sequential(nn.Linear(4, 4), Odd()), (X,), keep_unsupported=True)
    with pytest.raises(UnsupportedModelError) as caught:
        make_plan(graph, registry(row("linear")), 2, OPTIONS)
    assert [n.operator for n in caught.value.nodes] == ["aten.erf.default", "aten.sort.default"]


def test_compile_lists_both_kinds_too() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0]

    for backend in ("plaintext", "mpc"):
        with pytest.raises(UnsupportedModelError) as caught:
            compile_model(nn.Sequential(nn.Linear(4, 4), Odd()), X, backend=backend)
        assert [n.operator for n in caught.value.nodes] == ["aten.sort.default"]


def test_the_plaintext_catalog_has_every_operator() -> None:
    from secureinfer.backends.plaintext.catalog import CATALOG

    assert {s.op for s in CATALOG.specs.values()} == {"begin", *OPS, "reveal"}


def test_compiling_for_mpc_loads_neither_crypten_nor_grpc() -> None:
    import subprocess

    code = (
        "import sys, torch, secureinfer as si\n"
        "p = si.compile(torch.nn.Linear(4, 2), torch.rand(1, 4))\n"
        "assert p.plan.totals.bytes > 0\n"
        "bad = {'crypten', 'grpc', 'tenseal', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_package_is_light_and_names_its_public_things() -> None:
    import subprocess

    code = (
        "import sys, secureinfer as si\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'compile', 'Program', 'local_session', 'connect', 'Session', 'Report'} <= set(si.__all__) <= set(dir(si))\n"
        "from secureinfer import errors\n"
        "wanted = {c.__name__ for c in errors.catalogue().values()}\n"
        "assert wanted <= set(si.__all__), wanted - set(si.__all__)\n"
        "assert si.UsageError is errors.UsageError and 'torch' not in sys.modules\n"
        "try:\n    si.nothing\nexcept AttributeError: pass\nelse: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("bits", [32, 21, 7, 0, -1, 16.0, True, "16"])
def test_a_precision_that_cannot_work_is_refused_with_the_reason(bits: object) -> None:
    """Field report 15: with 32 fraction bits 3 x 4 is 0."""
    with pytest.raises(SettingsError, match="8 to 20.*3 x 4 becomes 0"):
        compile_model(MODEL, X, precision_bits=bits)  # type: ignore[arg-type]


def test_the_reason_is_true() -> None:
    """3 x 4 in a ring of 64 bits with 32 fraction bits wraps to 0, and with 20 it does not."""

    def product(bits: int) -> float:
        a, b = (torch.tensor(int(v * 2**bits), dtype=torch.int64) for v in (3, 4))
        return ((a * b) >> bits).item() / 2**bits

    assert product(32) == 0 and product(20) == 12


def test_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SettingsError, match="'quantum'.*mpc"):
        compile_model(MODEL, X, backend="quantum")
    with pytest.raises(SettingsError, match="'quick'.*crypten"):
        compile_model(MODEL, X, protocol="quick")
    with pytest.raises(CompileError, match="state_dict"):
        compile_model("model.pt", X)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="example inputs"):
        compile_model(MODEL, 3)
