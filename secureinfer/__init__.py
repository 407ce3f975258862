"""Private inference for PyTorch and Hugging Face models, between real parties.

The names of this package in the order of the flow: compress and its transforms, compile, Program, local_session or
connect, Session, Report; and the errors. They load on first use, so that a daemon that only routes never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import compile as compile
    from .api import compress as compress
    from .api import connect as connect
    from .api import local_session as local_session
    from .compression.approximate import Approximate as Approximate
    from .compression.quantize import Quantize as Quantize
    from .compression.report import CompressionReport as CompressionReport
    from .compression.tune import FineTune as FineTune
    from .errors import AuthenticationError as AuthenticationError
    from .errors import CompileError as CompileError
    from .errors import CorrelationError as CorrelationError
    from .errors import HandshakeError as HandshakeError
    from .errors import InputError as InputError
    from .errors import LimitError as LimitError
    from .errors import PeerError as PeerError
    from .errors import ProgramFileError as ProgramFileError
    from .errors import RangeError as RangeError
    from .errors import SecureInferError as SecureInferError
    from .errors import SessionError as SessionError
    from .errors import SettingsError as SettingsError
    from .errors import UnsafeError as UnsafeError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .errors import UsageError as UsageError
    from .errors import WireError as WireError
    from .measure.report import Report as Report
    from .plan.program import Program as Program
    from .session.client import Session as Session

_ERRORS = (
    "SecureInferError", "UsageError", "SettingsError", "LimitError", "InputError", "RangeError",
    "CompileError", "UnsupportedModelError", "ProgramFileError", "SessionError", "HandshakeError",
    "AuthenticationError", "PeerError", "WireError", "CorrelationError", "UnsafeError",
)  # fmt: skip

_HOMES = {
    "compress": "api",
    "Approximate": "compression.approximate",
    "FineTune": "compression.tune",
    "Quantize": "compression.quantize",
    "CompressionReport": "compression.report",
    "compile": "api",
    "Program": "plan.program",
    "local_session": "api",
    "connect": "api",
    "Session": "session.client",
    "Report": "measure.report",
    **dict.fromkeys(_ERRORS, "errors"),
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
