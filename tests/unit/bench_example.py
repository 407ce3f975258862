"""A report of a benchmark as a sweep writes it, with what goes wrong in one: for tests of what draws and compares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secureinfer.bench.report import (
    Accuracy,
    Baseline,
    BenchReport,
    CaseKey,
    CaseResult,
    Energy,
    Fault,
    Interval,
    LoadResult,
    Meter,
    ModelFacts,
    Overhead,
    Pool,
    Throughput,
    Timed,
    Trial,
)

STARTED = "2026-11-30T09:12:41Z"
UNSUPPORTED = "\n".join(
    [
        "this model cannot run on ckks; 74 of its 97 steps have no kernel:",
        *(
            f"  encoder.layer.{i}.{part}: {why}"
            for i in range(12)
            for part, why in (
                (
                    "attention.self (softmax)",
                    "needs a division and a maximum, which no polynomial of 8 levels gives",
                ),
                ("intermediate (gelu)", "outside its fitted range [-4, 4]: calibration saw -9.31 to 11.87"),
                ("output.LayerNorm (layer_norm)", "needs 1/sqrt(x), at 14 levels; 8 are left at N = 16384"),
            )
        ),
        'compress it first: si.compress(model, [si.Approximate(attention="2quad")]), or take backend="mpc"',
    ]
)


@dataclass(frozen=True)
class Model:
    title: str
    weights: str
    input: str
    parameters: int
    tokens: int | None
    metric: str
    layers: tuple[tuple[str, float, float, int], ...]
    """(path, part of the time, part of the bytes, rounds)."""


def _encoder(count: int) -> tuple[tuple[str, float, float, int], ...]:
    one = (
        ("attention.self", 0.24, 0.20, 22),
        ("attention.output.dense", 0.08, 0.03, 3),
        ("attention.output.LayerNorm", 0.10, 0.05, 13),
        ("intermediate.dense", 0.14, 0.06, 3),
        ("intermediate.intermediate_act_fn", 0.22, 0.55, 12),
        ("output.dense", 0.13, 0.05, 3),
        ("output.LayerNorm", 0.09, 0.06, 13),
    )
    layers = [
        (f"encoder.layer.{i}.{path}", 0.94 * t / count, 0.96 * b / count, rounds)
        for i in range(count)
        for path, t, b, rounds in one
    ]
    return (("embeddings.word_embeddings", 0.03, 0.02, 3), *layers, ("pooler.dense", 0.03, 0.02, 4))


MODELS = {
    "minilm": Model(
        "MiniLM-L6, pretrained", "pretrained", "16 tokens", 22_713_216, 96, "the paraphrase is the nearest of 47 sentences",
        _encoder(6),
    ),
    "bert-base": Model(
        "BERT-base, random weights", "random", "16 tokens", 109_482_240, 16, "top-1 agreement with the float model",
        _encoder(12),
    ),
    "resnet18": Model(
        "ResNet-18, random weights", "random", "a 224 x 224 image", 11_689_512, None, "top-1 agreement with the float model",
        (
            ("conv1", 0.10, 0.08, 3), ("relu", 0.11, 0.16, 4), ("maxpool", 0.13, 0.14, 8),
            *((f"layer{s}.{b}.{p}", t * (1.5 - s * 0.2) / 8, y * (1.5 - s * 0.2) / 8, r)
              for s in (1, 2, 3, 4) for b in (0, 1)
              for p, t, y, r in (("conv1", 0.20, 0.10, 3), ("conv2", 0.22, 0.10, 3), ("relu", 0.20, 0.42, 4))),
            ("avgpool", 0.01, 0.0, 0), ("fc", 0.03, 0.0, 3),
        ),
    ),
    "fraud-mlp": Model(
        "fraud MLP 30-64-32-2", "trained", "30 features", 4_130, None, "balanced top-1 of labels",
        (("0", 0.36, 0.28, 3), ("1", 0.14, 0.30, 4), ("2", 0.2, 0.2, 3), ("3", 0.12, 0.16, 4), ("4", 0.18, 0.06, 3)),
    ),
}  # fmt: skip


def timed(mean_ms: float, runs: int = 20) -> Timed:
    """Runs around a mean, the same each time."""
    values = [mean_ms * (1 + 0.05 * ((i * 7) % 10 - 4.5) / 4.5) for i in range(runs)]
    ordered = sorted(values)
    return Timed(
        count=runs,
        latency_ms=sum(values) / runs if runs else None,
        latency_ms_p50=ordered[(runs - 1) // 2] if runs >= 2 else None,
        latency_ms_p90=ordered[int(0.9 * runs) - 1] if runs >= 10 else None,
        latency_ms_p99=None,
        latency_ms_interval=Interval(low=mean_ms * 0.985, high=mean_ms * 1.015) if runs >= 5 else None,
        cold_latency_ms=1.6 * mean_ms,
        runs_ms=tuple(values),
    )


def _figures(mean_ms: float | None, **rest: Any) -> dict[str, Any]:
    count = 0 if mean_ms is None else 20
    latency = timed(mean_ms, count) if mean_ms is not None else None
    body: dict[str, Any] = {
        "count": count,
        **{
            f"latency_ms{ending}": getattr(latency, f"latency_ms{ending}") if latency else None
            for ending in ("", "_p50", "_p90", "_p99")
        },
        **{f"latency_ms{ending}_interval": None for ending in ("", "_p50", "_p90", "_p99")},
    }
    empty = dict.fromkeys(
        "waiting_ms bytes bytes_one_way bytes_received socket_bytes rounds cpu_seconds peak_memory_bytes "
        "peak_gpu_memory_bytes energy_joules energy_source".split()
    )
    return body | empty | rest


def session(
    model: Model, backend: str, network: str, *, setup_ms: float, offline_ms: float | None, online_ms: float,
    online_bytes: float, offline_bytes: float | None, rounds: int, invalid: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What Report.to_dict() gives, with the parties and layers of a session of that cost."""
    dealer = offline_ms is not None
    slow = {"loopback": 0.22, "lan": 0.45}.get(network, 0.93)
    roles = ("data_owner", "model_owner", *(("dealer",) if dealer else ()))

    def parties(
        ms: float | None, part: Mapping[str, tuple[float, float]], amount: float | None
    ) -> dict[str, Any]:
        found = {}
        for role in roles:
            busy, waits = part.get(role, (0.0, 0.0))
            known = busy > 0 and ms is not None
            found[role] = _figures(
                ms * busy if known and ms is not None else None,
                waiting_ms=ms * busy * waits if known and ms is not None else None,
                bytes=(amount or 0) / 2 if known else None,
                bytes_received=(amount or 0) / 2 if known else None,
                rounds=rounds if known else None,
                cpu_seconds=ms * busy * (1 - waits) / 1000 if known and ms is not None else None,
                peak_memory_bytes=1_740_000_000 if known else None,
            )
        return found

    online_part = {"data_owner": (0.97, min(0.97, slow + 0.12)), "model_owner": (0.95, slow)}
    layers = [
        {
            "path": path,
            "steps": 1 + r // 6,
            "latency_ms": 0.9 * online_ms * t,
            "waiting_ms": 0.9 * online_ms * t * slow,
            "bytes": round(online_bytes * b),
            "bytes_one_way": round(online_bytes * b / 2),
            "rounds": r,
        }
        for path, t, b, r in model.layers
    ]
    kind, _, source = network.partition(":")
    measured = "measured" if kind == "loopback" else "emulated"
    return {
        "schema": "secureinfer.report/1",
        "program": {
            "manifest_digest": "5c3901481cb2b67c775c6df508b64e748f87a92222f984520281d1c69d3e8b5d",
            "weights_digest": "e3061fb5062527b253f0525b802afb1b460558a10613846e99c9bc3da29cb260",
            "backend": "ckks" if backend == "ckks" else "mpc",
            "protocol": {"mpc": "fast", "crypten": "crypten"}.get(backend, "ckks"),
            "unsafe": [],
            "dealer": dealer,
            "planned": {"rounds": rounds, "bytes": online_bytes, "dealt_bytes": offline_bytes or 0, "exact_bytes": True},
        },
        "environment": ENVIRONMENT,
        "network": {"name": kind, "source": source or measured},
        "valid": invalid is None,
        "invalid_reason": invalid,
        "setup": _figures(setup_ms, bytes=97_700_000, rounds=2, peak_memory_bytes=2_258_694_144)
        | {"cold_latency_ms": None, "parties": parties(setup_ms, {}, None), "layers": []},
        "offline": _figures(
            offline_ms, bytes=offline_bytes, rounds=4 if dealer else None,
            peak_memory_bytes=3_100_000_000 if dealer else None,
        )
        | {
            "cold_latency_ms": None if offline_ms is None else 1.8 * offline_ms,
            "parties": parties(offline_ms, {"data_owner": (1, 0.6), "model_owner": (0.5, 0.3), "dealer": (0.9, 0.2)},
                               offline_bytes),
            "layers": [],
        },
        "online": _figures(
            online_ms, waiting_ms=0.95 * online_ms * slow, bytes=online_bytes, rounds=rounds,
            cpu_seconds=online_ms * 1.7 / 1000, peak_memory_bytes=3_690_000_000,
        )
        | {"cold_latency_ms": 1.6 * online_ms, "parties": parties(online_ms, online_part, online_bytes), "layers": layers},
        "plaintext": None,
        "overhead": {},
        "accuracy": None,
    }  # fmt: skip


