"""Masked language modelling with a sentence objective: two terms of the loss, against transformers' classes."""

import json
import math
from collections.abc import Sequence
from importlib.metadata import version
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
from bert_tasks.tasks.windows import corpus
from support.hf_models import PREFIX, hf_config, widen
from support.small_tokenizers import LINES
from support.stopped_runs import events

ROWS = [{"text": "\n".join(lines), "sentences": lines} for lines in (LINES[:6], LINES[6:7], LINES[7:13], LINES[13:])]
CASES = [("bert", "nsp"), ("bert", "sop"), ("albert", "sop")]
TERMS = {"nsp": "next_sentence", "sop": "sentence_order"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, by_kind: dict[str, PreTrainedTokenizerBase]) -> dict[str, Path]:
    paths = {}
    for family in ("bert", "albert"):
        tokenizer = by_kind["unigram"]  # BERT's WordPiece is 30 times as large
        options = {"num_labels": 2, "vocab_size": len(tokenizer), "num_hidden_layers": 2}
        config = hf_config(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
        if family == "albert":
            config.classifier_dropout_prob = 0.0
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{PREFIX[family]}ForPreTraining")(config)
        widen(model, seed=3)
        paths[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(paths[family])
        tokenizer.save_pretrained(paths[family])
    return paths


def task_of(objective: str, **settings: object) -> MaskedLanguageModeling:
    return MaskedLanguageModeling.of(max_length=48, sentence_objective=objective, **settings)


def prepared(model: TaskModel, *, epoch: int = 0, rows: Sequence[dict[str, object]] = ROWS) -> list[dict[str, object]]:
    tokenizer = model.require_tokenizer()
    features = model.task.features(rows, tokenizer)
    keys = FeatureKeys(seed=4, epoch=epoch, numbers=range(len(features)))
    return list(model.task.prepare(features, keys, features, tokenizer))


def hf_loss(theirs: PreTrainedModel, features: list[dict[str, object]], family: str) -> torch.Tensor:
    """The loss of transformers' class, on the same features with padding."""
    longest = max(len(feature["input_ids"]) for feature in features)
    ids, types, mask, labels = (torch.full((len(features), longest), fill) for fill in (0, 0, 0, -100))
    for row, feature in enumerate(features):
        size = len(feature["input_ids"])
        ids[row, :size], types[row, :size] = torch.tensor(feature["input_ids"]), torch.tensor(feature["token_type_ids"])
        mask[row, :size] = 1
        labels[row, feature["gather_positions"]] = torch.tensor(feature["labels"]).long()
    name = "sentence_order_label" if family == "albert" else "next_sentence_label"
    pairs = torch.tensor([int(feature["fields"]["pair"][0]) for feature in features])
    arguments = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels, name: pairs}
    return theirs(**arguments).loss


@pytest.mark.parametrize(("family", "objective"), CASES)
def test_the_loss_is_that_of_transformers(folders: dict[str, Path], family: str, objective: str) -> None:
    model = TaskModel.from_pretrained(folders[family], task=task_of(objective)).double().eval()
    theirs = getattr(transformers, f"{PREFIX[family]}ForPreTraining").from_pretrained(folders[family]).double().eval()
    labels = set()
    for epoch in range(3):
        features = prepared(model, epoch=epoch)
        batch = collate(features, position_offset=model.config.position_offset)
        terms = model.task.output.loss(model(batch), batch)
        assert [term.name for term in terms] == ["masked_lm", TERMS[objective]]
        assert {term.name: term.count.item() for term in terms} == model.task.output.counts(features)
        assert terms[1].count == len(features)
        ours = sum(term.total / term.count for term in terms)
        expected = hf_loss(theirs, features, family)
        assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
        model.zero_grad()
        theirs.zero_grad()
        ours.backward()
        expected.backward()
        norms = [
            math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in module.parameters() if p.grad is not None))
            for module in (model, theirs)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        labels |= {feature["fields"]["pair"][0] for feature in features}
    assert labels == {0.0, 1.0}


