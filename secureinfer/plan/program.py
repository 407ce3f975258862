"""Program: graph + plan + weights, as a value and as a .si file.

A .si file is an uncompressed zip of manifest.json, public.safetensors and, for the model owner alone, weights.safetensors.
It is parsed as what it is, bytes from somebody else: bounded sizes, exact member names, no pickle, one typed error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..errors import ProgramFileError
from ..graph.ir import Graph
from .manifest import DTYPES, Fault, manifest_digest, read_manifest, tensors_digest, write_manifest
from .planner import Plan

MANIFEST, PUBLIC, WEIGHTS = "manifest.json", "public.safetensors", "weights.safetensors"
MAX_BYTES = {MANIFEST: 64 << 20, PUBLIC: 4 << 30, WEIGHTS: 64 << 30}
_SALT = "salt"


class Program:
    """What a model became: everything that parties need to run it.

    graph, plan: the computation and its kernels. backend, protocol, options: public settings. constants: public tensors.
    weights: private tensors by edge name, None in the public part. manifest_digest: hex SHA-256 of all that is public
    and none that is private. weights_digest: hex SHA-256 of the weights under a salt that only the weights' file holds,
    so that it identifies a release and lets nobody test guesses; None for a model without weights.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        backend: str,
        protocol: str,
        options: Mapping[str, Any],
        constants: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor] | None,
        weights_digest: str | None = None,
        salt: bytes | None = None,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.backend = backend
        self.protocol = protocol
        self.options = dict(options)
        self.constants = dict(constants)
        self.weights = None if weights is None else dict(weights)
        self._manifest = write_manifest(graph, plan, backend, protocol, options)
        self.manifest_digest = manifest_digest(self._manifest, self.constants)
        self._salt = salt or secrets.token_bytes(32)
        self.weights_digest = weights_digest if self.weights is None else self._digest_weights()

    def _digest_weights(self) -> str:
        return tensors_digest(self.weights or {}, b"secureinfer weights", self._salt)

    @property
    def is_public(self) -> bool:
        """Whether it holds no private weights."""
        return self.weights is None

    def public(self) -> Program:
        """The part that a data owner and a dealer get: everything but the weights."""
        return Program(
            self.graph, self.plan, backend=self.backend, protocol=self.protocol, options=self.options,
            constants=self.constants, weights=None, weights_digest=self.weights_digest,
        )  # fmt: skip

    def __repr__(self) -> str:
        kind = "public" if self.is_public else "private"
        return f"<Program {kind} {self.backend}/{self.protocol} {len(self.plan.steps)} steps {self.manifest_digest[:12]}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the .si file, whole or not at all. With private weights only its owner may read it (mode 0600)."""
        target = Path(path)
        members = {PUBLIC: safetensors.torch.save(self.constants)}
        if self.weights is not None:
            self.weights_digest = self._digest_weights()
            members[WEIGHTS] = safetensors.torch.save(self.weights, {_SALT: self._salt.hex()})
        head = {
            "manifest": self._manifest,
            "digest": self.manifest_digest,
            "weights_digest": self.weights_digest,
        }
        manifest = json.dumps(head, allow_nan=False).encode()
        try:
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        except OSError as error:
            raise ProgramFileError(f"cannot write {target}: {error.strerror}") from error
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for member, data in {MANIFEST: manifest, **members}.items():
                    archive.writestr(zipfile.ZipInfo(member), data)
            os.chmod(name, 0o644 if self.is_public else 0o600)
            os.replace(name, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise ProgramFileError(f"cannot write {target}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, allow_private: bool = True) -> Program:
        """Read a .si file. allow_private: False at a data owner or dealer, which must not hold weights.

        Raises ProgramFileError, with the file's name and what is wrong with it.
        """
        file = Path(path)
        try:
            members = _read_members(file, allow_private)
            return _build(members)
        except ProgramFileError:
            raise
        except Fault as error:
            raise ProgramFileError(f"{file.name} is not a valid program: {error}") from error
        except FileNotFoundError as error:
            raise ProgramFileError(f"there is no program file {file}") from error
        except OSError as error:
            raise ProgramFileError(f"cannot read {file}: {error.strerror or 'it is damaged'}") from error
        except RecursionError as error:
            raise ProgramFileError(f"{file.name} is not a valid program: its manifest is too deep") from error
        except Exception as error:  # zipfile, json and safetensors raise many kinds on damaged bytes
            raise ProgramFileError(f"{file.name} is damaged or no program: {type(error).__name__}") from error


def _read_members(file: Path, allow_private: bool) -> dict[str, bytes]:
    """The members' bytes, after checking names, sizes and storage against what a program file may have."""
    if file.is_dir():
        raise ProgramFileError(f"{file} is a folder; a .si program file is expected")
    with open(file, "rb") as stream:
        start = stream.read(4)
        if start != b"PK\x03\x04":
            hint = "it is empty" if not start else "it does not start like a .si program"
            raise Fault(f"{hint}; compile the model with secureinfer.compile and save the Program")
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 22))
        end = stream.read(22)
        # Refused before zipfile builds its list: a comment, or more entries than a program has.
        if len(end) < 22 or end[:4] != b"PK\x05\x06" or not 1 <= int.from_bytes(end[10:12], "little") <= 3:
            raise Fault("it is truncated, or an archive of something else")
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            names = [i.filename for i in infos]
            if sorted(names) not in ([MANIFEST, PUBLIC], [MANIFEST, PUBLIC, WEIGHTS]):
                raise Fault("its members are not those of a program")
            if WEIGHTS in names and not allow_private:
                raise ProgramFileError(
                    f"{file.name} holds private weights, which only the model owner's process may read; "
                    "ask for the file that Program.public() saves"
                )
            for info in infos:
                if (
                    info.compress_type != zipfile.ZIP_STORED
                    or info.file_size != info.compress_size
                    or info.flag_bits & 1
                ):
                    raise Fault(f"{info.filename} is compressed or encrypted")
                if info.file_size > min(MAX_BYTES[info.filename], size):
                    raise Fault(f"{info.filename} claims {info.file_size} bytes, which is too large")
            return {i.filename: archive.read(i) for i in infos}


