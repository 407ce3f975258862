"""Settings of a load: a file in LoadGen's own format, checked for what LoadGen would pass over in silence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError

Scenario = Literal["SingleStream", "MultiStream", "Server", "Offline"]
SCENARIOS: tuple[Scenario, ...] = ("SingleStream", "MultiStream", "Server", "Offline")

FOLDER = Path(__file__).with_name("loadgen_settings")
BUILT_IN = ("default", "quick", "official")

_WHOLE = {
    "target_latency", "samples_per_query", "coalesce_queries", "max_async_queries", "min_duration", "max_duration",
    "min_query_count", "max_query_count", "performance_issue_unique", "performance_issue_same",
    "performance_issue_same_index", "sample_concatenate_permutation",
}  # fmt: skip
_REAL = {"target_latency_percentile", "target_qps"}
_LINE = re.compile(
    r"^(?P<model>[^\s#]+)\.(?P<scenario>\*|\w+)\.(?P<key>\w+)\s+=\s+(?P<value>[^\s#]+)\s*(#.*)?$"
)


@dataclass(frozen=True)
class Conf:
    """A settings file that LoadGen reads as it is meant. stated: keys that it gives for the scenario."""

    path: Path
    name: str
    stated: frozenset[str]


def read_conf(file: str | Path | None, model: str, scenario: Scenario) -> Conf:
    """A file, or one of the built-in ones by name: default, quick, official. None: default.

    Raises UsageError with the line for what LoadGen would ignore (keys it does not know) or cut (fractions of what it
    reads as whole numbers), and for keys that are not this program's to take from a file.
    """
    name = "default" if file is None else str(file)
    path = FOLDER / f"{name}.conf" if name in BUILT_IN else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read LoadGen's settings {name}: {error}; give a file, or one of {', '.join(BUILT_IN)}"
        ) from None
    stated = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        found = _LINE.match(line.strip())
        where = f"{name}, line {number}"
        if found is None:
            raise UsageError(
                f"{where}: expected model.scenario.key = value, with spaces around =, got {line.strip()!r}"
            )
        key, value = found["key"], found["value"]
        if found["scenario"] not in ("*", *SCENARIOS):
            raise UsageError(
                f"{where}: no scenario {found['scenario']!r}; they are {', '.join(SCENARIOS)}, or *"
            )
        if key not in _WHOLE | _REAL:
            raise UsageError(
                f"{where}: {key} is no setting of a load; they are {', '.join(sorted(_WHOLE | _REAL))}"
            )
        if not re.fullmatch(r"\d+" if key in _WHOLE else r"\d+(\.\d+)?([eE][+-]?\d+)?", value):
            kind = "a whole number" if key in _WHOLE else "a number"
            raise UsageError(f"{where}: LoadGen reads {key} as {kind}, got {value!r}")
        if found["model"] in ("*", model) and found["scenario"] in ("*", scenario):
            stated.add(key)
    return Conf(path.resolve(), name if name in BUILT_IN else path.name, frozenset(stated))


def scenario_named(name: str) -> Scenario:
    """SingleStream from "single-stream", "singlestream" or its own name."""
    plain = re.sub(r"[-_ ]", "", name).lower()
    for scenario in SCENARIOS:
        if scenario.lower() == plain:
            return scenario
    raise UsageError(f"no scenario {name!r}; they are single-stream, multi-stream, server and offline")
