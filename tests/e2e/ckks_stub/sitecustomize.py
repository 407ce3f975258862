"""In every Python process that finds this on its path, the toy stands in for the CKKS backend, and loads when it is used."""

from __future__ import annotations

import sys
import types
from typing import Any


class Late(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in ("CATALOG", "make_engine"):
            raise AttributeError(name)
        import toy_ckks

        return toy_ckks.registry() if name == "CATALOG" else toy_ckks.make_engine


for name in ("catalog", "engine"):
    full = f"secureinfer.backends.ckks.{name}"
    sys.modules[full] = Late(full)
