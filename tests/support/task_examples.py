"""Small labelled rows for every task in ``TASKS``. A new task needs its entries in ``EXAMPLES`` and nothing else."""

from typing import Any

from bert_tasks.tasks import (
    MaskedLanguageModeling,
    MultipleChoice,
    PairClassification,
    ReplacedTokens,
    SequenceClassification,
    SpanExtraction,
    TokenClassification,
)
from support.task_contract import Example

TEXTS = (
    "the ferry leaves at seven",
    "nobody told the baker",
    "a cold wind brought rain",
    "bring your own cup",
    "the sound was terrible",
    "what a wonderful evening",
    "is this seat free",
    "prices rose last winter",
)
CLASSES = tuple({"text": text, "label": ("low", "mid", "high")[number % 3]} for number, text in enumerate(TEXTS))
SETS = tuple(
    {"text": text, "labels": [name for bit, name in enumerate(("x", "y", "z")) if number >> bit & 1]}
    for number, text in enumerate(TEXTS)
)
PAIRS = tuple(
    {"text": text, "text_pair": TEXTS[number // 2], "label": ("no", "yes")[number % 2]}
    for number, text in enumerate(TEXTS)
)
TAGS = {
    "ferry": "B-THING",
    "baker": "B-WHO",
    "cold": "B-THING",
    "wind": "I-THING",
    "cup": "B-THING",
    "sound": "B-THING",
}
SENTENCES = tuple({"words": text.split(), "tags": [TAGS.get(word, "O") for word in text.split()]} for text in TEXTS)
# Some rows have a question before their context.
GROUNDED = tuple(
    {**row, "context": f"{text} and so on", **({"question": "who or what"} if number % 2 else {})}
    for number, (row, text) in enumerate(zip(SENTENCES, TEXTS, strict=True))
)
QUESTIONS = tuple(
    {"id": str(number), "question": f"{text.split()[0]} what", "context": text, "answers": answers}
    for number, text in enumerate(TEXTS)
    for last in [text.split()[-1]]
    for answers in [{"text": [last], "answer_start": [text.index(last)]}]
)
SOME_WITHOUT_ANSWER = tuple(
    {**row, "answers": {"text": [], "answer_start": []}} if number % 3 == 0 else row
    for number, row in enumerate(QUESTIONS)
)
LABELS = ("O", "B-THING", "I-THING", "B-WHO", "I-WHO")
SPANS: dict[str, Any] = {"max_length": 32, "doc_stride": 6, "max_query_length": 8, "max_answer_length": 5}
NUMBERS = tuple({"text": text, "label": number / 4 - 1.0} for number, text in enumerate(TEXTS))
MASKED = tuple({"text": text.replace(text.split()[number % 3], "[MASK]")} for number, text in enumerate(TEXTS))
# Rows have two to four choices.
CHOICES = tuple(
    {
        "context": text,
        **({"question": "who or what"} if number % 2 else {}),
        "choices": [f"{word} {number}" for word in text.split()[: 2 + number % 3]],
        "label": number % 2,
    }
    for number, text in enumerate(TEXTS)
)
# Of tasks that models of one family have.
FAMILY_EXAMPLES = {
    "replaced": Example(
        task=ReplacedTokens.of(max_length=24), rows=tuple({"text": text} for text in TEXTS), column="text", windows=True
    )
}
EXAMPLES = {
    "single": Example(
        task=SequenceClassification.of(labels=("low", "mid", "high"), max_length=24), rows=CLASSES, column="text"
    ),
    "windows": Example(
        task=SequenceClassification.of(
            labels=("low", "mid", "high"),
            max_length=24,
            pooling="mean",
            long_texts="windows",
            doc_stride=6,
            class_weights=(0.5, 2.0, 1.0),
            focal_gamma=2.0,
        ),
        rows=CLASSES,
        column="text",
        windows=True,
    ),
    "several": Example(
        task=SequenceClassification.of(
            labels=("x", "y", "z"),
            max_length=24,
            problem_type="multi_label_classification",
            pooling="attention",
            focal_gamma=1.0,
        ),
        rows=SETS,
        column="text",
    ),
    "regression": Example(
        task=SequenceClassification.of(problem_type="regression", max_length=24), rows=NUMBERS, column="text"
    ),
    "token": Example(
        task=TokenClassification.of(
            labels=LABELS, max_length=24, doc_stride=6, class_weights=(0.5, 2.0, 1.0, 1.5, 1.0), focal_gamma=2.0
        ),
        rows=SENTENCES,
        column="words",
        windows=True,
    ),
    "token crf": Example(
        task=TokenClassification.of(labels=LABELS, max_length=24, doc_stride=6, crf=True),
        rows=SENTENCES,
        column="words",
        windows=True,
    ),
    "token context": Example(
        task=TokenClassification.of(labels=LABELS, max_length=24, doc_stride=6),
        rows=GROUNDED,
        column="words",
        windows=True,
    ),
    "span": Example(task=SpanExtraction.of(**SPANS), rows=QUESTIONS, column="context", windows=True),
    "span v2": Example(
        task=SpanExtraction.of(**SPANS, version_2_with_negative=True),
        rows=SOME_WITHOUT_ANSWER,
        column="context",
        windows=True,
    ),
    "masked": Example(task=MaskedLanguageModeling.of(max_length=24), rows=MASKED, column="text", windows=True),
    "pair": Example(task=PairClassification.of(labels=("no", "yes"), max_length=32), rows=PAIRS, column="text"),
    "choice": Example(
        task=MultipleChoice.of(max_length=32, focal_gamma=2.0), rows=CHOICES, column="context", sequences=2
    ),
    "pair regression": Example(
        task=PairClassification.of(problem_type="regression", max_length=32, pooling="mean"),
        rows=tuple({**row, "label": number / 4 - 1.0} for number, row in enumerate(PAIRS)),
        column="text_pair",
    ),
}