def _constant(text: str) -> Any:
    raise Fault(f"its manifest holds {text}, which is not JSON")


def _build(members: Mapping[str, bytes]) -> Program:
    head = json.loads(members[MANIFEST].decode("utf-8"), parse_constant=_constant)
    if not isinstance(head, dict) or head.keys() != {"manifest", "digest", "weights_digest"}:
        raise Fault("it does not have the parts of a program")
    graph, plan, backend, protocol, options = read_manifest(head["manifest"])
    weights_digest = head["weights_digest"]
    if weights_digest is not None and not isinstance(weights_digest, str):
        raise Fault("its weights digest is not text")
    constants, _ = _read_tensors(members[PUBLIC], PUBLIC, graph, graph.constants)
    weights, salt = None, None
    if WEIGHTS in members:
        weights, salt = _read_tensors(members[WEIGHTS], WEIGHTS, graph, graph.weights)
        if salt is None:
            raise Fault(f"{WEIGHTS} has no salt")
    program = Program(
        graph, plan, backend=backend, protocol=protocol, options=options, constants=constants, weights=weights,
        weights_digest=weights_digest, salt=salt,
    )  # fmt: skip
    if program.manifest_digest != head["digest"]:
        raise Fault("its digest does not match its content")
    if program.weights_digest != weights_digest:
        raise Fault("its weights are not those that it was saved with")
    return program


def _read_tensors(
    data: bytes, member: str, graph: Graph, wanted: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], bytes | None]:
    """Tensors of a member, which must be exactly the wanted edges, with their shapes and types; and its salt."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_BYTES[MANIFEST]):
        raise Fault(f"{member} is truncated")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise Fault(f"{member} is damaged") from error
    if tensors.keys() != set(wanted):
        raise Fault(f"{member} does not hold exactly the tensors of the graph")
    for name, tensor in tensors.items():
        edge = graph.edge(name)
        if tuple(tensor.shape) != edge.shape or tensor.dtype != DTYPES[edge.dtype]:
            raise Fault(f"{member} holds {name} with another shape or type than the graph says")
    salt = metadata.get(_SALT)
    return tensors, bytes.fromhex(salt) if salt else None
