"""`secureinfer demo`: private sentence similarity on a real MiniLM, with its cost beside plaintext.

All that is printed is measured in this run. The data owner, the model owner and the dealer are processes of
their own; this process plays the user who sets them up, and is the only place where both sides' secrets meet,
to be compared.
"""

from __future__ import annotations

from typing import Any

import torch

from . import api
from .inference import embeddings_of, pair_table
from .measure.baseline import Baseline, time_plaintext, together, unrest
from .measure.table import size
from .minilm import SENTENCES, TOKENS, pairs, reference, similarities, tokenize, tokenizer_file
from .terminal import Terminal


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
        plaintext, before = _plaintext(model, inputs)
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
        _, after = _plaintext(model, inputs)
    accuracy = {
        "compared": "embeddings of the last private inference with torch float32",
        "max_absolute_error": float((secure - plaintext).abs().max()),
        "least_cosine": float(torch.nn.functional.cosine_similarity(secure, plaintext, dim=-1).min()),
    }
    threads = torch.get_num_threads()
    baseline = together(before, after, engine="torch eager", dtype="float32", threads=threads)
    report = report.with_plaintext(baseline, accuracy=accuracy, faults=unrest(before, after, threads))
    of_secure, of_plaintext = similarities(secure), similarities(plaintext)
    terminal.answer(
        {"pairs": _pairs_json(sentences, of_secure, of_plaintext), "report": report.to_dict()},
        pair_table(sentences, of_secure, of_plaintext),
        f"embeddings: greatest error {accuracy['max_absolute_error']:.1e}, least cosine with plaintext "
        f"{accuracy['least_cosine']:.6f}\n",
        report,
    )


def _plaintext(
    model: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, Baseline]:
    """The embeddings in plaintext, and warm runs: one process, as many threads as torch takes."""
    with torch.inference_mode():
        embeddings = model(*inputs).clone()
        return embeddings, time_plaintext(lambda: model(*inputs))


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