ENVIRONMENT: dict[str, Any] = {
    "processor": "AMD EPYC 9B14",
    "cores": 2,
    "system": "Linux-6.18.44-x86_64-with-glibc2.36",
    "python": "3.11.7",
    "secureinfer": "0.1.0.dev0",
    "torch": "2.14.1",
    "crypten": "0.4.1",
    "grpcio": "1.85.3",
    "memory_bytes": 25_235_456_000,
    "gpu": None,
}

NO_CUDA = "no CUDA device"
NO_COMPILER = "torch.compile needs a C++ compiler, and none of g++, clang++ was found; apt-get install g++"


def baselines(
    fp32_ms: float, best: tuple[str, str], best_ms: float, *, energy: float | None
) -> tuple[Baseline, ...]:
    """Eight ways, of which some are not there. best: (engine, dtype) of the quickest."""
    speeds = {
        ("torch eager", "fp32"): fp32_ms,
        ("torch eager", "bf16"): fp32_ms * 1.42,
        ("torch eager", "int8"): fp32_ms * 0.83,
        ("onnxruntime", "fp32"): fp32_ms * 0.88,
        ("onnxruntime", "int8"): fp32_ms * 0.79,
        best: best_ms,
    }
    found = [
        Baseline(
            engine=engine, dtype=dtype, status="ok", threads=2 if fp32_ms > 1 else 1, latency=timed(ms, 60),
            samples_per_second=1000 / ms, peak_memory_bytes=612_000_000,
            model_bytes=90_900_000 // (4 if dtype == "int8" else 1),
            load_seconds=1.9, quantized="37 of 37 Linear; 0 of 1 Embedding" if dtype == "int8" else None,
            energy=Energy() if energy is None else Energy(
                joules=energy * ms / fp32_ms, joules_per_sample=energy * ms / fp32_ms, source="estimated"),
            max_absolute_error={"fp32": 0.0, "bf16": 8.1e-3}.get(dtype, 3.4e-2),
            accuracy=0.958 if dtype == "fp32" else 0.951,
        )
        for (engine, dtype), ms in speeds.items()
    ]  # fmt: skip
    missing = [
        Baseline(engine="torch.compile", dtype="fp32", status="unavailable", reason=NO_COMPILER),
        Baseline(engine="torch.compile", dtype="bf16", status="unavailable", reason=NO_COMPILER),
        Baseline(engine="torch eager", dtype="fp16", device="cuda", status="unavailable", reason=NO_CUDA),
        Baseline(
            engine="onnxruntime", dtype="bf16", status="failed",
            reason="[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for LayerNormalization(17) "
            "node with name '/encoder/layer.0/attention/output/LayerNorm/LayerNormalization'",
        ),
    ]  # fmt: skip
    return (*found, *missing)


