"""Transformers on token ids: MiniLM, pretrained, on paraphrases; BERT-base and BERT-tiny with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compression.approximate import Approximate
from ..errors import UsageError
from ..minilm import EXAMPLES, TOKENS, SentenceEncoder, load_encoder, model_folder, tokenize, tokenizer_file
from .subject import (
    AGREEMENT,
    Built,
    Score,
    Subject,
    agreement,
    finished,
    repeatable,
    settled,
    turns,
)

PAIRS = (
    ("The invoice is overdue by thirty days.", "Payment for this bill is one month late."),
    ("She paid for the groceries in cash.", "The food shopping was paid with coins and notes."),
    ("The bank refused his request for a loan.", "He was not allowed to borrow money from the bank."),
    ("The shop gives money back within two weeks.", "Refunds are possible for fourteen days."),
    ("The patient has a mild fever and a cough.", "She is coughing and her temperature is slightly raised."),
    ("The surgeon repaired the broken hip.", "The fractured hip was operated on."),
    ("He takes two pills for his heart each morning.", "His cardiac medicine is a pair of tablets at breakfast."),
    ("The dentist pulled out a tooth.", "One of her molars was removed."),
    ("Our train to Lyon leaves at noon.", "We depart for Lyon by rail at twelve."),
    ("The flight was cancelled because of fog.", "No plane took off, for one could not see through the mist."),
    ("The bus stop is opposite the library.", "You catch the coach across from where books are lent."),
    ("Her bicycle was stolen last night.", "Somebody took the bike that she owns yesterday evening."),
    ("Lunch is served on the terrace.", "The midday meal is eaten outside on the patio."),
    ("The soup is too salty.", "There is more salt in the broth than I like."),
    ("He bakes bread every Sunday.", "Each weekend he makes a fresh loaf."),
    ("The children fell asleep quickly.", "It did not take long before the kids were sleeping."),
    ("A dog barked at the postman.", "The hound made noise when the mail was delivered."),
    ("It has not rained since May.", "The drought began at the end of spring."),
    ("The river flooded the village.", "Houses stood in water after the stream rose."),
    ("The team lost in the final minute.", "Just before the end the match was given away."),
    ("She won the chess tournament.", "The first prize at the board game contest was hers."),
    ("The judge sent the thief to prison.", "The burglar was sentenced to jail."),
    ("The company dismissed a tenth of its staff.", "One worker in ten was laid off by the firm."),
    ("My laptop does not start any more.", "The computer fails to boot."),
)  # fmt: skip
"""Sentences and their paraphrases, of a few fields each, so that there are near neighbours that are wrong."""

GELU_DEGREE = 15
"""The least with which sentences keep their neighbours: its values reach 30, and with 7 nothing is left of them."""

PARAPHRASES = "the paraphrase is the nearest of 47 sentences"


def _encoder(state: Path | None) -> nn.Module:
    if state is None:
        return load_encoder()
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model_folder())
    return SentenceEncoder(AutoModel.from_config(config))  # type: ignore[no-untyped-call]


def _minilm(batch: int, state: Path | None) -> Built:
    module = finished(_encoder(state), state)
    read = functools.partial(tokenize, tokens=TOKENS, tokenizer=tokenizer_file())
    known = read(EXAMPLES)
    sentences = read([sentence for pair in PAIRS for sentence in pair])
    numbers = torch.arange(len(sentences[0]))
    held = turns(max(2, -(-len(numbers) // batch)), batch, *sentences, numbers)
    return Built(
        module,
        examples=turns(1, batch, *known)[0],
        calibration=turns(max(1, len(EXAMPLES) // batch), batch, *known),
        held_out=tuple((ids, mask) for ids, mask, _ in held),
        tokens=batch * TOKENS,
        metric=PARAPHRASES,
        score=retrieval(module, sentences, [n for _, _, n in held]),
        approximate=Approximate(greatest_degree=GELU_DEGREE),
    )


def retrieval(module: nn.Module, sentences: tuple[Tensor, ...], numbers: Sequence[Tensor]) -> Score:
    """The part of the embeddings whose nearest among the float model's embeddings of all others is their paraphrase's.

    So it asks the same of one sentence as of many. sentences: each followed by its paraphrase. numbers: of those in each
    held-out batch.
    """

    @functools.cache
    def library() -> Tensor:
        with torch.no_grad():
            return torch.cat(
                [module(*(t[i : i + 8] for t in sentences)) for i in range(0, len(sentences[0]), 8)]
            )

    def score(outputs: Sequence[Tensor], indices: Sequence[int], floats: Sequence[Tensor]) -> float:
        asked = torch.cat([numbers[i] for i in indices])
        near = torch.cat([o.detach().float().cpu() for o in outputs]) @ library().T
        near[torch.arange(len(asked)), asked] = -torch.inf  # itself
        right = near.isfinite().sum(1).eq(near.shape[1] - 1) & near.argmax(1).eq(asked ^ 1)
        return float(right.double().mean())

    return score


class Decision(nn.Module):
    """Token ids and mask, (samples, tokens) int64 each -> logits of two classes, (samples, 2)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def check_transformers() -> None:
    if find_spec("transformers") is None:
        raise UsageError("this needs transformers, which is not installed: pip install 'secureinfer[hf]'")


def texts(count: int, tokens: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random token ids of texts that fill the length by half or more, and the mask that says so."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (count, tokens), generator=g)
    lengths = torch.randint(-(-tokens // 2), tokens + 1, (count, 1), generator=g)
    mask = (torch.arange(tokens) < lengths).long()
    return ids * mask, mask


def bert(batch: int, state: Path | None, tokens: int, **config: Any) -> Built:
    """BertConfig's defaults (BERT-base, uncased) but for `config`, with random weights and a head of two classes."""
    check_transformers()
    from transformers import BertConfig, BertForSequenceClassification

    configuration = BertConfig(**config)
    known = texts(max(8, batch), tokens, configuration.vocab_size, seed=1)
    asked = texts(max(16, 2 * batch), tokens, configuration.vocab_size, seed=2)
    with repeatable():
        module = Decision(BertForSequenceClassification(configuration)).eval()
    if state is None:
        with torch.no_grad():
            settled(module.get_submodule("model.classifier"), module(*known))
    return Built(
        finished(module, state),
        examples=turns(1, batch, *known)[0],
        calibration=turns(max(1, 4 // batch), batch, *known),
        held_out=turns(len(asked[0]) // batch, batch, *asked),
        tokens=batch * tokens,
        metric=AGREEMENT,
        score=agreement,
    )


def berts(name: str, title: str, tokens: int, **config: Any) -> Subject:
    make: Callable[[int, Path | None], Built] = functools.partial(bert, tokens=tokens, **config)
    return Subject(name, f"{title}, random weights", "random", f"{tokens} tokens", make)


SUBJECTS = (
    Subject(
        "minilm", "MiniLM-L6, pretrained", "pretrained", f"a sentence of {TOKENS} tokens", _minilm, batches=(6,)
    ),
    berts("bert-base", "BERT-base", 128),
    berts(
        "bert-tiny", "BERT-tiny (2 layers, 128 wide)", 128,
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
    ),
)  # fmt: skip
