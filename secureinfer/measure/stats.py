"""What a worker tells about its session: checked shapes of the statistics that peers send as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import WireError

Phase = Literal["setup", "offline", "online"]
PHASES: tuple[Phase, ...] = ("setup", "offline", "online")

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LinkStats(_Checked):
    """One side's count of one link in one run of a phase. Bytes are frame headers plus payload."""

    bytes_sent: Count
    bytes_received: Count
    frames_sent: Count
    frames_received: Count


class StepStats(_Checked):
    """One plan step in one run. rounds is None: the Lamport count is of a whole run. waiting_ms: in its frames."""

    latency_ms: Amount | None = None
    waiting_ms: Amount | None = None
    bytes_sent: Count = 0
    bytes_received: Count = 0


class RunStats(_Checked):
    """One run of one phase: setup (inference 0), or one inference's offline or online part.

    waiting_ms: how much of it its thread was blocked, in receiving from peers or in sending to them.
    """

    inference: Count
    latency_ms: Amount | None = None
    waiting_ms: Amount | None = None
    rounds: Count | None = None
    cpu_seconds: Amount | None = None
    peak_memory_bytes: Count | None = None
    peak_gpu_memory_bytes: Count | None = None
    links: Mapping[str, LinkStats] = {}
    steps: Mapping[int, StepStats] = {}


class WorkerStats(_Checked):
    """All that one party's worker counted. peak_memory_bytes: highest resident size of its process so far.

    peak_gpu_memory_bytes: the same of its GPUs; None where it used none.
    """

    party: str
    role: str
    phases: Mapping[Phase, tuple[RunStats, ...]]
    peak_memory_bytes: Count | None = None
    peak_gpu_memory_bytes: Count | None = None
    threads: Count | None = None

    def runs(self, phase: Phase) -> tuple[RunStats, ...]:
        return self.phases.get(phase, ())


def parse_worker(raw: Any) -> WorkerStats:
    """The statistics that a worker sent. Raises WireError if they are not what the protocol says."""
    if isinstance(raw, WorkerStats):
        return raw
    try:
        return WorkerStats.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(
            f"statistics of a party are malformed at {where or 'top level'}: {first['msg']}"
        ) from error
