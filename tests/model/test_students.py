"""Students made of some layers of a checkpoint, and of another family."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from bert_tasks.errors import UsageError
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification, TokenClassification
from bert_tasks.tasks.features import collate
from support.hf_models import FAMILIES, hf_class, hf_config, widen
from support.sampling import one_of_each
from support.small_checkpoints import tokenizer_of

WITH_OWN_LAYERS = [family for family in FAMILIES if family != "albert"]
LABELS = ("calm", "glad", "sad")
TEXTS = ("the ferry leaves at seven", "", "nobody told the baker that prices rose last winter")


@pytest.fixture(scope="module")
def saved(by_kind, tmp_path_factory):
    """A wide checkpoint of five layers of any family, without a task head."""
    folders = {}

    def save(family="bert", **changes):
        key = f"{family}-{changes}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("teacher")
            tokenizer = tokenizer_of(family, by_kind)
            sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 5, "num_labels": 3}
            model = hf_class(family, "base")(hf_config(family, **{**sizes, **changes}))
            widen(model, seed=1)
            model.save_pretrained(folders[key])
            tokenizer.save_pretrained(folders[key])
        return folders[key]

    return save


def task_model(folder, task_class=SequenceClassification, **settings):
    torch.manual_seed(0)
    return TaskModel.from_pretrained(folder, task=task_class.of(labels=LABELS, max_length=32, **settings))


def features(model):
    rows = [{"text": text} if "text" in [column.name for column in model.task.columns] else {} for text in TEXTS]
    if isinstance(model.task, TokenClassification):
        rows = [{"words": text.split() or ["x"]} for text in TEXTS]
    return model.task.features(rows, model.tokenizer)


def logits(model):
    batch = collate(features(model), position_offset=model.config.position_offset)
    with torch.no_grad():
        return model(batch)


@pytest.mark.parametrize(("family", "layers"), one_of_each([*product(WITH_OWN_LAYERS, [(0, 2, 4), (3, 1), (2,)])]))
def test_a_student_is_the_encoder_with_these_layers(saved, family, layers):
    teacher = task_model(saved(family))
    if family == "modernbert" and layers[0] != 0:
        with pytest.raises(UsageError, match="layer 0 of modernbert has no norm before attention, so it must be"):
            teacher.with_layers(layers)
        return
    student = teacher.with_layers(layers)
    assert student.config.layer_order == tuple(range(len(layers)))
    for new, old in enumerate(layers):
        for name, tensor in student.encoder.layers[new].state_dict().items():
            assert torch.equal(tensor, teacher.encoder.layers[old].state_dict()[name])
    pruned = task_model(saved(family))
    pruned.encoder.layers = torch.nn.ModuleList(pruned.encoder.layers[layer] for layer in layers)
    pruned.encoder.layer_order = tuple(range(len(layers)))
    torch.testing.assert_close(logits(student), logits(pruned), rtol=0, atol=0)
    with torch.no_grad():
        student.head.output.bias += 1
    assert not torch.equal(student.head.output.bias, teacher.head.output.bias)


def test_all_layers_give_the_teacher_and_every_other_half_of_them(saved):
    teacher = task_model(saved())
    torch.testing.assert_close(logits(teacher.with_layers()), logits(teacher), rtol=0, atol=0)
    assert teacher.with_layers("every-other").load_report.notes[-1] == "layers 0, 2, 4 of 5"


def test_stock_transformers_opens_a_saved_student(saved, tmp_path):
    student = task_model(saved()).with_layers([0, 4])
    student.save_pretrained(tmp_path)
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert stock.config.num_hidden_layers == 2
    for feature, ours in zip(features(student), logits(student), strict=True):
        ids, segments = (torch.tensor([feature[name]]) for name in ("input_ids", "token_type_ids"))
        with torch.no_grad():
            torch.testing.assert_close(stock(input_ids=ids, token_type_ids=segments).logits[0], ours)


def test_a_distilbert_with_all_layers_of_a_bert_equals_it(saved, tmp_path):
    teacher = task_model(saved(), TokenClassification, doc_stride=4)
    with torch.no_grad():
        teacher.head.output.weight *= 20
    student = teacher.with_layers(family="distilbert")
    assert student.hf_config["model_type"] == "distilbert"
    torch.testing.assert_close(logits(student), logits(teacher), rtol=0, atol=1e-5)
    exact = [logits(model.double()).log_softmax(-1) for model in (teacher, student)]
    assert exact[0].std() > 0.5
    assert F.kl_div(exact[1], exact[0], reduction="batchmean", log_target=True).abs() < 1e-12
    student.float().save_pretrained(tmp_path)
    stock = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    feature, ours = features(student)[0], logits(student)
    with torch.no_grad():
        theirs = stock(input_ids=torch.tensor([feature["input_ids"]])).logits[0]
    read = feature["gather_positions"]
    torch.testing.assert_close(theirs[read], ours[: len(read)], rtol=0, atol=1e-5)


def test_without_the_row_of_segment_0_it_would_not(saved):
    teacher = task_model(saved(), TokenClassification, doc_stride=4)
    student = teacher.with_layers(family="distilbert")
    with torch.no_grad():
        student.encoder.embeddings.position.weight -= teacher.encoder.embeddings.token_type.weight[0]
    assert (logits(student) - logits(teacher)).abs().max() > 1e-3


def test_a_head_of_another_shape_is_new_and_drawn_from_the_seed(saved):
    teacher = task_model(saved())
    students = [teacher.with_layers(family="distilbert") for _ in range(2)]
    assert not torch.equal(students[0].head.dense.weight, teacher.head.dense.weight)
    for student in students:
        draw_new_head(student, 7)
    assert torch.equal(students[0].head.dense.weight, students[1].head.dense.weight)
    kept = teacher.with_layers([1])
    assert torch.equal(kept.head.dense.weight, teacher.head.dense.weight)
    draw_new_head(teacher, 7)
    draw_new_head(kept, 7)
    assert torch.equal(kept.head.dense.weight, teacher.head.dense.weight)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("bert", {"layers": [0, 5]}, "expected numbers from 0 to 4"),
        ("bert", {"layers": []}, "expected numbers from 0 to 4"),
        ("bert", {"layers": [-1]}, "expected numbers from 0 to 4"),
        ("albert", {"layers": [0]}, "share their weights"),
        ("bert", {"family": "distilbrt"}, "distilbert"),
        ("roberta", {"family": "distilbert"}, "position_offset"),
        ("bert", {"family": "albert"}, "project_embeddings"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(saved, family, options, said):
    with pytest.raises(UsageError, match=said):
        task_model(saved(family)).with_layers(**options)


def test_an_epsilon_that_distilbert_does_not_have_is_refused(saved):
    with pytest.raises(UsageError, match="layer_norm_eps"):
        task_model(saved(layer_norm_eps=1e-5)).with_layers(family="distilbert")


def test_the_encoder_of_a_student_opens_without_a_task(saved, tmp_path):
    task_model(saved()).with_layers([0, 1, 2]).save_pretrained(tmp_path)
    assert len(Encoder.from_pretrained(tmp_path).encoder.layers) == 3


def test_a_masked_language_model_keeps_its_head_as_a_distilbert(saved, tmp_path):
    """What DistilBERT starts from: with all layers it predicts the tokens that its teacher predicts."""
    torch.manual_seed(0)
    teacher = TaskModel.from_pretrained(saved(), task=MaskedLanguageModeling.of(max_length=32))
    with torch.no_grad():
        for parameter in teacher.head.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    student = teacher.with_layers(family="distilbert")
    rows = [{"text": "the ferry leaves at [MASK] and the [MASK] was cold"}]
    exact = []
    for model in (teacher.double(), student.double()):
        (feature,) = model.task.features(rows, model.tokenizer)
        with torch.no_grad():
            exact.append(model(collate([feature], position_offset=0)).logits().log_softmax(-1))
    assert exact[0].std() > 0.5
    assert F.kl_div(exact[1], exact[0], reduction="batchmean", log_target=True).abs() < 1e-12
    student.float().save_pretrained(tmp_path)
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert stock.config.model_type == "distilbert"
    with torch.no_grad():
        theirs = stock(input_ids=torch.tensor([feature["input_ids"]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(theirs[feature["gather_positions"]].double(), exact[1], rtol=0, atol=1e-4)
