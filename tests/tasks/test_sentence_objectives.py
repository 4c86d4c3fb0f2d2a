"""Masked language modelling with a sentence objective: two terms of the loss, against transformers' classes."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.errors import UsageError
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.features import collate
from support.hf_models import PREFIX, hf_config, widen
from support.small_checkpoints import tokenizer_of
from support.small_tokenizers import LINES
from support.training_runs import distance, make_steps, walk, weights_of

ROWS = [{"text": "\n".join(lines), "sentences": lines} for lines in (LINES[:6], LINES[6:7], LINES[7:13], LINES[13:])]
CASES = [("bert", "nsp"), ("bert", "sop"), ("albert", "sop")]
TERMS = {"nsp": "next_sentence", "sop": "sentence_order"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, by_kind: dict[str, PreTrainedTokenizerBase]) -> dict[str, Path]:
    made = {}
    for family in ("bert", "albert"):
        tokenizer = tokenizer_of(family, by_kind)
        options = {"num_labels": 2, "vocab_size": len(tokenizer), "num_hidden_layers": 2}
        config = hf_config(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
        if family == "albert":
            config.classifier_dropout_prob = 0.0
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{PREFIX[family]}ForPreTraining")(config)
        widen(model, seed=3)
        made[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(made[family])
        tokenizer.save_pretrained(made[family])
    return made


def task_of(objective: str, **settings: object) -> MaskedLanguageModeling:
    return MaskedLanguageModeling(max_length=48, sentence_objective=objective, **settings)  # type: ignore[arg-type]


def prepared(model: TaskModel, *, epoch: int = 0) -> list[dict[str, object]]:
    tokenizer = model.require_tokenizer()
    features = model.task.features(ROWS, tokenizer)
    keys = FeatureKeys(seed=4, epoch=epoch, numbers=range(len(features)))
    return list(model.task.prepare(features, keys, features, tokenizer))


def hf_loss(theirs: PreTrainedModel, features: list[dict[str, object]], family: str) -> torch.Tensor:
    """The loss of transformers' class, on the same features with padding."""
    longest = max(len(one["input_ids"]) for one in features)
    ids, types, mask, labels = (torch.full((len(features), longest), fill) for fill in (0, 0, 0, -100))
    for place, one in enumerate(features):
        size = len(one["input_ids"])
        ids[place, :size], types[place, :size] = torch.tensor(one["input_ids"]), torch.tensor(one["token_type_ids"])
        mask[place, :size] = 1
        labels[place, one["gather_positions"]] = torch.tensor(one["labels"]).long()
    name = "sentence_order_label" if family == "albert" else "next_sentence_label"
    pairs = torch.tensor([int(one["fields"]["pair"][0]) for one in features])
    given = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels, name: pairs}
    return theirs(**given).loss


@pytest.mark.parametrize(("family", "objective"), CASES)
def test_the_loss_is_that_of_transformers(folders: dict[str, Path], family: str, objective: str) -> None:
    model = TaskModel.from_pretrained(folders[family], task=task_of(objective)).double().eval()
    theirs = getattr(transformers, f"{PREFIX[family]}ForPreTraining").from_pretrained(folders[family]).double().eval()
    labels = set()
    for epoch in range(3):
        features = prepared(model, epoch=epoch)
        batch = collate(features, position_offset=model.config.position_offset)
        terms = model.task.loss(model(batch), batch)
        assert [term.name for term in terms] == ["masked_lm", TERMS[objective]]
        assert {term.name: term.count.item() for term in terms} == model.task.counts(features)
        assert terms[1].count == len(features)
        ours = sum(term.total / term.count for term in terms)
        expected = hf_loss(theirs, features, family)
        assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
        model.zero_grad()
        theirs.zero_grad()
        ours.backward()
        expected.backward()
        norms = [
            math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in one.parameters() if p.grad is not None))
            for one in (model, theirs)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        labels |= {one["fields"]["pair"][0] for one in features}
    assert labels == {0.0, 1.0}


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_micro_batches_change_no_weight(folders: dict[str, Path], objective: str) -> None:
    """Each term has its own count, and windows of one word have no pair."""
    rows = [*ROWS, {"text": "map", "sentences": ["map"]}, {"text": "rain", "sentences": ["rain"]}]
    found, losses = [], []
    for tokens in (16384, 50):
        model = TaskModel.from_pretrained(folders["bert"], task=task_of(objective)).double()
        steps = make_steps(model, rows, micro_batch_tokens=tokens, batch_size=6, epochs=3, adam_epsilon=1e-4)
        losses.append([log.loss for log in walk(steps)])
        found.append(weights_of(model))
    assert distance(*found) <= 1e-12
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_a_model_with_pairs_trains_is_evaluated_saved_and_predicts(folders: dict[str, Path], tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(folders["albert"], task=task_of("sop"))
    result = fit(model, train=ROWS, validation=ROWS, epochs=1, batch_size=4, output_dir=str(tmp_path / "run"))
    assert 0 <= result.metrics["sentence_order_accuracy"] <= 1
    saved = tmp_path / "run" / "model"
    loaded, info = transformers.AutoModelForPreTraining.from_pretrained(saved, output_loading_info=True)
    assert type(loaded).__name__ == "AlbertForPreTraining"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    again = TaskModel.from_pretrained(saved)
    assert again.task.sentence_objective == "sop"
    assert evaluate(saved, ROWS) == evaluate(saved, ROWS)
    (prediction,) = again.predict("The ferry [MASK] the harbour.\nShe read it.")
    assert len(prediction.masks) == 1
    assert prediction.pairs == ()


def test_families_without_the_head_are_refused(bpe_folder: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"(?i)roberta"):
        TaskModel.from_pretrained(checkpoint, task=task_of("nsp"))


def test_pairs_need_room() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        MaskedLanguageModeling(max_length=5, sentence_objective="sop")
