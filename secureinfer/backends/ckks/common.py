"""What the engines of both parties have alike: the program's packing, the context, and what binds a ciphertext to them."""

from __future__ import annotations

from typing import Any

from ...errors import CorrelationError, ProgramFileError
from ...plan.program import Program
from ...transport.base import Link
from ..base import Engine
from .context import Context, context_id
from .messages import Place
from .params import from_options
from .reading import BadPlan, Packing

STEP = 1
"""Step of the plan whose frames hold inputs; the last step's hold outputs."""


class Common:
    def __init__(self, program: Program, link: Link, session_id: bytes) -> None:
        self.program, self.link, self.session_id = program, link, session_id
        self.parameters = from_options(program.options)
        try:
            self.packing = Packing(program.graph, program.constants, program.options, self.parameters)
        except Exception as error:  # whatever odd constants make a layout stumble
            reason = str(error) if isinstance(error, BadPlan) else f"it does not fit ({type(error).__name__})"
            raise ProgramFileError(
                f"this program is not what compiling gives: {reason}; compile the model again",
                public_detail="packing",
            ) from None
        self.private = bool(program.options.get("circuit_privacy", 0))
        self.context = Context(self.parameters)
        self.context_id = b""

    def bind(self, keys: list[Any]) -> None:
        """The context id of this session, program and keys."""
        self.context_id = context_id(self.session_id, self.program.manifest_digest, keys)

    def place(self, inference: int, kind: int, ordinal: int, count: int) -> Place:
        return Place(self.context_id, inference, kind, ordinal, count)


class CkksEngine(Engine):
    def __init__(self, common: Common) -> None:
        self._common = common
        self._next = 0
        self._times: dict[int, float] = {}

    def prepare(self, index: int) -> None:
        """There is nothing to deal."""

    def _burn(self, index: int) -> None:
        if index < self._next:
            raise CorrelationError(f"inference {index} was already run")
        self._next = index + 1

    def step_times(self) -> dict[int, float]:
        return dict(self._times)