def overheads(online: Timed, offline: Timed | None, found: Sequence[Baseline]) -> tuple[Overhead, ...]:
    ran = {b.name: b.latency.latency_ms for b in found if b.latency is not None and b.latency.latency_ms}
    best = min(ran, key=lambda name: ran[name])
    online_ms, offline_ms = online.latency_ms or 0.0, (offline.latency_ms if offline else None) or 0.0
    made = []
    for phase, above in (("online", online_ms), ("total", online_ms + offline_ms)):
        for against, name in (("fp32", "torch eager fp32"), ("best", best)):
            ratio = above / ran[name]
            what = "offline + online" if phase == "total" and offline is not None else "online"
            made.append(
                Overhead.model_validate(
                    {
                        "phase": phase, "against": against, "numerator": f"secure {what} latency", "numerator_ms": above,
                        "denominator": name, "denominator_ms": ran[name], "ratio": ratio,
                        "interval": Interval(low=0.97 * ratio, high=1.04 * ratio) if online.count >= 5 else None,
                    }
                )
            )  # fmt: skip
    return tuple(made)


def case(
    model: str, compression: str = "none", backend: str = "mpc", network: str = "loopback", batch: int = 1, *,
    setup_ms: float, offline_ms: float | None, online_ms: float, fp32_ms: float,
    best: tuple[str, str] = ("onnxruntime", "int8"),
    best_ms: float, online_bytes: float, offline_bytes: float | None, rounds: int,
    accuracy: tuple[float, float, float], runs: int = 20, invalid: str | None = None, energy: float | None = None,
) -> CaseResult:  # fmt: skip
    """One case with figures. energy: joules of an inference in plaintext fp32, or None where the meter gives nothing."""
    about = MODELS[model]
    online = timed(online_ms, runs)
    offline = None if offline_ms is None else timed(offline_ms, runs)
    plain = baselines(fp32_ms, best, best_ms, energy=energy)
    used = (Energy(), Energy())
    if energy is not None:
        joules = [energy * ms / fp32_ms * 1.3 for ms in (online_ms, offline_ms or 0.0)]
        used = (
            Energy(
                joules=joules[0],
                joules_per_sample=joules[0] / batch,
                above_idle_joules=joules[0] * 0.7,
                source="estimated",
            ),
            Energy()
            if offline is None
            else Energy(joules=joules[1], joules_per_sample=joules[1] / batch, source="estimated"),
        )
    seconds = online_ms / 1000
    return CaseResult(
        key=CaseKey(model=model, compression=compression, backend=backend, network=network, batch=batch),
        status="ok",
        started=STARTED,
        seconds=setup_ms / 1000 + 2 * runs * seconds,
        settings={"runs": runs, "seconds": 1.0},
        valid=invalid is None,
        invalid_reason=invalid,
        model=ModelFacts(
            title=about.title, weights=about.weights, input=about.input, samples=batch, tokens=about.tokens,
            parameters=about.parameters, float_bytes=4 * about.parameters,
            compressed_bytes=about.parameters * (1 if "int8" in compression else 4),
            program_bytes=4 * about.parameters + 120_000, public_program_bytes=110_000,
        ),
        session=session(
            about, backend, network,
            setup_ms=setup_ms, offline_ms=offline_ms, online_ms=online_ms, online_bytes=online_bytes,
            offline_bytes=offline_bytes, rounds=rounds, invalid=invalid,
        ),
        online=online,
        offline=offline,
        throughput=Throughput(
            samples_per_second=batch / seconds,
            tokens_per_second=None if about.tokens is None else about.tokens / seconds,
            total_samples_per_second=batch / (seconds + (offline_ms or 0) / 1000),
        ),
        online_energy=used[0],
        offline_energy=used[1],
        baselines=plain,
        overheads=overheads(online, offline, plain),
        accuracy=Accuracy(
            metric=about.metric, samples=runs * batch, float=accuracy[0], compressed=accuracy[1], secure=accuracy[2],
            max_absolute_error=4.9e-5, compression_error=None if compression == "none" else 3.1e-2,
        ),
    )  # fmt: skip


