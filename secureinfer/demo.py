"""`secureinfer demo`: private sentence similarity on a real MiniLM, with its cost beside plaintext.

All that is printed is measured in this run. The data owner, the model owner and the dealer are processes of
their own; this process plays the user who sets them up, and is the only place where both sides' secrets meet,
to be compared.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from . import api
from .inference import embeddings_of, pair_table
from .measure.figures import Plaintext
from .measure.latency import summarise, time_calls
from .measure.load import OtherLoad
from .measure.table import size
from .minilm import SENTENCES, TOKENS, pairs, reference, similarities, tokenize, tokenizer_file
from .terminal import Terminal

MOST_DRIFT = 1.5


@dataclass(frozen=True)
class Baseline:
    """One plaintext measurement: the answer, milliseconds of each run, and what else kept the machine busy."""

    embeddings: torch.Tensor
    times_ms: list[float]
    load: OtherLoad


def run(terminal: Terminal, *, runs: int, network: str | None = None) -> None:
    """Compile, run in plaintext and `runs` times in private, and print both answers and the cost."""
    sentences = list(SENTENCES)
    with terminal.working("model owner: loading the pretrained MiniLM"):
        model, examples = reference(len(sentences), TOKENS)
    with terminal.working("model owner: compiling it, with public example sentences"):
        program = api.compile(model, examples, backend="mpc")
    totals = program.plan.totals
    terminal.note(
        f"plan: {len(program.plan.steps)} steps, {totals.rounds} rounds, {size(totals.bytes)} online, "
        f"{size(totals.dealt_bytes)} offline for each inference"
    )
    inputs = tokenize(sentences, TOKENS, tokenizer_file())  # the data owner's side: ids never leave it
    with terminal.working("plaintext: the same sentences on this machine"):
        before = _plaintext(model, inputs)
    with terminal.working("starting three parties: data owner, model owner, dealer (mutual TLS)"):
        session = api.local_session(program, network=network)
    with session:
        for i in range(runs):
            with terminal.working(f"offline: dealing correlated randomness, {i + 1} of {runs}"):
                session.prepare()
            with terminal.working(f"online: private inference {i + 1} of {runs}"):
                secure = embeddings_of(session.infer(*inputs))
        report = session.report()
    with terminal.working("plaintext again"):
        after = _plaintext(model, inputs)
    plaintext = before.embeddings
    accuracy = {
        "compared": "embeddings of the last private inference with torch float32",
        "max_absolute_error": float((secure - plaintext).abs().max()),
        "least_cosine": float(torch.nn.functional.cosine_similarity(secure, plaintext, dim=-1).min()),
    }
    threads = torch.get_num_threads()
    baseline = Plaintext("torch eager", "float32", threads, summarise([*before.times_ms, *after.times_ms]))
    report = report.with_plaintext(baseline, accuracy=accuracy, faults=unrest(before, after))
    of_secure, of_plaintext = similarities(secure), similarities(plaintext)
    terminal.answer(
        {"pairs": _pairs_json(sentences, of_secure, of_plaintext), "report": report.to_dict()},
        pair_table(sentences, of_secure, of_plaintext),
        f"embeddings: greatest error {accuracy['max_absolute_error']:.1e}, least cosine with plaintext "
        f"{accuracy['least_cosine']:.6f}\n",
        report,
    )


def unrest(before: Baseline, after: Baseline) -> list[str]:
    """Whether the machine was busy with something else, which makes plaintext slow and the ratio flattering."""
    found = []
    threads = torch.get_num_threads()
    for when, baseline in (("before", before), ("after", after)):
        if baseline.load.disturbs(threads):
            found.append(
                f"the machine was not quiet: other processes took {baseline.load.cores:.1f} cores while "
                f"plaintext was timed {when} the private runs"
            )
    first, second = statistics.median(before.times_ms), statistics.median(after.times_ms)
    if max(first, second) > MOST_DRIFT * min(first, second):
        found.append(f"plaintext took {first:.1f} ms before the private runs and {second:.1f} ms after")
    return found


def _plaintext(model: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> Baseline:
    """The embeddings in plaintext, in warm runs: one process, as many threads as torch takes."""
    with torch.inference_mode():
        embeddings = model(*inputs).clone()
        with OtherLoad() as load:
            times_ms = time_calls(lambda: model(*inputs))
    return Baseline(embeddings, times_ms, load)


def _pairs_json(sentences: list[str], secure: torch.Tensor, plaintext: torch.Tensor) -> list[dict[str, Any]]:
    return [
        {
            "one": sentences[i],
            "other": sentences[j],
            "secure": float(secure[i, j]),
            "plaintext": float(plaintext[i, j]),
            "difference": float(secure[i, j] - plaintext[i, j]),
        }
        for i, j in pairs(len(sentences))
    ]