def test_the_perplexity_is_that_of_the_masked_tokens_beside_their_pairs(folders: dict[str, Path]) -> None:
    model = TaskModel.from_pretrained(folders["albert"], task=task_of("sop")).double().eval()
    features, output = prepared(model), model.task.output
    batch = collate(features, position_offset=model.config.position_offset)
    with torch.no_grad():
        logits = model(batch)
        masked, _ = output.loss(logits, batch)
        compact = output.compact(logits.split(batch.layout.gather_counts), features)
    predictions = output.decode(compact, features, ROWS, model.require_tokenizer())
    expected = math.exp(masked.total / masked.count)
    assert output.metrics(predictions, ROWS)["perplexity"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
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
    assert again.task.output.sentence_objective == "sop"
    assert evaluate(saved, ROWS) == evaluate(saved, ROWS)
    (prediction,) = again.predict("The ferry [MASK] the harbour.\nShe read it.")
    assert len(prediction.masks) == 1
    assert prediction.pairs == ()


@pytest.mark.slow
@pytest.mark.parametrize(("teaches", "learns"), [("nsp", "none"), ("none", "nsp"), ("nsp", "sop")])
def test_a_teacher_may_have_learnt_other_pairs(
    folders: dict[str, Path], tmp_path: Path, teaches: str, learns: str
) -> None:
    teacher, student = (
        TaskModel.from_pretrained(folders["bert"], task=task_of(objective)) for objective in (teaches, learns)
    )
    result = fit(student, ROWS, ROWS, teacher=teacher, output_dir=tmp_path, max_steps=1, progress=False)
    assert ("sentence_order_accuracy" in result.metrics) == (learns == "sop")
    (agreement,) = (event for event in events(tmp_path) if event["event"] == "agreement")
    assert agreement["agreement"][""] > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_taught", [False, True])
def test_the_documents_of_a_file_are_those_between_blank_lines(
    folders: dict[str, Path], tmp_path: Path, is_taught: bool
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The ferry left.\nIt was late.\n\nShe read it.\nHe slept.\n")
    teacher, student = (TaskModel.from_pretrained(folders["bert"], task=task_of("nsp")) for _ in range(2))
    options = {"teacher": teacher} if is_taught else {}
    fit(student, corpus, corpus, output_dir=tmp_path / "run", max_steps=1, progress=False, **options)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rows"] == 2


def test_families_without_the_head_are_refused(bpe_folder: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"(?i)roberta"):
        TaskModel.from_pretrained(checkpoint, task=task_of("nsp"))


def test_an_objective_that_the_head_is_not_for_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"sentence_objective = \"nsp\" .* Set it to 'sop', or to 'none'"):
        TaskModel.from_pretrained(folders["albert"], task=task_of("nsp"))


class TestSplitting:
    def test_texts_are_cut_into_their_sentences(self, folders: dict[str, Path]) -> None:
        model = TaskModel.from_pretrained(folders["bert"], task=task_of("nsp", sentence_language="en"))
        tokenizer = model.require_tokenizer()
        rows = [{"text": "\n".join(LINES[:6])}, {"text": "The map. The ferry."}]
        joined = [{"text": " ".join(LINES[:3]) + "\n" + " ".join(LINES[3:6])}, rows[1]]
        whole = task_of("nsp").features(rows, tokenizer)
        split = model.task.features(joined, tokenizer)
        starts = [
            [feature["sentence_starts"] for feature in features if feature["row"] == 0] for features in (whole, split)
        ]
        assert starts[0] == starts[1]
        assert sum(map(len, starts[0])) == 6
        assert [feature["input_ids"] for feature in whole] == [feature["input_ids"] for feature in split]
        assert [len(features[-1]["sentence_starts"]) for features in (whole, split)] == [1, 2]

    @pytest.mark.slow
    def test_run_json_names_the_library(self, folders: dict[str, Path], tmp_path: Path) -> None:
        model = TaskModel.from_pretrained(folders["bert"], task=task_of("sop", sentence_language="en"))
        fit(model, ROWS, ROWS, output_dir=tmp_path, max_steps=1, progress=False)
        versions = json.loads((tmp_path / "run.json").read_text("utf-8"))["versions"]
        assert versions["sentencex"] == version("sentencex")

    def test_a_missing_library_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"sentencex not installed, .* Run `pip install '\.\[sentences\]'`"):
            task_of("sop", sentence_language="en").check_split([], "train")
        task_of("sop").check_split([], "train")
