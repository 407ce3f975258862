"""In every Python process that finds this on its path, the toy stands in for the CKKS backend, and loads when it is used."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

PACKAGE = "secureinfer.backends.ckks"


class Late(types.ModuleType):
    """The toy's catalog and engine; whatever else a module has is the real one's."""

    def __getattr__(self, name: str) -> Any:
        if name == "CATALOG" or name == "make_engine":
            import toy_ckks

            return toy_ckks.registry() if name == "CATALOG" else toy_ckks.make_engine
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__.rpartition(".")[2]), name)


def _real(name: str) -> types.ModuleType:
    full = f"{PACKAGE}._real_{name}"
    if full not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None and spec.submodule_search_locations
        file = f"{spec.submodule_search_locations[0]}/{name}.py"
        found = importlib.util.spec_from_file_location(full, file)
        assert found is not None and found.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    return sys.modules[full]


for name in ("catalog", "engine"):
    sys.modules[f"{PACKAGE}.{name}"] = Late(f"{PACKAGE}.{name}")
