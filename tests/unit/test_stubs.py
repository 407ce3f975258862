"""The generated stubs are what protos/ says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "secureinfer" / "v1"


def fresh(folder: Path) -> dict[str, bytes]:
    runpy.run_path(str(ROOT / "protos" / "generate.py"))["generate"](folder)
    return {p.name: p.read_bytes() for p in (folder / "secureinfer" / "v1").iterdir()}


@pytest.mark.needs("grpcio-tools")
def test_the_stubs_have_not_drifted_from_the_protos(tmp_path: Path) -> None:
    made = fresh(tmp_path)
    assert len(made) == 3
    assert made == {name: (GENERATED / name).read_bytes() for name in made}


def test_every_generated_file_has_a_source() -> None:
    sources = {p.stem for p in (ROOT / "protos" / "secureinfer" / "v1").glob("*.proto")}
    files = {p.name.partition("_pb2")[0] for p in GENERATED.glob("*_pb2*")}
    assert files == sources
