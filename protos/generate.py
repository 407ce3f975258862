"""Write secureinfer/v1/*_pb2*.py and .pyi from protos/: `python protos/generate.py [folder]` (needs grpcio-tools)."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

PROTOS = Path(__file__).parent
SOURCES = ("secureinfer/v1/control.proto",)


def generate(folder: Path) -> None:
    """Generate into folder/secureinfer/v1. Raises RuntimeError if protoc refuses a source."""
    from grpc_tools import protoc

    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--grpc_python_out={folder}",
            *SOURCES,
        ]
    )
    if code != 0:
        raise RuntimeError(f"protoc ended with {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
