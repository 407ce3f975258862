"""What `secureinfer infer` does: one session with remote parties, from a file of sentences or of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import api
from .backends import has_dealer
from .config import load_settings
from .errors import InputError
from .files import call_of, named_tensors, read_sentences, read_tensors, tokenizer_beside
from .graph.ir import Graph
from .minilm import pairs, similarities, tokenize
from .plan.program import Program
from .session.inputs import check_inputs
from .terminal import Terminal

MOST_PAIRS = 30
"""More pairs than this would bury a reader; the most similar ones are shown, and --json has them all."""


def infer_sentences(
    terminal: Terminal,
    config: Path,
    path: Path,
    output: Path | None,
    tokenizer: Path | None,
    network: str | None = None,
) -> None:
    """Embed the sentences of a file privately and print each pair's similarity."""
    sentences = read_sentences(path)
    settings = load_settings(config)
    tokenizer = tokenizer or tokenizer_beside(settings.program)
    if not tokenizer.is_file():
        raise InputError(f"there is no tokenizer {tokenizer}: give one with --tokenizer, or tensors as .npz")
    program = Program.load(settings.program, allow_private=False)
    graph = program.graph
    batch, tokens = sentence_shape(graph)
    with terminal.working(_opening(program)):
        session = api.connect(config, network=network)
    with session:
        parts = []
        for start in range(0, len(sentences), batch):
            chunk = sentences[start : start + batch]
            # The batch's size is public; how much of it is used is not.
            padded = chunk + [""] * (batch - len(chunk))
            with terminal.working(f"sentences {start + 1} to {start + len(chunk)} of {len(sentences)}"):
                inputs = dict(zip(graph.inputs, tokenize(padded, tokens, tokenizer), strict=True))
                parts.append(embeddings_of(session.infer(**call_of(graph, inputs)))[: len(chunk)])
        report = session.report()
    embeddings = torch.cat(parts)
    if output is not None:
        np.savez(output, embeddings=embeddings.numpy())
    matrix = similarities(embeddings)
    data = {
        "sentences": sentences,
        "similarities": matrix.tolist(),
        "output": None if output is None else str(output),
        "report": report.to_dict(),
    }
    shown = pair_table(sentences, matrix) if len(sentences) > 1 else one_embedding(embeddings[0], output)
    terminal.answer(data, shown, report)


def infer_tensors(
    terminal: Terminal, config: Path, path: Path, output: Path | None, network: str | None = None
) -> None:
    """Run one inference on the tensors of a file; print the outputs or write them to .npz."""
    program = Program.load(load_settings(config).program, allow_private=False)
    graph = program.graph
    inputs = read_tensors(path, graph)
    check_inputs(graph, inputs)  # a session would refuse them too, but costs seconds to open
    with terminal.working(_opening(program)):
        session = api.connect(config, network=network)
    with session:
        with terminal.working("one private inference"):
            tensors = named_tensors(session.infer(**call_of(graph, inputs)))
        report = session.report()
    if output is not None:
        arrays: dict[str, Any] = {name: t.numpy() for name, t in tensors.items()}
        np.savez(output, **arrays)
    data = {
        "outputs": {name: t.tolist() for name, t in tensors.items()},
        "output": None if output is None else str(output),
        "report": report.to_dict(),
    }
    shown = (
        f"written to {output}" if output is not None else "\n".join(f"{n}: {t}" for n, t in tensors.items())
    )
    terminal.answer(data, shown, report)


def _opening(program: Program) -> str:
    others = "the model owner and the dealer" if has_dealer(program.backend) else "the model owner"
    return f"opening the session with {others}"


def one_embedding(embedding: torch.Tensor, output: Path | None) -> str:
    """What to say of a single sentence, which makes no pair."""
    head = ", ".join(f"{float(x):.4f}" for x in embedding[:3])
    where = "--output FILE.npz writes it" if output is None else f"written to {output}"
    return (
        f"one sentence: an embedding of {len(embedding)} numbers, {head}, ... ({where}); "
        "from two sentences on, the similarity of each pair is shown\n"
    )


def sentence_shape(graph: Graph) -> tuple[int, int]:
    """(sentences, tokens) of a program that takes token ids and a mask. Raises InputError for any other."""
    edges = [graph.edge(name) for name in graph.inputs]
    if len(edges) != 2 or any(
        e.dtype != "int64" or len(e.shape) != 2 or e.shape != edges[0].shape for e in edges
    ):
        takes = ", ".join(f"{e.name} {e.dtype}{list(e.shape)}" for e in edges)
        raise InputError(f"this program takes no sentences but {takes}; give it an .npz with those names")
    return edges[0].shape[0], edges[0].shape[1]


def embeddings_of(output: Any) -> torch.Tensor:
    """The one matrix that a sentence encoder returns. Raises InputError for any other output."""
    tensors = list(named_tensors(output).values())
    if len(tensors) != 1 or tensors[0].dim() != 2:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise InputError(f"this program does not return one embedding a sentence but {shapes}; use an .npz")
    return tensors[0]


def pair_table(
    sentences: list[str], secure: torch.Tensor, plaintext: torch.Tensor | None = None
) -> RenderableType:
    """The sentences with their numbers, then each pair's similarity, the most similar first.

    plaintext: its figures and the differences stand beside, if it is given.
    """
    listed = Text("\n".join(f"{i + 1:3}  {sentence}" for i, sentence in enumerate(sentences)) + "\n")
    columns = ["pair", "secure"] if plaintext is None else ["pair", "secure", "plaintext", "difference"]
    title = Text("Similarity of each pair", style="bold")  # the table's own title would wrap at its width
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    ordered = sorted(pairs(len(sentences)), key=lambda pair: -float(secure[pair]))
    for i, j in ordered[:MOST_PAIRS]:
        row = [f"{i + 1} and {j + 1}", f"{float(secure[i, j]):.4f}"]
        if plaintext is not None:
            row += [f"{float(plaintext[i, j]):.4f}", f"{float(secure[i, j] - plaintext[i, j]):+.1e}"]
        table.add_row(*row)
    if len(ordered) > MOST_PAIRS:
        return Group(
            listed, title, table, Text(f"the {MOST_PAIRS} most similar of {len(ordered)}; --json has all")
        )
    return Group(listed, title, table)
