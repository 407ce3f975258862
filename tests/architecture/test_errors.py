"""The error catalogue is complete, and what a peer reads is constant."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path

import grpc
import pytest

import secureinfer
from secureinfer import errors
from secureinfer.errors import PeerError, SecureInferError, UnsupportedModelError, UnsupportedNode


def defined() -> list[type[SecureInferError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, SecureInferError)]


def test_every_error_is_in_the_catalogue_under_its_own_code() -> None:
    catalogue = errors.catalogue()
    assert set(catalogue.values()) == set(defined())
    assert all(catalogue[c.code] is c for c in defined())


def test_a_class_that_forgets_its_code_is_noticed() -> None:
    class Forgetful(errors.SessionError):
        pass

    try:
        assert set(errors.catalogue().values()) != {*defined(), Forgetful}
    finally:
        del Forgetful
        gc.collect()  # a class lives in its base's __subclasses__ until it is collected


@pytest.mark.parametrize("cls", defined(), ids=lambda c: c.__name__)
def test_each_error_has_a_stable_code_a_grpc_status_and_a_public_text(cls: type[SecureInferError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert hasattr(grpc.StatusCode, cls.status)
    assert cls.public_text == cls.public_text.strip() != ""


def test_the_module_docstring_draws_every_error() -> None:
    drawn = set(re.findall(r"\b(\w+Error)\b", errors.__doc__ or ""))
    assert drawn == {c.__name__ for c in defined()}


def outside(source: str) -> list[str]:
    """Classes in a module's source that grow the tree from outside of errors.py."""
    names = {c.__name__ for c in defined()}
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and {ast.unparse(b).rpartition(".")[2] for b in node.bases} & names
    ]


def test_the_tree_grows_nowhere_else() -> None:
    package = Path(secureinfer.__path__[0])
    files = [p for p in package.rglob("*.py") if p != package / "errors.py"]
    assert {str(p): found for p in files if (found := outside(p.read_text(encoding="utf-8")))} == {}
    assert outside("class E(errors.PeerError): pass\nclass F(WireError): pass") == ["E", "F"]


def test_a_peer_reads_the_public_text_and_never_the_message() -> None:
    error = errors.InputError("row 3 is 1.25", public_detail="x")
    assert error.for_peer == "an input was refused before it was shared: x"
    assert "1.25" not in error.for_peer
    assert PeerError("dealer", "no answer in 5 s at a secret place").for_peer == "a peer is gone: dealer"
    nodes = [UnsupportedNode("fft", "aten._fft_r2c", "model.mix", "no kernel")]
    assert "model.mix: aten._fft_r2c (node fft): no kernel" in str(UnsupportedModelError(nodes))
