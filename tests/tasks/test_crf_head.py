"""Token classification with a CRF: what no step allows is never said, sequences are learnt, folders keep it all."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from bert_tasks.data.conll import forbidden_steps, invalid_transitions, label_scheme
from bert_tasks.encoder.crf import best_labels, log_likelihood, marginals
from bert_tasks.encoder.packing import pack
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.token_classification import TokenClassification
from support.small_tokenizers import LINES
from support.taggers import save_tagger

LABELS = ("O", "B-A", "I-A", "B-B", "I-B")
TASK = TokenClassification.of(labels=LABELS, max_length=40, doc_stride=6, crf=True)
PLAIN = TokenClassification.of(labels=LABELS, max_length=40, doc_stride=6)


@pytest.fixture(scope="module")
def checkpoint(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tagger(tmp_path_factory.mktemp("tagger"), bpe_tokenizer, LABELS)


def chain_model(checkpoint: Path) -> TaskModel:
    """Transitions are drawn, so that they count."""
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(checkpoint, task=TASK)
    with torch.no_grad():
        model.head.transitions.normal_(std=2.0)
    return model


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TaskModel:
    return chain_model(checkpoint)


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        ("I-A", "O", "B-A"),
        ("O", "I-A", "I-B", "B-B"),
        ("O", "B-A", "I-A", "E-A", "S-A", "S-B"),
        ("U-A", "L-A", "I-A", "B-A", "O"),
        ("NOUN", "B-A", "O"),
    ],
)
def test_forbidden_steps_are_those_that_make_a_sentence_invalid(labels: tuple[str, ...]) -> None:
    table, scheme = torch.tensor(forbidden_steps(labels)), label_scheme(labels)
    assert table.shape == (len(labels) + 2, len(labels))
    for length in (1, 2, 3):
        for path in product(range(len(labels)), repeat=length):
            rows = [0, *[label + 1 for label in path[:-1]]]
            faults = sum(bool(table[row, label]) for row, label in zip(rows, path, strict=True))
            faults += bool(table[-1, path[-1]])
            assert (faults > 0) == (invalid_transitions([labels[i] for i in path], scheme) > 0), path


def test_loss_is_that_of_each_window_as_a_chain() -> None:
    counts, labelled = (2, 0, 3, 1), [[1, 2], [], [], [4]]
    ids = [[5] * (count + 2) for count in counts]
    words = [range(1, count + 1) for count in counts]
    batch = pack(ids, ids, position_offset=0, labels=labelled, gather_positions=words)
    logits = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (loss,) = TASK.output.loss(logits, batch)
    chains = [(logits[:2], [1, 2]), (logits[5:], [4])]
    expected = -sum(
        float(log_likelihood(sequence_logits, torch.tensor(path), [len(path)])) for sequence_logits, path in chains
    )
    assert loss.total.item() == pytest.approx(expected, rel=1e-12)
    assert loss.count == 3
    (nothing,) = TASK.output.loss(logits, pack(ids, ids, position_offset=0, gather_positions=words))
    assert (nothing.total.item(), nothing.count.item()) == (0.0, 0.0)


def chain_logits(words: int) -> Tensor:
    """As the head makes them."""
    generator = torch.Generator().manual_seed(words)
    transitions = 2 * torch.randn(7, 5, generator=generator)
    emissions = torch.randn(words, 1, 5, generator=generator)
    return torch.cat([emissions + transitions[:-1], transitions[-1:].expand(words, 1, 5)], dim=1)


def test_windows_of_a_row_are_decoded_as_one_chain(
    monkeypatch: pytest.MonkeyPatch, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    """However many rows are computed at once."""
    sizes, rows = (3, 2, 0, 4, 1), (0, 0, 1, 2, 2)
    logits = chain_logits(sum(sizes))
    features = [
        Feature(row=row, input_ids=[], token_type_ids=[], gather_positions=[0] * size, word_ids=[0] * size)
        for row, size in zip(rows, sizes, strict=True)
    ]
    summaries = TASK.output.compact(logits.split(list(sizes)), features)
    words = [{"words": ["w"] * count} for count in (5, 0, 5)]
    predictions = TASK.output.decode(summaries, features, words, bpe_tokenizer)
    allowed = logits - 1e4 * torch.tensor(forbidden_steps(LABELS))
    best = best_labels(allowed, [5, 5])
    assert [tag for prediction in predictions for tag in prediction.tags] == [LABELS[index] for index in best.tolist()]
    scores = marginals(allowed, [5, 5]).gather(1, best[:, None]).flatten().tolist()
    assert [score for prediction in predictions for score in prediction.scores] == pytest.approx(scores, abs=1e-5)
    monkeypatch.setattr("bert_tasks.outputs.tags._CRF_SCORES", 36)
    blocks = TASK.output.decode(summaries, features, words, bpe_tokenizer)
    assert [prediction.tags for prediction in blocks] == [prediction.tags for prediction in predictions]
    assert [score for prediction in blocks for score in prediction.scores] == pytest.approx(scores, abs=1e-5)
    first_row: Feature = {**features[2], "row": 0}
    (wordless,) = TASK.output.decode(summaries[2:3], [first_row], words[1:2], bpe_tokenizer)
    assert wordless.tags == ()


def test_steps_that_the_scheme_forbids_are_never_predicted(model: TaskModel, checkpoint: Path) -> None:
    rows = [{"words": line.split()} for line in [*LINES, " ".join(LINES[:4])]]
    faults = [
        sum(invalid_transitions(prediction.tags) for prediction in tagger.predict(rows))
        for tagger in (model, TaskModel.from_pretrained(checkpoint, task=PLAIN))
    ]
    assert faults[0] == 0 < faults[1]
    assert all(0 < score <= 1 + 1e-5 for prediction in model.predict(rows) for score in prediction.scores)


def test_whole_sequences_are_learnt_where_words_alone_mislead(
    checkpoint: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    """One sentence with three tag sequences: the best tag of each word, taken alone, is in none of them."""
    shares = {("B-A", "O"): 5, ("B-A", "I-A"): 5, ("B-B", "I-B"): 8, ("O", "O"): 1}
    rows = [{"words": ["the", "ferry"], "tags": list(tags)} for tags, count in shares.items() for _ in range(count)]
    predicted = {}
    for task in (TASK, PLAIN):
        torch.manual_seed(0)
        learner = TaskModel.from_pretrained(checkpoint, task=task)
        batch = collate(task.features(rows, bpe_tokenizer), position_offset=learner.config.position_offset)
        learner.encoder.requires_grad_(False)
        optimizer = torch.optim.AdamW(learner.head.parameters(), lr=0.1, weight_decay=0.0)
        for _ in range(80):
            (loss,) = task.output.loss(learner(batch), batch)
            optimizer.zero_grad()
            (loss.total / loss.count).backward()
            optimizer.step()
        (answer,) = learner.predict(rows[:1])
        predicted[task.output.crf] = answer
    assert predicted[False].tags == ("B-A", "I-B")
    assert predicted[True].tags == ("B-B", "I-B")
    assert predicted[True].scores == pytest.approx((8 / 19, 8 / 19), abs=0.05)


def test_stock_transformers_gives_the_emissions(model: TaskModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    stock = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    assert model.tokenizer is not None
    batch = model.tokenizer(LINES[:3], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = stock(**batch).logits
        ours = model(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    real = batch["attention_mask"].bool()
    assert ours.shape == theirs.shape
    assert float((ours - theirs)[real].abs().max()) < 5e-5
