"""`python -m benchmarks run|report|compare|list ...`, the harness as `secureinfer bench` has it, and benchmarks of parts."""

from __future__ import annotations

import sys
from collections.abc import Callable

from secureinfer import cli

HARNESS = ("run", "report", "compare", "list")
PARTS = ("ckks", "dealing", "mpc", "products", "transport")
PEERS = "peers"


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else None
    if name in HARNESS:
        return cli.run(["bench", *arguments])
    if name == PEERS:
        from .peers.bert import command

        return command.main(arguments[1:])
    if name not in PARTS:
        sys.stderr.write(
            f"usage: python -m benchmarks {{{','.join(HARNESS)}}} ..., as `secureinfer bench`; of parts: "
            f"python -m benchmarks {{{','.join(PARTS)}}} [--quick] [--json]; beside others' engines: "
            f"python -m benchmarks {PEERS} [--help]\n"
        )
        return 2
    _part(name)(arguments[1:])
    return 0


def _part(name: str) -> Callable[[list[str]], None]:
    from secureinfer.bench import products, transport

    from . import ckks, dealing, mpc

    return {
        "ckks": ckks.main,
        "dealing": dealing.main,
        "mpc": mpc.main,
        "products": products.main,
        "transport": transport.main,
    }[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
