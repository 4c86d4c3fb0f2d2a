"""Entities and answers in Chinese, Arabic and German, exact to the character, from files to predictions.

The texts hold what SentencePiece tokenizers treat in their own ways: no spaces between words, a space that is a piece
of its own before a character, characters that become several (ﻻ, ﬁ, …), other digits, soft hyphens, and special tokens
that are written in a text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.data.words import word_spans
from bert_tasks.tasks import SpanExtraction, TokenClassification
from support.small_checkpoints import save_checkpoint

TRAINING: dict[str, Any] = {"epochs": 80, "eval_steps": 80, "learning_rate": 5e-3, "batch_size": 8}
# Each text with its entities, and a question about one of them.
CASES: tuple[tuple[str, dict[str, str], str, str], ...] = (
    ("安格拉·默克尔星期二访问了北京大学。", {"安格拉·默克尔": "PER", "北京大学": "ORG"}, "她访问了哪里？", "北京大学"),
    ("北京 是中国的首都…", {"北京": "LOC", "中国": "LOC"}, "首都 是什么？", "北京"),
    ("长江全长约６３００公里。", {"长江": "LOC"}, "长江有多长？", "６３００公里"),
    (
        "زارت أنجيلا ميركل جامعة القاهرة.",
        {"أنجيلا ميركل": "PER", "جامعة القاهرة": "ORG"},
        "من زارت الجامعة؟",
        "أنجيلا ميركل",
    ),
    ("وُلد طه حسين في مصر، وﻻ يزال مشهورًا.", {"طه حسين": "PER", "مصر": "LOC"}, "أين وُلد؟", "مصر"),
    (
        "Frau Weiß fuhr über Nürnberg nach Köln.",
        {"Weiß": "PER", "Nürnberg": "LOC", "Köln": "LOC"},
        "Wohin fuhr sie?",
        "Köln",
    ),
    (
        "Die Universi\u00adtät Göttingen öﬀnet.",
        {"Universi\u00adtät Göttingen": "ORG"},
        "Was?",
        "Universi\u00adtät Göttingen",
    ),
    ("Der Text </s> von Müller<s> endet.", {"Müller": "PER"}, "Wer </s> schrieb?", "Müller"),
)


@pytest.fixture(scope="module")
def base(multilingual_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("xlm-roberta")
    save_checkpoint(folder, "xlm-roberta", multilingual_tokenizer, positions=128)
    return folder


def entity_rows() -> list[dict[str, Any]]:
    """Words as ``word_spans`` splits them, with tags of the entities."""
    rows = []
    for text, entities, _, _ in CASES:
        spans = word_spans(text)
        tags = ["O"] * len(spans)
        for entity, label in entities.items():
            start = text.index(entity)
            inside = [number for number, span in enumerate(spans) if start <= span[0] < start + len(entity)]
            assert (spans[inside[0]][0], spans[inside[-1]][1]) == (start, start + len(entity)), (
                "entities end with words"
            )
            tags[inside[0]] = f"B-{label}"
            for number in inside[1:]:
                tags[number] = f"I-{label}"
        rows.append({"words": [text[start:end] for start, end in spans], "tags": tags})
    return rows


def question_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": str(number),
            "question": question,
            "context": text,
            "answers": {"text": [answer], "answer_start": [text.index(answer)]},
        }
        for number, (text, _, question, answer) in enumerate(CASES)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.slow
def test_entities_of_texts_are_exact(base: Path, tmp_path: Path) -> None:
    """Trained on words, asked for texts: each entity has its label and its characters in the text."""
    rows = entity_rows()
    file = written(tmp_path / "rows.jsonl", rows)
    labels = ["O", *(f"{prefix}-{label}" for label in ("PER", "ORG", "LOC") for prefix in "BI")]
    model = TaskModel.from_pretrained(base, task=TokenClassification.of(labels=tuple(labels), max_length=96))
    fit(model, file, validation=file, output_dir=tmp_path / "run", **TRAINING)
    trained = TaskModel.from_pretrained(tmp_path / "run" / "model")
    assert evaluate(trained, file)["overall_f1"] == 1.0
    for (text, entities, _, _), prediction in zip(CASES, trained.predict([case[0] for case in CASES]), strict=True):
        assert {text[entity.start : entity.end]: entity.entity_group for entity in prediction.entities} == entities
        assert all(entity.word == text[entity.start : entity.end] for entity in prediction.entities)


@pytest.mark.slow
def test_answers_are_exact(base: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", question_rows())
    task = SpanExtraction.of(max_length=96, doc_stride=16, max_query_length=32, max_answer_length=40)
    model = TaskModel.from_pretrained(base, task=task)
    fit(model, file, validation=file, output_dir=tmp_path / "run", **TRAINING)
    trained = TaskModel.from_pretrained(tmp_path / "run" / "model")
    assert evaluate(trained, file)["exact_match"] == 100.0
    for row, prediction in zip(question_rows(), trained.predict(question_rows()), strict=True):
        assert (prediction.answer, prediction.start) == (row["answers"]["text"][0], row["answers"]["answer_start"][0])


@pytest.mark.parametrize("name", ["multilingual", "french", "deberta"])
def test_labelled_tokens_are_the_answer(name: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """The characters from the first to the last labelled token, for all answers and entities."""
    by_kind[name].save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, vocab_size=10_000)
    assert loaded is not None
    rows = question_rows()
    rows += [
        {**row, "answers": {"text": [entity], "answer_start": [case[0].index(entity)]}}
        for row, case in zip(question_rows(), CASES, strict=True)
        for entity in case[1]
    ]
    task = SpanExtraction.of(max_length=96, doc_stride=16, max_query_length=32)
    for row, feature in zip(rows, task.features(rows, loaded), strict=True):
        assert feature["offsets"] is not None
        assert feature["labels"] is not None
        first, last = map(int, feature["labels"])
        start, end = feature["offsets"][3 * first], feature["offsets"][3 * last + 1]
        assert row["context"][start:end] == row["answers"]["text"][0]
        assert loaded.convert_ids_to_tokens([feature["input_ids"][first]]) != ["▁"]
