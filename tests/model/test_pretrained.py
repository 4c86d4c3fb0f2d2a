"""Folders become task models and back, and stock transformers reads what we save."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)

from bert_tasks import fit
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.loading import restore
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.hf_models import AFTER_PADDING, EVERY_HEAD, FAMILIES, PREFIX, WITHOUT_TYPES, Head
from support.largest_tensor import LargestTensor
from support.sampling import one_of_each, slow_except
from support.small_checkpoints import copied, edit_config, save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES
from support.task_examples import EXAMPLES

LABELS = ("calm", "glad", "sad")
TEXTS = (LINES[0], "the ferry", "", LINES[7])
_BERT = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
HEAD_KEYS = {
    "bert": _BERT,
    "megatron-bert": _BERT,
    **{
        family: {name.replace("bert.", f"{family}.") for name in _BERT}
        for family in ("nomic_bert", "gte", "ernie", "rembert")
    },
    "distilbert": {
        f"{name}.{parameter}" for name in ("pre_classifier", "classifier") for parameter in ("weight", "bias")
    },
    "albert": {"albert.pooler.weight", "albert.pooler.bias", "classifier.weight", "classifier.bias"},
    "deberta-v2": {
        f"{name}.{parameter}" for name in ("pooler.dense", "classifier") for parameter in ("weight", "bias")
    },
    "eurobert": {f"{name}.{parameter}" for name in ("dense", "classifier") for parameter in ("weight", "bias")},
    "ultrabert": {"classifier.weight", "classifier.bias"},
    "modernbert": {"head.dense.weight", "head.norm.weight", "classifier.weight", "classifier.bias"},
    **{
        family: {f"classifier.{name}.{parameter}" for name in ("dense", "out_proj") for parameter in ("weight", "bias")}
        for family in ("electra", "roformer", *AFTER_PADDING)
    },
}
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def stock(by_kind: dict[str, PreTrainedTokenizerBase], tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A folder as transformers saves it, made once for each family, head and set of options; read-only."""
    folders: dict[str, Path] = {}

    def save(family: str = "albert", head: Head = "sequence", **options: Any) -> Path:
        key = f"{family}-{head}-{sorted(options.items())}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            options = {"labels": LABELS} | options
            save_checkpoint(folders[key], family, tokenizer_of(family, by_kind), head=head, wide=True, **options)
        return folders[key]

    return save


def inputs_of(folder: Path) -> dict[str, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(list(TEXTS), padding=True, truncation=True, max_length=40, return_tensors="pt"))


@torch.no_grad()
def stock_logits(model: PreTrainedModel, folder: Path) -> Tensor:
    inputs = inputs_of(folder)
    if model.config.model_type in WITHOUT_TYPES:
        inputs.pop("token_type_ids", None)
    logits: Tensor = model(**inputs).logits
    return logits


@torch.no_grad()
def our_logits(model: TaskModel, folder: Path) -> Tensor:
    logits: Tensor = model(**inputs_of(folder))
    return logits


def stock_model(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def loaded(folder: Path, labels: Sequence[str] | None = None, **settings: Any) -> TaskModel:
    settings = {"max_length": 40} | settings
    return TaskModel.from_pretrained(folder, task="sequence-classification", labels=labels, **settings)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "roberta", "electra"))
