"""Segment ids are the family's, or zeros if the tokenizer states none; stock transformers gives those of our folder."""

from collections import abc
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import BertProcessing, ByteLevel, RobertaProcessing, Sequence, TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bert_tasks import evaluate, fit
from bert_tasks.data.columns import Row
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks import PairClassification
from support.hf_models import FAMILIES, ROBERTAS, WITHOUT_SEGMENTS, WITHOUT_TYPES
from support.sampling import one_of_each, slow_except
from support.small_checkpoints import edit_config, save_checkpoint
from support.small_tokenizers import LINES

LABELS = ("calm", "glad", "sad")
ROWS = [
    {"text": "the old ferry", "text_pair": "at seven"},
    {"text": "", "text_pair": "the ferry"},
    {"text": "a", "text_pair": ""},
]
# kind of post-processor -> the segment of each piece: before, first text, its end, second text, its end
TEMPLATES = {"zeros": (0, 0, 0, 0, 0), "bert": (0, 0, 0, 1, 1), "late": (0, 0, 1, 1, 1), "far": (2, 1, 1, 3, 3)}
PROCESSORS = (*TEMPLATES, "roberta", "bert processing", "sequence", "own class")
TOKENIZER_KINDS = (*product(PROCESSORS, ["bpe"]), ("own class", "wordpiece"), ("own class", "unigram"))
ZEROS = {("zeros", "bpe"), ("roberta", "bpe"), ("own class", "bpe")}  # these give both texts of a pair segment 0
# The families with a table of segments, and the rows that it may have.
TABLES = [
    (family, width)
    for family, width in product(FAMILIES, range(4))
    if family not in (*WITHOUT_TYPES, "deberta-v2") and (family in ROBERTAS or width > 0)
]


