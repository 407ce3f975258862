"""What a program file says about itself, read without torch, so that a daemon and a dialling worker stay
small.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ProgramFileError

_MANIFEST, _WEIGHTS = "manifest.json", "weights.safetensors"
_MAX_MANIFEST_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ProgramHead:
    """digest: as the file claims it; whoever runs the program loads it whole, which computes it again.

    owners: data owners in rank order, by the names that the program gives them. has_weights: the model has
    any; they are in the file unless is_public.
    """

    digest: str
    backend: str
    protocol: str
    owners: tuple[str, ...]
    unsafe: tuple[str, ...]
    is_public: bool
    has_weights: bool


def read_manifest(path: Path, *, allow_private: bool) -> ProgramHead:
    """Read a program file's head. Raises ProgramFileError, also for private weights where they must not
    be.
    """
    try:
        # Before zipfile builds its list: a program has two or three members and no comment.
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - 22))
            end = stream.read(22)
            if end[:4] != b"PK\x05\x06" or not 2 <= int.from_bytes(end[10:12], "little") <= 3:
                raise ProgramFileError(f"{path.name} is truncated, or no program")
            with zipfile.ZipFile(stream) as archive:
                info = archive.getinfo(_MANIFEST)
                private = _WEIGHTS in archive.namelist()
                # The sizes are the file's own word, and zipfile takes that much memory before it reads.
                if (
                    info.compress_type != zipfile.ZIP_STORED
                    or info.compress_size != info.file_size
                    or info.file_size > min(size, _MAX_MANIFEST_BYTES)
                ):
                    raise ProgramFileError(f"{path.name} has a compressed or too large manifest")
                raw = json.loads(archive.read(info))
        head = _head(raw, is_public=not private)
    except FileNotFoundError:
        raise ProgramFileError(f"there is no program file {path}") from None
    except OSError as error:
        raise ProgramFileError(f"cannot read {path}: {error.strerror or 'it is damaged'}") from None
    except ProgramFileError:
        raise
    except Exception as error:  # zipfile and json raise many kinds on damaged bytes
        raise ProgramFileError(f"{path.name} is damaged or no program: {type(error).__name__}") from None
    if private and not allow_private:
        raise ProgramFileError(
            f"{path.name} holds private weights, which only the model owner's process may read; ask for the file "
            "that Program.public() saves"
        )
    return head


def _head(raw: Any, *, is_public: bool) -> ProgramHead:
    digest, manifest = raw["digest"], raw["manifest"]
    backend, protocol = manifest["backend"], manifest["protocol"]
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError("digest")
    if not all(isinstance(name, str) and 0 < len(name) < 64 for name in (backend, protocol)):
        raise ValueError("backend")
    edges = {row[0]: row[4] for row in manifest["graph"]["edges"]}
    owners = dict.fromkeys(edges[name] for name in manifest["graph"]["inputs"])
    unsafe = sorted(k for k, v in manifest["options"].items() if k.startswith("unsafe_") and v)
    return ProgramHead(
        digest,
        backend,
        protocol,
        tuple(str(o) for o in owners if o is not None),
        tuple(unsafe),
        is_public,
        bool(manifest["graph"]["weights"]),
    )