def test_stock_folder_and_back(family: str, stock: Save, tmp_path: Path) -> None:
    folder = stock(family)
    theirs = stock_logits(stock_model(folder), folder)
    assert theirs.std() > 0.05  # a constant would be equal too
    ours = loaded(folder)
    assert ours.task.output.labels == LABELS
    assert ours.load_report.new == ours.load_report.dropped == ()
    assert (our_logits(ours, folder) - theirs).abs().max() < 1e-5 * theirs.abs().max()
    ours.save_pretrained(tmp_path / "saved")
    again = stock_model(tmp_path / "saved")
    assert (stock_logits(again, tmp_path / "saved") - theirs).abs().max() < 1e-6
    assert again.config.id2label == dict(enumerate(LABELS))
    assert again.config.problem_type == "single_label_classification"
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize(("family", "pooling"), one_of_each([*product(FAMILIES, ["mean", "max", "attention"])]))
def test_heads_that_transformers_lacks(family: str, pooling: str, stock: Save, tmp_path: Path) -> None:
    folder = stock(family)
    ours = loaded(folder, pooling=pooling)
    expected = {"head.output.weight", "head.output.bias"}
    if pooling == "attention":
        expected |= {"head.score.weight", "head.score.bias"}
    assert set(ours.load_report.new) == expected
    assert set(ours.load_report.dropped) == HEAD_KEYS[family]
    ours.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [f"{PREFIX[family]}Model"]
    assert set(load_file(tmp_path / "saved" / "task_head.safetensors")) == expected
    keys = set(load_file(tmp_path / "saved" / "model.safetensors"))
    assert not any("classifier" in key or "pooler" in key for key in keys)
    assert keys <= load_file(stock(family, "base") / "model.safetensors").keys()  # without the prefix of other models
    again = TaskModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(our_logits(again, folder), our_logits(ours, folder))
    assert again.task == ours.task


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert"))
def test_stock_base_model_of_a_pooling_head(family: str, stock: Save, tmp_path: Path) -> None:
    folder = stock(family)
    loaded(folder, pooling="mean").save_pretrained(tmp_path / "saved")
    inputs = inputs_of(folder)
    if family in WITHOUT_TYPES:
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        before = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state
        after = AutoModel.from_pretrained(tmp_path / "saved").eval()(**inputs).last_hidden_state
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "roberta"))
def test_labels_in_another_order_are_mapped_by_name(family: str, stock: Save, tmp_path: Path) -> None:
    folder, order = stock(family), ("sad", "calm", "glad")
    ours = loaded(folder, order)
    theirs = our_logits(loaded(folder), folder)
    assert torch.allclose(our_logits(ours, folder), theirs[:, [2, 0, 1]], atol=1e-6)
    assert ours.load_report.notes == ("head reordered from labels calm, glad, sad to sad, calm, glad",)
    ours.save_pretrained(tmp_path / "saved")
    again = stock_model(tmp_path / "saved")
    assert again.config.id2label == dict(enumerate(order))
    assert torch.allclose(stock_logits(again, folder), theirs[:, [2, 0, 1]], atol=1e-5)


def test_own_head_is_mapped_by_name_too(stock: Save, tmp_path: Path) -> None:
    first = loaded(stock(), pooling="max")
    first.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved", ("sad", "calm", "glad"), pooling="max")
    expected = our_logits(first, stock())[:, [2, 0, 1]]
    assert torch.allclose(our_logits(again, stock()), expected, atol=1e-6)


def test_id2label_is_read_in_the_order_of_its_numbers(stock: Save, tmp_path: Path) -> None:
    names = {str(index): f"class {index}" for index in range(12)}
    folder = copied(stock("albert", "base"), tmp_path / "model")
    edit_config(folder, id2label=dict(sorted(names.items())), architectures=["AlbertForSequenceClassification"])
    assert loaded(folder).task.output.labels == tuple(names.values())
    edit_config(folder, id2label={"zero": "a", "1": "b"})
    with pytest.raises(CheckpointError, match="the keys of id2label are not numbers"):
        loaded(folder)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_unnamed_labels_are_taken_in_order(count: int, stock: Save) -> None:
    """transformers leaves the names of two classes out of the file, those of more it writes."""
    folder = stock("albert", labels=tuple(f"LABEL_{index}" for index in range(count)))
    assert ("id2label" in json.loads((folder / "config.json").read_text())) == (count != 2)
    unnamed = loaded(folder)
    assert unnamed.task.output.labels == tuple(f"LABEL_{index}" for index in range(count))
    assert unnamed.load_report.notes == ()
    ours = ("calm", "glad", "sad", "bored")[:count]
    named = loaded(folder, ours)
    assert torch.equal(our_logits(named, folder), our_logits(unnamed, folder))
    expected = f"unnamed ({', '.join(unnamed.task.output.labels)}) and taken in the order {', '.join(ours)}"
    assert named.load_report.notes == (f"the file's labels are {expected}",)
    assert named.load_report.new == ()