def failed(key: CaseKey, kind: str, message: str) -> CaseResult:
    return CaseResult(
        key=key, status="failed", fault=Fault(type=kind, message=message), started=STARTED, seconds=14.2
    )


def cases() -> tuple[CaseResult, ...]:
    lan, wan = {"network": "lan"}, {"network": "wan:projected"}
    minilm: dict[str, Any] = {
        "batch": 6,
        "setup_ms": 6220.0,
        "fp32_ms": 19.6,
        "best_ms": 14.1,
        "rounds": 832,
        "energy": 0.31,
    }
    resnet: dict[str, Any] = {
        "setup_ms": 5480.0,
        "fp32_ms": 49.5,
        "best_ms": 31.2,
        "rounds": 90,
        "energy": 0.72,
    }
    fraud: dict[str, Any] = {
        "setup_ms": 4310.0,
        "fp32_ms": 0.031,
        "best": ("onnxruntime", "fp32"),
        "best_ms": 0.012,
    }
    return (
        case("minilm", **minilm, offline_ms=1330.0, online_ms=1200.0, online_bytes=303.5e6, offline_bytes=332.8e6,
             accuracy=(0.957, 0.957, 0.957)),
        case("minilm", "int8", **minilm, offline_ms=1180.0, online_ms=842.0, online_bytes=311.2e6, offline_bytes=318.0e6,
             accuracy=(0.957, 0.936, 0.936)),
        case("minilm", "int8", **minilm, **lan, offline_ms=1630.0, online_ms=1540.0, online_bytes=311.2e6,
             offline_bytes=318.0e6, accuracy=(0.957, 0.936, 0.936)),
        case("minilm", "int8", **minilm, **wan, offline_ms=26900.0, online_ms=58300.0, online_bytes=311.2e6,
             offline_bytes=318.0e6, accuracy=(0.957, 0.936, 0.936)),
        case("bert-base", setup_ms=17900.0, offline_ms=4210.0, online_ms=3620.0, fp32_ms=61.0, best_ms=38.4,
             online_bytes=402.0e6, offline_bytes=988.0e6, rounds=1630, accuracy=(1.0, 1.0, 1.0), energy=0.95),
        case("resnet18", **resnet, offline_ms=1640.0, online_ms=648.0, online_bytes=78.1e6, offline_bytes=349.1e6,
             accuracy=(1.0, 1.0, 1.0)),
        case("resnet18", "int8", **resnet, offline_ms=1440.0, online_ms=419.0, online_bytes=81.6e6, offline_bytes=342.1e6,
             accuracy=(1.0, 0.968, 0.966)),
        case("resnet18", "int8", "crypten", **(resnet | {"rounds": 216}), offline_ms=810.0, online_ms=1070.0,
             online_bytes=448.6e6, offline_bytes=218.0e6, accuracy=(1.0, 0.968, 0.964)),
        case("fraud-mlp", batch=8, **fraud, offline_ms=14.4, online_ms=6.42, online_bytes=25.0e3, offline_bytes=2.986e6,
             rounds=12, accuracy=(0.913, 0.913, 0.913)),
        case("fraud-mlp", "none", "crypten", batch=8, **fraud, offline_ms=8.1, online_ms=8.52, online_bytes=101.0e3,
             offline_bytes=50.0e3, rounds=22, accuracy=(0.913, 0.913, 0.913)),
        case("fraud-mlp", "approximate", "ckks", **fraud, offline_ms=None, online_ms=34.8, online_bytes=614.0e3,
             offline_bytes=None, rounds=2, accuracy=(0.913, 0.907, 0.907)),
        case("fraud-mlp", "approximate+int8", "ckks", **fraud, offline_ms=None, online_ms=33.9, online_bytes=614.0e3,
             offline_bytes=None, rounds=2, accuracy=(0.913, 0.898, 0.898)),
        case("fraud-mlp", batch=8, **fraud, **lan, offline_ms=21.0, online_ms=13.6, online_bytes=25.0e3,
             offline_bytes=2.986e6, rounds=12, accuracy=(0.913, 0.913, 0.913), runs=1,
             invalid="too short for a latency: 1 warm inference(s); it takes 2 and 1 s"),
        failed(CaseKey(model="bert-base", backend="ckks"), "UnsupportedModelError", UNSUPPORTED),
        failed(CaseKey(model="bert-base", compression="int8", network="wan"), "SessionError",
               "no network can be emulated here: creating a namespace needs root (CAP_SYS_ADMIN); run as root, or ask for "
               "wan:projected"),
    )  # fmt: skip


