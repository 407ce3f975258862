"""What every engine is given: one int8 BERT classifier, the same weights as floats, one input, and the answer in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import secureinfer as si
from secureinfer.bench.language import Decision, check_transformers, texts
from secureinfer.bench.subject import repeatable, settled
from secureinfer.errors import UsageError

from .digest import digest

BASE: dict[str, Any] = {"tokens": 128, "sharp": 4.0}
SMALL: dict[str, Any] = {
    "tokens": 16, "sharp": 2.0, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 200,
    "max_position_embeddings": 32, "initializer_range": 0.07,
}  # fmt: skip
"""sharp: times query and key weights. As they are drawn, attention is nearly uniform, and a wrong softmax would not be seen.
Small weights are drawn wider, so that its products are as large as BERT-base's."""
LENGTH = 0.75
"""The part of the tokens that the mask keeps. What it hides are words too, so that who ignores it is found out."""


class Embedded(nn.Module):
    """Word vectors (batch, tokens, width) and mask -> logits: the same model, its look-up left to who calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, vectors: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs_embeds=vectors, attention_mask=attention_mask).logits
        return logits


@dataclass(frozen=True)
class Case:
    """quantised: for engines that know int8; plain: the same weights as float32. inputs: x and mask. expected: float64.

    look_up: whether the private look-up of words is inside what is measured.
    """

    quantised: nn.Module
    plain: nn.Module
    inputs: tuple[Tensor, Tensor]
    expected: Tensor
    weights: dict[str, Tensor]
    config: Any
    look_up: bool

    @property
    def model_digest(self) -> str:
        return digest({name: tensor.numpy() for name, tensor in self.weights.items()})

    @property
    def input_digest(self) -> str:
        return digest({"x": self.inputs[0].numpy(), "mask": self.inputs[1].numpy()})

    def save(self, folder: Path, **more: Any) -> None:
        """Files for two parties: each reads its own, and case.json holds what both may know."""
        x, mask = self.inputs
        save_file({"x": x, "mask": mask}, folder / "input.safetensors")
        save_file(self.weights, folder / "model.safetensors")
        word, *rest = EMBEDDINGS
        shapes = {name: list(tensor.shape) for name, tensor in self.weights.items() if name not in rest}
        if not self.look_up:
            shapes.pop(word)
        c = self.config
        public = {
            "layers": c.num_hidden_layers, "heads": c.num_attention_heads, "vocabulary": c.vocab_size,
            "epsilon": c.layer_norm_eps, "tokens": mask.shape[1], "look_up": self.look_up, "mask": list(mask.shape),
            "x": [*mask.shape, c.vocab_size if self.look_up else c.hidden_size],
            "weights": {**shapes, "places": [mask.shape[1], c.hidden_size]}, **more,
        }  # fmt: skip
        (folder / "case.json").write_text(json.dumps(public))


EMBEDDINGS = tuple(f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type"))


def make(*, layers: int = 1, small: bool = False, look_up: bool = True, batch: int = 1) -> Case:
    """`BertForSequenceClassification(BertConfig(num_hidden_layers=layers))`, its classifier scaled so that logits of random
    texts have deviation 1 and its attention sharpened, with int8 weights.

    small: 64 wide, 16 tokens, for tests. Raises UsageError without transformers or for fewer layers than one.
    """
    check_transformers()
    if layers < 1:
        raise UsageError(f"a BERT has at least one layer, and {layers} were asked for")
    from transformers import BertConfig, BertForSequenceClassification

    bert: Any = BertForSequenceClassification
    sizes = dict(SMALL if small else BASE)
    tokens, sharp = sizes.pop("tokens"), sizes.pop("sharp")
    config = BertConfig(num_hidden_layers=layers, **sizes)
    ids = torch.randint(1, config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))
    known = texts(8, tokens, config.vocab_size, seed=2)
    with repeatable():
        model = bert(config).eval()
        plain = bert(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter.mul_(sharp)
        settled(model.get_submodule("classifier"), model(known[0], attention_mask=known[1]).logits)
    quantised, _ = si.compress(model, [si.Quantize(weights="int8")])
    weights = _weights(quantised, plain)
    plain.load_state_dict({**plain.state_dict(), **weights})
    mask = (torch.arange(tokens) < round(LENGTH * tokens)).long().expand(batch, tokens).contiguous()
    wrap = Decision if look_up else Embedded
    x = ids if look_up else weights[EMBEDDINGS[0]][ids]
    with torch.inference_mode():
        double = bert(config).eval().double()
        double.load_state_dict(plain.state_dict())
        expected = wrap(double)(x if look_up else x.double(), mask)
    return Case(wrap(quantised).eval(), wrap(plain).eval(), (x, mask), expected, weights, config, look_up)


def _weights(quantised: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """Parameters of the plain model, with the values that the quantised one's integers and scales stand for."""
    found = {}
    for name, _ in plain.named_parameters():
        path, _, last = name.rpartition(".")
        found[name] = getattr(quantised.get_submodule(path), last).detach().clone().contiguous()
    return found