@pytest.mark.parametrize(
    ("theirs", "order", "unnamed"),
    [
        (("calm", "LABEL_1", "sad"), (0, 1, 2), ("LABEL_1) and taken in the order glad",)),
        (("sad", "LABEL_1", "LABEL_2"), (1, 2, 0), ("LABEL_2) and taken in the order calm, glad", "reordered")),
        (("LABEL_0", "Sad", "calm"), (2, 0, 1), ("LABEL_0) and taken in the order glad", "reordered")),
        (
            ("LABEL_2", "LABEL_0", "LABEL_1"),
            (0, 1, 2),
            ("LABEL_2, LABEL_0, LABEL_1) and taken in the order calm, glad, sad",),
        ),
    ],
)
def test_names_go_by_name_and_only_the_rest_in_order(
    theirs: tuple[str, ...], order: tuple[int, ...], unnamed: tuple[str, ...], stock: Save
) -> None:
    folder = stock("albert", labels=theirs)
    named = loaded(folder, LABELS)
    assert torch.allclose(our_logits(named, folder), our_logits(loaded(folder), folder)[:, list(order)], atol=1e-6)
    assert named.load_report.new == ()
    for message, note in zip(unnamed, named.load_report.notes, strict=True):
        assert message in note


@pytest.mark.parametrize("theirs", [("calm", "LABEL_1", "other"), ("LABEL_NOISE", "LABEL_SIGNAL", "LABEL_OTHER")])
def test_labels_with_names_of_their_own_are_other_labels(theirs: tuple[str, ...], stock: Save) -> None:
    report = loaded(stock("albert", labels=theirs), LABELS).load_report
    assert set(report.new) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("family", slow_except(FAMILIES, "electra"))
def test_other_labels_get_a_new_last_layer(family: str, stock: Save) -> None:
    """As many labels with other names, or more of them: never the old rows under new names."""
    folder = stock(family)
    last = {key for key in HEAD_KEYS[family] if key.startswith(("classifier.out_proj", "classifier."))}
    last = {key for key in last if ".dense." not in key}
    for labels in (("x", "y", "z"), ("a", "b", "c", "d", "e")):
        model = loaded(folder, labels)
        report = model.load_report
        assert set(report.new) == last
        assert not last.intersection(report.loaded)
        assert set(report.loaded) >= HEAD_KEYS[family] - last
        assert our_logits(model, folder).shape == (len(TEXTS), len(labels))
        assert "New head" in report.summary()
    different = our_logits(loaded(folder, ("x", "y", "z")), folder) - our_logits(loaded(folder), folder)
    assert different.abs().max() > 1e-3


def test_a_head_that_does_not_fit_its_config_needs_a_task(stock: Save, tmp_path: Path) -> None:
    folder = copied(stock(), tmp_path / "model")
    edit_config(folder, id2label={str(index): f"c{index}" for index in range(5)})
    with pytest.raises(CheckpointError) as error:
        TaskModel.from_pretrained(folder)
    assert "classifier.weight has shape [3, 36], expected [5, 36]" in str(error.value)
    assert "classifier.bias has shape [3], expected [5]" in str(error.value)
    assert loaded(folder).task.output.labels == ("c0", "c1", "c2", "c3", "c4")


@pytest.mark.parametrize(("family", "head"), one_of_each([case for case in EVERY_HEAD if case[1] in ("token", "span")]))
def test_another_tasks_head_is_dropped(family: str, head: Head, stock: Save) -> None:
    labels = LABELS if head == "token" else ("start", "end")
    model = loaded(stock(family, head, labels=labels), labels)
    report = model.load_report
    theirs = {"token": "classifier", "span": "classifier" if family == "modernbert" else "qa_outputs"}[head]
    assert set(report.dropped) == {f"{theirs}.weight", f"{theirs}.bias"}
    assert {key for key in HEAD_KEYS[family] if key.startswith("classifier")} <= set(report.new)