def loads() -> tuple[LoadResult, ...]:
    key = CaseKey(model="fraud-mlp", batch=8)
    shared: dict[str, Any] = {"key": key, "started": STARTED, "loadgen": "6.0.14"}
    return (
        LoadResult(
            **shared, scenario="SingleStream", seconds=61.2, valid=True, queries=8604, samples_per_query=1, qps=140.6,
            samples_per_second=1124.8, latency_ms=6.9, latency_ms_p50=6.6, latency_ms_p90=8.2, latency_ms_p99=11.9,
            settings={"min_duration_ms": 60_000, "min_query_count": 1024},
            summary="Result is : VALID\n  Min duration : Yes\n",
            pool=Pool(capacity=64, at_start=64, at_end=64, least=41, dealt=8604, used=8604),
            energy=Energy(joules=412.0, source="estimated"),
        ),
        LoadResult(
            **shared, scenario="Server", seconds=388.0, valid=True, queries=3270, samples_per_query=1, qps=54.5,
            samples_per_second=436.0, latency_ms=12.1, latency_ms_p50=9.7, latency_ms_p90=21.4, latency_ms_p99=46.3,
            target_latency_ms=50.0, target_percentile=99.0, settings={"target_qps": 54.5, "min_duration_ms": 60_000},
            trials=(
                Trial(target_qps=100.0, valid=False, latency_ms_p99=412.0, why="p99 of 412 ms is over the bound of 50 ms"),
                Trial(target_qps=50.0, valid=True, latency_ms_p99=38.1),
                Trial(target_qps=75.0, valid=False, latency_ms_p99=121.0, why="the pool was empty"),
                Trial(target_qps=62.0, valid=False, latency_ms_p99=61.7, why="p99 of 61.7 ms is over the bound of 50 ms"),
                Trial(target_qps=54.5, valid=True, latency_ms_p99=46.3),
            ),
            pool=Pool(capacity=64, at_start=64, at_end=64, least=7, dealt=3271, used=3271),
        ),
        LoadResult(
            **shared, scenario="Offline", seconds=11.0, valid=False,
            invalid_reasons=("the run took 11.0 s, and 60 s is the least",
                             "the pool held 12 at the end, and 64 at the start"),
            queries=1, samples_per_query=1024, qps=0.09, samples_per_second=93.1,
            sustained_samples_per_second=61.0,
            pool=Pool(capacity=64, at_start=64, at_end=12, least=0, dealt=972, used=1024, empty=310,
                      offline_latency_ms=14.1),
        ),
        LoadResult(
            **shared, scenario="MultiStream", seconds=3.0, status="failed",
            fault=Fault(type="PeerError", message="the peer dealer stopped: it gave no answer within 30 s"),
        ),
    )  # fmt: skip


