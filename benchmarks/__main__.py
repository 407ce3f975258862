"""`python -m benchmarks ckks|dealing|mpc|products|transport [--quick] [--json]`."""

from __future__ import annotations

import sys

from secureinfer.bench import products, transport

from . import ckks, dealing, mpc

BENCHMARKS = {
    "ckks": ckks.main,
    "dealing": dealing.main,
    "mpc": mpc.main,
    "products": products.main,
    "transport": transport.main,
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BENCHMARKS:
        sys.stderr.write(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [--quick] [--json]\n")
        return 2
    BENCHMARKS[arguments[0]](arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
