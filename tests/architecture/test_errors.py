"""The error catalogue is complete, and what a peer reads is constant."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re

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
        import gc

        gc.collect()  # a class lives in its base's __subclasses__ until it is collected


@pytest.mark.parametrize("cls", defined(), ids=lambda c: c.__name__)
def test_each_error_has_a_stable_code_a_grpc_status_and_a_public_text(cls: type[SecureInferError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert hasattr(grpc.StatusCode, cls.status)
    assert cls.public_text == cls.public_text.strip() != ""


def test_the_module_docstring_draws_every_error() -> None:
    drawn = set(re.findall(r"\b(\w+Error)\b", errors.__doc__ or ""))
    assert drawn == {c.__name__ for c in defined()}


def test_no_error_class_of_the_package_is_defined_elsewhere() -> None:
    for info in pkgutil.walk_packages(secureinfer.__path__, "secureinfer."):
        if info.name.startswith("secureinfer.v1") or info.name == "secureinfer.errors":
            continue
        spec = importlib.util.find_spec(info.name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        with open(spec.origin, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = " ".join(ast.unparse(b) for b in node.bases)
                assert not re.search(r"Error\b", bases), f"{info.name}.{node.name}"


def test_a_peer_reads_the_public_text_and_never_the_message() -> None:
    error = errors.InputError("row 3 is 1.25", public_detail="x")
    assert error.for_peer == "an input was refused before it was shared: x"
    assert "1.25" not in error.for_peer
    assert PeerError("dealer", "no answer in 5 s at a secret place").for_peer == "a peer is gone: dealer"
    nodes = [UnsupportedNode("fft", "aten._fft_r2c", "model.mix", "no kernel")]
    assert "model.mix: aten._fft_r2c (node fft): no kernel" in str(UnsupportedModelError(nodes))
