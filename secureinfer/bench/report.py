"""The typed report of the harness: cases, baselines, overheads, loads; one JSON document with a version.

A field is None where the figure is unknown, never 0. Units stand in names. `read` refuses what it does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InputError, UsageError

SCHEMA: Final = "secureinfer.bench/1"

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Checked):
    """Where a figure lies with this confidence."""

    low: Amount
    high: Amount
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class Timed(_Checked):
    """Latencies of warm runs, milliseconds. A percentile is None where it needs more runs (p90: 10, p99: 100).

    runs_ms: each warm run, in the order in which they ran. block: the same position of another Timed of the case was
    measured in the same block, so that runs of one position may be paired.
    """

    count: Count
    latency_ms: Amount | None
    latency_ms_p50: Amount | None
    latency_ms_p90: Amount | None
    latency_ms_p99: Amount | None
    latency_ms_interval: Interval | None = None
    latency_ms_p50_interval: Interval | None = None
    latency_ms_p90_interval: Interval | None = None
    latency_ms_p99_interval: Interval | None = None
    cold_latency_ms: Amount | None = None
    runs_ms: tuple[Amount, ...] = ()
    blocks: tuple[Count, ...] = ()
    """How many of runs_ms each block has, in order. Runs of one block are not independent of each other."""


class Energy(_Checked):
    """Of one inference of the whole batch, by one meter for all processes of the machine.

    source: nvml, rapl, nvml+rapl, or estimated; None with unknown joules. joules: idle included, as the counter says.
    above_idle_joules: less what the idle machine takes in that time; None where idle could not be measured.
    """

    joules: Amount | None = None
    joules_per_sample: Amount | None = None
    above_idle_joules: Amount | None = None
    source: str | None = None


class Meter(_Checked):
    """What energy was read from. model: the stated power model of an estimate. idle_watts: measured before the cases."""

    source: str | None = None
    model: str | None = None
    idle_watts: Amount | None = None
    idle_seconds: Amount | None = None
    unavailable: tuple[str, ...] = ()
    """Why each better source could not be read."""


class CaseKey(_Checked):
    """What a case is a point of. batch: samples of one inference.

    network: loopback, lan, wan; or one of the latter two with ":projected" after it, computed from a loopback run.
    """

    model: str
    compression: str = "none"
    backend: str = "mpc"
    network: str = "loopback"
    batch: Annotated[int, Field(ge=1)] = 1

    def __str__(self) -> str:
        return f"{self.model}/{self.compression}/{self.backend}/{self.network}/{self.batch}"


class ModelFacts(_Checked):
    """What ran. float_bytes, compressed_bytes: parameters and buffers before and after compression.

    title: for people, such as "MiniLM-L6, pretrained". weights: pretrained, trained or random. tokens: of one inference,
    all samples; None where samples have no tokens. compression: of si.compress's report (what was and was not changed).
    """

    title: str
    weights: str
    input: str
    samples: Annotated[int, Field(ge=1)]
    tokens: Count | None = None
    parameters: Count
    float_bytes: Count
    compressed_bytes: Count
    program_bytes: Count | None = None
    public_program_bytes: Count | None = None
    compression: dict[str, Any] | None = None


class Baseline(_Checked):
    """One way to run the same model in plaintext, in a process of its own, its runs between the private ones.

    engine: torch eager, torch.compile, onnxruntime, torch-tensorrt. dtype: fp32, bf16, fp16, int8. status: why there are
    no figures stands in reason; with figures, why it is not taken for the best. quantized: what int8 covers ("4 of 4 Linear;
    0 of 20 Conv2d"). threads: the quicker of one and all. max_absolute_error: of outputs against torch eager fp32.
    """

    engine: str
    dtype: str
    device: str = "cpu"
    status: Literal["ok", "unavailable", "failed"]
    reason: str | None = None
    threads: Count | None = None
    latency: Timed | None = None
    samples_per_second: Amount | None = None
    tokens_per_second: Amount | None = None
    peak_memory_bytes: Count | None = None
    peak_gpu_memory_bytes: Count | None = None
    model_bytes: Count | None = None
    load_seconds: Amount | None = None
    quantized: str | None = None
    energy: Energy = Energy()
    max_absolute_error: Amount | None = None
    accuracy: Amount | None = None

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}"


class Overhead(_Checked):
    """Secure latency over plaintext latency of the same run; both sides are named.

    phase: online, or total (offline + online). against: fp32 (torch eager fp32) or best (the quickest baseline).
    interval: of the ratio, from runs paired by block.
    """

    phase: Literal["online", "total"]
    against: Literal["fp32", "best"]
    numerator: str
    numerator_ms: Amount
    denominator: str
    denominator_ms: Amount
    ratio: Amount
    interval: Interval | None = None


class Throughput(_Checked):
    """Of inferences one after another. total: offline phases included."""

    samples_per_second: Amount | None = None
    tokens_per_second: Amount | None = None
    total_samples_per_second: Amount | None = None
    total_tokens_per_second: Amount | None = None


class Accuracy(_Checked):
    """Three times the same metric on the same samples; secure is that of decrypted outputs of the timed inferences.

    metric: what is counted, such as "top-1 of labels", or "top-1 agreement with the float model", of which float is 1 by
    definition. max_absolute_error: secure against compressed outputs; compression_error: compressed against float.
    """

    metric: str
    samples: Count
    float: Finite
    compressed: Finite
    secure: Finite
    max_absolute_error: Amount | None = None
    compression_error: Amount | None = None


class Fault(_Checked):
    """Why a case has no figures. type: the name of the error's class."""

    type: str
    message: str


class CaseResult(_Checked):
    """All that one case measured. session: the parties' own report (secureinfer.report/1), with phases, parties, layers."""

    key: CaseKey
    status: Literal["ok", "failed"]
    fault: Fault | None = None
    started: str
    """UTC, ISO 8601."""
    seconds: Amount
    settings: dict[str, Any] = {}
    """What this case was run with (runs, seconds, threads), and so what a resumed sweep compares."""
    environment: dict[str, Any] | None = None
    meter: Meter | None = None
    """What this case ran on and was metered by, perhaps in an earlier run of the sweep; None: the report's."""
    valid: bool = False
    invalid_reason: str | None = None
    projected: str | None = None
    """Why latencies are computed from a loopback run and not measured over the key's network; None: they are measured."""
    model: ModelFacts | None = None
    session: dict[str, Any] | None = None
    online: Timed | None = None
    offline: Timed | None = None
    throughput: Throughput = Throughput()
    online_energy: Energy = Energy()
    offline_energy: Energy = Energy()
    baselines: tuple[Baseline, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    accuracy: Accuracy | None = None

    def overhead(self, phase: str = "online", against: str = "fp32") -> Overhead | None:
        return next((o for o in self.overheads if (o.phase, o.against) == (phase, against)), None)

    def baseline(self, engine: str, dtype: str) -> Baseline | None:
        return next((b for b in self.baselines if (b.engine, b.dtype) == (engine, dtype)), None)


class Pool(_Checked):
    """Material of inferences that were dealt and not yet used, before and after a load. None where nothing is dealt.

    beforehand: all that the load used was dealt before it; else dealing went on beside it. empty: inferences that found
    none and waited. offline_latency_ms: of one inference, dealt while nothing else ran.
    """

    capacity: Count
    at_start: Count
    at_end: Count
    least: Count
    dealt: Count
    used: Count
    beforehand: bool = False
    empty: Count = 0
    offline_latency_ms: Amount | None = None


class Trial(_Checked):
    """One rate that was tried."""

    target_qps: Amount
    valid: bool
    latency_ms_p99: Amount | None = None
    why: str | None = None


class LoadResult(_Checked):
    """One run of MLPerf LoadGen. All latencies are LoadGen's. settings: those that LoadGen was given, from its file.

    qps: completed queries a second; of the server scenario, at the highest rate that holds the bound; of the offline
    scenario, whose samples are one query, inferences a second. A sample of LoadGen's is one inference of the program's
    batch: samples_per_query counts those, samples_per_second the batches' samples. A run that is too short, breaks its
    bound or, in the server scenario, uses up the pool is not valid, and invalid_reasons say which.
    """

    key: CaseKey
    scenario: Literal["SingleStream", "MultiStream", "Server", "Offline"]
    status: Literal["ok", "failed"] = "ok"
    fault: Fault | None = None
    started: str
    seconds: Amount
    environment: dict[str, Any] | None = None
    meter: Meter | None = None
    """As of CaseResult."""
    loadgen: str | None = None
    """Its version."""
    valid: bool = False
    invalid_reasons: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    queries: Count | None = None
    samples_per_query: Count | None = None
    qps: Amount | None = None
    samples_per_second: Amount | None = None
    sustained_samples_per_second: Amount | None = None
    """With all dealing counted: what was dealt before the load adds its time, what the pool lost is not counted."""
    latency_ms: Amount | None = None
    latency_ms_p50: Amount | None = None
    latency_ms_p90: Amount | None = None
    latency_ms_p99: Amount | None = None
    target_latency_ms: Amount | None = None
    target_percentile: Amount | None = None
    trials: tuple[Trial, ...] = ()
    pool: Pool | None = None
    energy: Energy = Energy()
    summary: str | None = None
    """LoadGen's own summary, word for word."""


class BenchReport(_Checked):
    """One sweep. environment: of measure.environment, with the devices. command: what a reader types to get it again."""

    schema_: Annotated[Literal["secureinfer.bench/1"], Field(alias="schema")] = SCHEMA
    title: str = "secureinfer: what privacy costs"
    command: str | None = None
    created: str
    environment: dict[str, Any]
    meter: Meter = Meter()
    complete: bool = True
    """False: the sweep was stopped, and some of its cases have not run."""
    cases: tuple[CaseResult, ...] = ()
    loads: tuple[LoadResult, ...] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False) + "\n"


MOST_BYTES = 1 << 26
MOST_DEEP = 32
MOST, LEAST = 1e24, 1e-24
"""Of a figure's size, but for 0: quotients and sums of such figures are numbers too."""


def read(path: Path) -> BenchReport:
    """A report from its file. Raises InputError that says what is wrong with it."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is no file; give the JSON that a benchmark wrote")
        with path.open("rb") as file:
            body = file.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise InputError(f"{path} is larger than any report; give the JSON that a benchmark wrote")
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a benchmark's report: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path} has the schema {schema!r}, and this version reads {SCHEMA!r}; "
            "make the report anew, or read it with the version that wrote it"
        )
    try:
        return BenchReport.model_validate(_plain(found))
    except _Hostile as error:
        raise InputError(f"{path} is no benchmark's report: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        shown = where if where.isprintable() and len(where) < 200 else ascii(where[:200])
        raise InputError(f"{path} is no benchmark's report: {shown}: {first['msg']}") from None


class _Hostile(Exception):
    """What no benchmark writes."""


def _plain(value: Any, deep: int = 0) -> Any:
    """A document whose text commands no terminal, and whose figures can be computed with. Raises _Hostile."""
    if deep > MOST_DEEP:
        raise _Hostile("it is nested too deeply")
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(key): _plain(part, deep + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, deep + 1) for part in value]
    if isinstance(value, int | float) and value and not LEAST <= abs(value) <= MOST:
        raise _Hostile("it holds a number that no figure can be")
    return value


def shown(text: str) -> str:
    """Text with what would command a terminal, or is no text at all, in its escaped form; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, so that a sweep that is stopped leaves no half of one.

    Raises UsageError where it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
