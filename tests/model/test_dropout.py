"""Dropout stands where transformers has it, with the same probabilities.

Random masks cannot be compared, so every dropout module of both sides multiplies by 1 + p while training: a dropout
that is missing, doubled, of another probability or on the other side of a norm changes the output.
"""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from bert_tasks.encoder import attention
from bert_tasks.encoder.dropout import Dropout
from support.hf_models import EVERY_HEAD, FAMILIES, ROBERTAS, WITH_CHOICE, Head, hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference
from support.sampling import one_of_each, slow_except

PROBABILITIES: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3},
    **{family: {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3} for family in (*ROBERTAS, "ernie")},
    "mpnet": {"hidden_dropout_prob": 0.1},
    "megatron-bert": {"hidden_dropout_prob": 0.1},
    "roformer": {"hidden_dropout_prob": 0.1},
    "distilbert": {"dropout": 0.1, "seq_classif_dropout": 0.3, "qa_dropout": 0.2},
    "albert": {"hidden_dropout_prob": 0.1, "classifier_dropout_prob": 0.3},
    "rembert": {"hidden_dropout_prob": 0.1, "classifier_dropout_prob": 0.3},
    "electra": {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3, "summary_last_dropout": 0.25},
    "eurobert": {},
    "ultrabert": {"classifier_dropout": 0.3},
    "nomic_bert": {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3},
    "gte": {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.3},
    "modernbert": {"embedding_dropout": 0.1, "mlp_dropout": 0.2, "classifier_dropout": 0.3},
    "deberta-v2": {"hidden_dropout_prob": 0.1, "cls_dropout": 0.3, "pooler_dropout": 0.2, "conv_kernel_size": 3},
}
ATTENTION = dict.fromkeys(("distilbert", "modernbert", "eurobert", "ultrabert"), "attention_dropout")


def config(family: str, head: Head, *, attention_dropout: float = 0.0) -> Any:
    name = ATTENTION.get(family, "attention_probs_dropout_prob")
    labels = 2 if head == "span" else 3
    return hf_config(family, num_labels=labels, **PROBABILITIES[family], **{name: attention_dropout})


@pytest.fixture
def scaling_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(self: nn.Dropout | Dropout, rows: Tensor) -> Tensor:
        return rows * (1 + self.p) if self.training else rows

    monkeypatch.setattr(nn.Dropout, "forward", scale)
    monkeypatch.setattr(Dropout, "forward", scale)


@pytest.mark.usefixtures("scaling_dropout")
@pytest.mark.parametrize(
    ("family", "head"), one_of_each([*EVERY_HEAD, *((family, "choice") for family in WITH_CHOICE)])
)
def test_dropout_stands_where_transformers_has_it(family: str, head: Head) -> None:
    theirs = hf_model(family, head, config=config(family, head))
    ours = ours_from(theirs, head)
    batch = random_batch(family)
    evaluated = shaped_difference(theirs, ours, batch)
    theirs.train()
    ours.train()
    assert evaluated <= 1e-10
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "distilbert"))
def test_attention_weights_are_dropped_in_training_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ours_from(hf_model(family, "base", config=config(family, "base", attention_dropout=0.25)), "base")
    seen: set[float] = set()
    plain, dropped, drop = F.scaled_dot_product_attention, attention.attention_with_dropout, attention.drop

    def recording(*arguments: Any, dropout_p: float, **options: Any) -> Tensor:
        seen.add(dropout_p)
        return plain(*arguments, dropout_p=dropout_p, **options)

    def recording_dropped(qkv: Tensor, mask: Tensor | None, p: float) -> Tensor:
        seen.add(p)
        return dropped(qkv, mask, p)

    def recording_drop(weights: Tensor, p: float) -> Tensor:
        seen.add(p)
        return drop(weights, p)

    monkeypatch.setattr(attention, "drop", recording_drop)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recording)
    monkeypatch.setattr(attention, "attention_with_dropout", recording_dropped)
    batch = random_batch(family)
    ours.train()
    ours(**batch.inputs(family))
    assert seen == {0.25}
    seen.clear()
    ours.eval()
    ours(**batch.inputs(family))
    assert seen == {0.0}


def test_the_probe_sees_a_dropout_on_the_wrong_side(scaling_dropout: None) -> None:
    theirs = hf_model("distilbert", "base", config=config("distilbert", "base"))
    ours = ours_from(theirs, "base")
    theirs.train()
    ours.train()
    ours.encoder.layers[0].attention_dropout.p = 0.1
    assert shaped_difference(theirs, ours, random_batch("distilbert")) > 1e-3