def example() -> BenchReport:
    """Fifteen cases of four models: thirteen with figures, of which one is not to be quoted, and two that failed."""
    return BenchReport(
        command="secureinfer bench study --models minilm,bert-base,resnet18,fraud-mlp --out results/study",
        created="2026-11-30T11:05:02Z",
        environment=ENVIRONMENT,
        meter=Meter(
            source="estimated",
            model="CPU time of all processes x 7.5 W a core",
            idle_watts=3.2,
            idle_seconds=3.0,
            unavailable=("nvml: no NVIDIA driver", "rapl: /sys/class/powercap holds no zone of a processor"),
        ),
        cases=cases(),
        loads=loads(),
    )


HOSTILE = (
    "</title></style><script>alert(1)</script><img src=http://x.test/ onerror='alert(2)'>\"'`&lt;"
    "\x00\ud800\u202e\x1b[31m"
)
"""Markup, and what no page can hold."""


def texts(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON tree holds a text."""
    if isinstance(tree, str):
        yield at
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, (*at, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts(value, (*at, index))


def hostile(report: BenchReport) -> BenchReport:
    """The report with markup in each text that its schema leaves free, and in the keys of free mappings."""
    tree = report.model_dump(mode="json", by_alias=True)
    for *way, last in texts(tree):
        if last in ("schema", "status", "scenario", "phase", "against") and "session" not in way:
            continue
        holder = tree
        for step in way:
            holder = holder[step]
        # Backends and dtypes are looked up by name: what they are known by stays at the front.
        holder[last] += HOSTILE
    tree["environment"][HOSTILE] = {HOSTILE: [HOSTILE]}
    for found in tree["cases"]:
        if found["session"]:
            parties = found["session"]["online"]["parties"]
            parties[HOSTILE] = next(iter(parties.values()))
    return BenchReport.model_validate(tree)
