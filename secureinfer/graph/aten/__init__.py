"""ATen overload -> canonical operators. `ATEN` holds every overload that is understood."""

from . import arithmetic, layers, shapes
from .call import ATEN, Call, Unsupported

__all__ = ["ATEN", "Call", "Unsupported", "arithmetic", "layers", "shapes"]