def test_without_a_task_the_folder_decides(stock: Save) -> None:
    with pytest.raises(UsageError, match="labels and settings need a task"):
        TaskModel.from_pretrained(stock("bert", "base"), max_length=40)
    with pytest.raises(CheckpointError, match="no task head this package knows"):
        TaskModel.from_pretrained(stock("albert", "base"))
    model = TaskModel.from_pretrained(stock())
    assert model.task == SequenceClassification.of(labels=LABELS, max_length=48)  # as many as there are positions
    assert torch.equal(our_logits(model, stock()), our_logits(loaded(stock()), stock()))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_max_length_beyond_the_positions(family: str, stock: Save) -> None:
    assert loaded(stock(family), max_length=48).task.max_length == 48
    with pytest.raises(UsageError, match=r"max_length = 49, but the checkpoint has 48 positions"):
        loaded(stock(family), max_length=49)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "sequence-clasification"}, "did you mean 'sequence-classification'"),
        (
            {"task": "translation"},
            r"unknown task 'translation'. Known names are sequence-classification \(or text-classification",
        ),
        ({"task": "sequence-classification", "maxlength": 3}, "has no setting 'maxlength', did you mean 'max_length'"),
        ({"task": "sequence-classification", "max_length": "40"}, "sequence-classification: "),
        ({"task": "sequence-classification", "labels": "glad"}, "labels is 'glad'. Input should be a valid array"),
        ({"task": "sequence-classification", "max_length": 2}, "max_length is 2, expected at least 3"),
        (
            {"task": "sequence-classification", "pooling": "average"},
            "pooling is 'average'. Input should be 'cls', 'mean'",
        ),
        ({"task": SequenceClassification.of(labels=LABELS), "labels": LABELS}, "pass either a task, or a task's name"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, stock: Save) -> None:
    with pytest.raises(UsageError, match=message):
        TaskModel.from_pretrained(stock(), **arguments)


def test_regression(stock: Save, tmp_path: Path) -> None:
    folder = stock("albert", labels=("LABEL_0",))
    task = SequenceClassification.of(problem_type="regression", max_length=40)
    model = TaskModel.from_pretrained(folder, task=task)
    assert not model.load_report.new
    model.save_pretrained(tmp_path / "saved")
    again = TaskModel.from_pretrained(tmp_path / "saved")
    assert again.task == task
    theirs = stock_model(tmp_path / "saved")
    assert theirs.config.num_labels == 1
    predicted = [prediction.to_json()["score"] for prediction in again.predict([{"text": text} for text in TEXTS])]
    assert predicted == pytest.approx(stock_logits(theirs, folder).squeeze(-1).tolist(), rel=1e-4, abs=1e-5)