def processor(processor_name: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    ends: Any = ((sep, tokenizer.sep_token_id), (cls, tokenizer.cls_token_id))
    if processor_name == "roberta":
        return RobertaProcessing(*ends)
    if processor_name == "bert processing":
        return BertProcessing(*ends)
    before, first, middle, second, after = TEMPLATES["far" if processor_name == "sequence" else processor_name]
    template = TemplateProcessing(
        single=f"{cls}:{before} $A:{first} {sep}:{middle}",
        pair=f"{cls}:{before} $A:{first} {sep}:{middle} $B:{second} {sep}:{after}",
        special_tokens=list(ends),
    )
    return Sequence([ByteLevel(trim_offsets=True), template]) if processor_name == "sequence" else template


def plain(tokenizer: PreTrainedTokenizerBase, processor_name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that tokenizer.json alone describes, with that post-processor."""
    if processor_name == "own class":
        return tokenizer
    special = dict(tokenizer.special_tokens_map)
    changed = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **special, model_max_length=tokenizer.model_max_length
    )
    changed.backend_tokenizer.post_processor = processor(processor_name, changed)
    return changed


@pytest.fixture
def fresh(by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> Any:
    """A copy of a tokenizer that a test may change."""

    def load(name: str) -> PreTrainedTokenizerBase:
        by_kind[name].save_pretrained(tmp_path / "tokenizer")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        return tokenizer

    return load


def segments_of(ids: list[list[int]], tokenizer: PreTrainedTokenizerBase, second: int) -> list[list[int]]:
    """What the rule says: 0 until the second text begins, which is after the separators behind the first."""
    expected = []
    for row, sequence in zip(ROWS, ids, strict=True):
        pair = tokenizer([row["text"]], [row["text_pair"]])
        assert pair["input_ids"] == [sequence]
        behind = len(tokenizer(row["text_pair"], add_special_tokens=False)["input_ids"]) + 1
        expected.append([0] * (len(sequence) - behind) + [second] * behind)
    return expected


@pytest.mark.parametrize(("family", "tokenizer_kind"), one_of_each([*product(FAMILIES, TOKENIZER_KINDS)]))
def test_segments_are_the_familys_or_zeros_here_and_in_stock(
    family: str, tokenizer_kind: tuple[str, str], fresh: Any, tmp_path: Path
) -> None:
    processor_name, name = tokenizer_kind
    tokenizer = plain(fresh(name), processor_name)
    save_checkpoint(tmp_path / "stock", family, tokenizer, head="sequence", labels=LABELS, wide=True)
    model = TaskModel.from_pretrained(
        tmp_path / "stock",
        task=PairClassification.of(labels=LABELS, max_length=40, problem_type="multi_label_classification"),
    )
    second = 0 if family in WITHOUT_SEGMENTS or (processor_name, name) in ZEROS else 1
    features = model.task.features(ROWS, model.tokenizer)
    segments = [feature["token_type_ids"] for feature in features]
    assert segments == segments_of([feature["input_ids"] for feature in features], tokenizer, second)
    model.save_pretrained(tmp_path / "ours")
    again = TaskModel.from_pretrained(tmp_path / "ours")
    assert [feature["token_type_ids"] for feature in again.task.features(ROWS, again.tokenizer)] == segments
    stock = AutoTokenizer.from_pretrained(tmp_path / "ours")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    for row, feature, prediction in zip(ROWS, features, model.predict(ROWS), strict=True):
        inputs = stock([row["text"]], [row["text_pair"]], return_tensors="pt")
        assert inputs["input_ids"].tolist() == [feature["input_ids"]]
        assert inputs.get("token_type_ids", torch.zeros(1, len(feature["input_ids"]))).tolist() == [
            feature["token_type_ids"]
        ]
        with torch.no_grad():
            scores = classifier(**inputs).logits.sigmoid()[0]
        assert list(prediction.scores.values()) == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.parametrize("stated", slow_except(("names of inputs", "zeros", "both"), "both"))
def test_pairs_of_a_folder_without_segments_have_the_logits_of_transformers(
    stated: str, fresh: Any, tmp_path: Path
) -> None:
    """Also after we fine-tuned it, and in the folder that we save."""
    tokenizer = fresh("wordpiece")
    if stated != "names of inputs":
        tokenizer = plain(tokenizer, "zeros")
    if stated != "zeros":
        tokenizer.save_pretrained(tmp_path / "named")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "named", model_input_names=["input_ids", "attention_mask"])
    save_checkpoint(tmp_path / "stock", "bert", tokenizer, head="sequence", labels=LABELS, wide=True)
    model = TaskModel.from_pretrained(tmp_path / "stock", task="pair-classification")
    _check_logits(model, tmp_path / "stock")
    rows = [{**row, "label": label} for row, label in zip(ROWS, LABELS, strict=True)]
    fit(model, train=rows, validation=rows, epochs=1, output_dir=tmp_path / "run", progress=False)
    saved = TaskModel.from_pretrained(tmp_path / "run")
    _check_logits(saved, tmp_path / "run" / "model")
    model.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stock")
    assert not any(model.task.features(ROWS, model.tokenizer)[0]["token_type_ids"])


def _check_logits(model: TaskModel, folder: Path) -> None:
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, prediction in zip(ROWS, model.predict(ROWS, logits=True), strict=True):
        with torch.no_grad():
            expected = stock(**tokenizer([row["text"]], [row["text_pair"]], return_tensors="pt")).logits[0]
        assert list(prediction.logits) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_new_model_has_the_segments_of_its_family(is_folder: bool, fresh: Any, tmp_path: Path) -> None:
    tokenizer = fresh("bpe")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = {"family": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    task = PairClassification.of(labels=LABELS, max_length=40)
    model = TaskModel.from_config(config, task=task, tokenizer=tmp_path / "tokenizer" if is_folder else tokenizer)
    model.save_pretrained(tmp_path / "saved")
    for each in (model, TaskModel.from_pretrained(tmp_path / "saved")):
        assert any(each.task.features(ROWS, each.tokenizer)[0]["token_type_ids"])
    assert any(AutoTokenizer.from_pretrained(tmp_path / "saved")("a", "b")["token_type_ids"])


@pytest.mark.parametrize(("family", "width"), one_of_each(TABLES))
def test_no_segment_is_beyond_the_models_table(family: str, width: int, fresh: Any, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, family, fresh("wordpiece"))
    resize(tmp_path, family, width)
    task = PairClassification.of(labels=LABELS, max_length=40)
    model = TaskModel.from_pretrained(tmp_path, task=task)
    rows = [{"text": LINES[0], "text_pair": LINES[1]}]
    second = 1 if family not in ROBERTAS and width > 1 else 0
    segments = {segment for feature in task.features(rows, model.tokenizer) for segment in feature["token_type_ids"]}
    assert segments == {0, second}
    assert len(model.predict(rows)) == 1


def resize(folder: Path, family: str, width: int) -> None:
    weights = load_file(folder / "model.safetensors")
    key = "embeddings.token_type_embeddings.weight"
    table = weights.pop(key)
    if width:
        weights[key] = table[:1].repeat(width, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, type_vocab_size=width)


def test_a_tokenizer_that_is_set_is_fitted_and_the_callers_stays(fresh: Any, tmp_path: Path) -> None:
    tokenizer = plain(fresh("wordpiece"), "far")
    save_checkpoint(tmp_path, "bert", tokenizer)
    encoder = Encoder.from_pretrained(tmp_path)
    assert encoder.tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
    encoder.tokenizer = tokenizer
    assert encoder.tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"] == [2, 1, 1, 3, 3]
    right = fresh("wordpiece")
    encoder.tokenizer = right
    assert encoder.tokenizer is right


def test_what_cannot_be_changed_is_refused(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = plain(fresh("wordpiece"), "late")  # as no other test has it, because opened tokenizers are kept
    save_checkpoint(tmp_path, "bert", tokenizer)
    monkeypatch.setattr("bert_tasks.checkpoints.tokenizers._resegmented", lambda content, second: content)
    with pytest.raises(
        CheckpointError, match=r"than the model expects \(0 for the first text of a pair and 1 for the second\)"
    ):
        Encoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("processor_name", PROCESSORS)
def test_nothing_but_segments_changes(processor_name: str, fresh: Any, tmp_path: Path) -> None:
    """Ids and offsets, which answers and words are found by."""
    tokenizer = plain(fresh("bpe"), processor_name)
    save_checkpoint(tmp_path, "bert", tokenizer)
    fitted = Encoder.from_pretrained(tmp_path).tokenizer
    assert fitted.special_tokens_map == tokenizer.special_tokens_map
    assert fitted.model_max_length == tokenizer.model_max_length
    for texts in ((" a  café 😀", "the  ferry "), ("", "b"), ("x",)):
        expected, encoding = (each(*texts, return_offsets_mapping=True) for each in (tokenizer, fitted))
        assert encoding["input_ids"] == expected["input_ids"]
        assert encoding["offset_mapping"] == expected["offset_mapping"]
        assert encoding.sequence_ids() == expected.sequence_ids()


@dataclass(frozen=True, kw_only=True)
class WrongIds(PairClassification):
    """A task that is not built in, whose features hold one id that some models have no embedding for."""

    wrong: Literal["input_ids", "token_type_ids"] = "token_type_ids"
    number: int = 2

    def features(self, rows: abc.Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        features = super().features(rows, tokenizer)
        features[-1][self.wrong] = [*features[-1][self.wrong][:-1], self.number]
        return features


@pytest.mark.parametrize(("wrong", "number"), [("token_type_ids", 2), ("token_type_ids", -1), ("input_ids", 10**6)])
def test_ids_of_an_own_task_without_an_embedding_are_refused(
    wrong: Literal["input_ids", "token_type_ids"], number: int, fresh: Any, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "stock", "bert", fresh("wordpiece"))
    task = WrongIds.of(labels=("no", "yes"), max_length=40, wrong=wrong, number=number)
    model = TaskModel.from_pretrained(tmp_path / "stock", task=task)
    rows = [{**row, "label": label} for row, label in zip(ROWS, ("no", "yes", "yes"), strict=True)]
    refused = pytest.raises(UsageError, match=rf"WrongIds: the {wrong} of a feature hold {number}, but the model has")
    with refused:
        model.predict(rows)
    with refused:
        evaluate(model, rows)
    with refused:
        fit(model, train=rows, validation=rows, epochs=1, output_dir=tmp_path / "run", progress=False)


def test_features_kept_for_another_model_are_checked_again(fresh: Any, tmp_path: Path) -> None:
    tokenizer, task = fresh("wordpiece"), WrongIds.of(labels=("no", "yes"), max_length=40, number=2)
    rows = [{**row, "label": label} for row, label in zip(ROWS, ("no", "yes", "yes"), strict=True)]
    for width in (3, 2):
        save_checkpoint(tmp_path / str(width), "bert", tokenizer)
        resize(tmp_path / str(width), "bert", width)
    assert evaluate(TaskModel.from_pretrained(tmp_path / "3", task=task), rows)
    with pytest.raises(UsageError, match="the token_type_ids of a feature hold 2"):
        evaluate(TaskModel.from_pretrained(tmp_path / "2", task=task), rows)