def test_problem_type_of_a_stock_folder(stock: Save, tmp_path: Path) -> None:
    folder = copied(stock("bert", problem_type="multi_label_classification"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    longer = weights["bert.embeddings.position_embeddings.weight"].repeat(4, 1)
    torch.save(weights | {"bert.embeddings.position_embeddings.weight": longer}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    edit_config(folder, max_position_embeddings=4 * 48)
    task = TaskModel.from_pretrained(folder).task
    assert task == SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
    edit_config(folder, problem_type="ranking")
    with pytest.raises(CheckpointError, match="problem_type is 'ranking', expected one of"):
        TaskModel.from_pretrained(folder)


def test_loaded_models_are_ready_to_use(stock: Save) -> None:
    model = loaded(stock("electra", "base"), LABELS)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(model.buffers()) == []


@pytest.mark.parametrize("family", slow_except(("bert", "roberta"), "roberta"))
def test_pipeline_of_transformers_gives_the_same_answers(family: str, stock: Save, tmp_path: Path) -> None:
    model = loaded(stock(family))
    model.save_pretrained(tmp_path / "saved")
    classify = pipeline("text-classification", model=str(tmp_path / "saved"), device="cpu")
    answers = classify(list(TEXTS), truncation=True, max_length=40)
    ours = [prediction.to_json() for prediction in model.predict([{"text": text} for text in TEXTS])]
    assert [answer["label"] for answer in answers] == [prediction["label"] for prediction in ours]
    assert [answer["score"] for answer in answers] == pytest.approx(
        [prediction["score"] for prediction in ours], abs=1e-5
    )


@pytest.mark.parametrize("case", slow_except(("single", "several", "token", "pair"), "single"))
def test_labels_that_nobody_named_are_those_of_the_training_rows(
    case: str, tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, head="base")
    example = EXAMPLES[case]
    options = {"task": example.task.name, "max_length": 24}
    if case == "several":
        options["problem_type"] = "multi_label_classification"
    waiting = TaskModel.from_pretrained(tmp_path / "base", **options)
    for call in (lambda: waiting.predict([example.rows[0]]), lambda: waiting.save_pretrained(tmp_path / "saved")):
        with pytest.raises(UsageError, match=r"needs labels, e\.g\. .* or call fit, which takes the labels of"):
            call()
    rows = list(example.rows)
    settings = {"epochs": 1, "batch_size": 4, "progress": False}
    fit(waiting, rows, rows, output_dir=tmp_path / "waiting", **settings)
    labels = waiting.task.output.labels
    assert set(labels) <= set(example.task.output.labels)
    assert len(labels) > 1
    told = TaskModel.from_pretrained(tmp_path / "base", labels=labels, **options)
    fit(told, rows, rows, output_dir=tmp_path / "told", **settings)
    assert all(
        torch.equal(parameter, other) for parameter, other in zip(waiting.parameters(), told.parameters(), strict=True)
    )
    assert TaskModel.from_pretrained(tmp_path / "waiting").task == told.task


def test_a_task_in_memory_has_its_labels(tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer, head="base")
    with pytest.raises(UsageError, match="needs labels"):
        TaskModel.from_pretrained(tmp_path, task=SequenceClassification.of(max_length=40))


def test_a_regression_model_is_reloaded_by_its_task_name(
    tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    base = tmp_path / "base"
    save_checkpoint(base, "bert", wordpiece_tokenizer, head="base")
    regression = {"task": "sequence-classification", "problem_type": "regression", "max_length": 40}
    TaskModel.from_pretrained(base, **regression).save_pretrained(tmp_path / "saved")
    again = TaskModel.from_pretrained(tmp_path / "saved", **regression)
    assert again.load_report.new == ()


def test_a_damaged_head_of_our_own_is_refused(tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    base = tmp_path / "base"
    save_checkpoint(base, "bert", wordpiece_tokenizer, head="base")
    model = TaskModel.from_pretrained(
        base, task="sequence-classification", labels=["a", "b"], pooling="mean", max_length=40
    )
    with torch.no_grad():
        model.head.output.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(
        CheckpointError, match=r"task_head\.safetensors cannot be used:\n.*head\.output\.weight holds NaN"
    ):
        TaskModel.from_pretrained(tmp_path / "saved")


def test_an_encoder_taken_from_a_task_folder_claims_no_task(
    tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    base = tmp_path / "base"
    save_checkpoint(base, "bert", wordpiece_tokenizer, head="base")
    TaskModel.from_pretrained(base, task="sequence-classification", labels=["a", "b"], max_length=40).save_pretrained(
        tmp_path / "task"
    )
    Encoder.from_pretrained(tmp_path / "task").save_pretrained(tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    assert config.keys().isdisjoint({"bert_tasks", "id2label", "label2id", "problem_type"})
    assert config["architectures"] == ["BertModel"]


def test_weights_are_saved_and_restored_without_copies(stock: Save, tmp_path: Path) -> None:
    """The largest tensor, the table of word embeddings, need not be in memory twice."""
    model = TaskModel.from_pretrained(stock("bert"))
    with LargestTensor() as seen:
        model.save_pretrained(tmp_path)
    assert seen.copied == 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with LargestTensor() as seen:
        restore(model, tmp_path)
    assert seen.copied < model.encoder.embeddings.word.weight.numel() == max(map(torch.numel, model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
