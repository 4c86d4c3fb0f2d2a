"""Which task ``init`` sees in tables with the columns that people have: one line for each kind of table."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.errors import DataError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import load_recipe

TEXTS = (
    "The room was clean but the street below never slept.",
    "Breakfast ended at nine, which nobody had told us.",
    "Our parcel arrived two days late and without its box.",
    "I would order the lentil soup again any time.",
    "The battery lasts a whole weekend of hiking.",
    "Nobody answered the phone for an hour.",
    "A quiet film with a surprising last scene.",
    "The zip broke after the second wash.",
    "Friendly staff, and the garden is lovely in May.",
    "You have to wait long for a table on Fridays.",
    "The manual is only available in Finnish.",
    "My daughter reads a chapter of it every night.",
    "It rattles when the lid is closed.",
    "The guide knew every bird by its song.",
    "They charged me twice for the same ticket.",
    "Cheap, light and surprisingly sturdy.",
    "The second half drags, although the music helps.",
    "I returned it because the colour was wrong.",
    "Parking is free after six in the evening.",
    "The cream is too sweet for my taste.",
)
OTHERS = (
    "Guests complained about the noise outside.",
    "We missed breakfast on the first day.",
    "The delivery was delayed.",
    "Lentil soup is on the menu.",
    "Charge it once and walk for two days.",
    "The call was answered at once.",
    "The ending of the film surprised me.",
    "The jacket is easy to clean.",
    "In spring the garden is in bloom.",
    "Tables are free at the weekend.",
    "There is a manual in English.",
    "It is a book for children.",
    "The lid makes no sound.",
    "We saw no birds on the tour.",
    "The ticket cost more than expected.",
    "It weighs very little.",
    "The concert was over after an hour.",
    "The colour is what I had hoped for.",
    "You pay for parking all day.",
    "The cake could have been sweeter.",
)
TITLES = ("Noisy nights", "No breakfast", "Late again", "Tasty", "Long walks", "No answer", "A surprise", "Broken zip")
QUESTIONS = tuple(f"What does guest {number} say about it?" for number in range(20))
MOODS, SOURCES = ("good", "bad", "bad"), ("web", "mail", "store", "phone")
FLAG, RARE, OTHER_FLAG = (0, 1, 1, 0, 0), (0, 0, 0, 0, 0, 0, 1), (1, 0)
WORDS = tuple(text.split() for text in TEXTS)
TAGS = tuple(["O"] * (len(words) - 1) + ["B-END"] for words in WORDS)
TAG_IDS = tuple([0] * (len(words) - 2) + [1, 2] for words in WORDS)
PASSAGES = tuple(f"{text} {other}" for text, other in zip(TEXTS, OTHERS, strict=True))
# The words at the end of a context answer its question. Each context also has other words that could be copied.
ANSWERS = tuple(" ".join(text.rstrip(".").split()[-3:]) for text in TEXTS)
ASPECTS = tuple(text.split()[1] for text in TEXTS)
OPINIONS = tuple(" ".join(text.split()[:2]) for text in TEXTS)
STARTS = tuple(text.index(answer) for text, answer in zip(TEXTS, ANSWERS, strict=True))
SQUAD = tuple({"text": [answer], "answer_start": [start]} for answer, start in zip(ANSWERS, STARTS, strict=True))
INDICES = tuple(f"({start}, {start + len(answer)})" for start, answer in zip(STARTS, ANSWERS, strict=True))
CHOICES = tuple([title, TITLES[-1 - number], "Nothing at all"] for number, title in enumerate(TITLES))
DATES = tuple(f"2024-0{number % 9 + 1}-1{number % 10}" for number in range(20))
URLS = tuple(f"https://example.org/reviews/{number}" for number in range(20))
SPLITS = (*("train",) * 14, *("dev",) * 3, *("test",) * 3)

Rows = Sequence[Mapping[str, Any]]


def table(count: int = 20, /, **columns: Iterable[Any]) -> Rows:
    """Returns rows whose columns repeat their values."""
    cells = {name: tuple(islice(cycle(values), count)) for name, values in columns.items()}
    return [{name: values[row] for name, values in cells.items()} for row in range(count)]


def write(rows: Rows, folder: Path) -> Path:
    if any(isinstance(cell, list | dict) for row in rows for cell in row.values()):
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return path
    path = folder / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


_OUTPUTS = {
    "single_label_classification": "class",
    "multi_label_classification": "labels",
    "regression": "number",
    "token-classification": "tags",
    "span-extraction": "span",
    "multiple-choice": "choice",
    "masked-language-modeling": "corpus",
}


def reading(draft: RecipeDraft) -> str:
    """Returns the reading of a file in a line, such as ``class: text=review label=stars``. ? marks a tie."""
    guess = draft
    output = _OUTPUTS[guess.settings.get("problem_type", guess.task)]
    doubt = "?" if guess.alternatives else ""
    columns = " ".join(f"{task}={name}" for task, name in guess.columns.items())
    split = "" if draft.spec.split_column is None else f" split={draft.spec.split_column}"
    return f"{output}{doubt}: {columns}{split}"


# name -> rows, and the reading
READ: Mapping[str, tuple[Rows, str]] = {
    # A text and a class
    "plain": (table(text=TEXTS, label=MOODS), "class: text=text label=label"),
    "id": (table(id=range(20), text=TEXTS, label=MOODS), "class: text=text label=label"),
    "id at the end": (table(text=TEXTS, label=MOODS, id=range(500, 520)), "class: text=text label=label"),
    "id of text": (
        table(uid=(f"r-{n}" for n in range(20)), text=TEXTS, label=MOODS),
        "class: text=text label=label",
    ),
    "source": (table(id=range(20), text=TEXTS, source=SOURCES, label=MOODS), "class: text=text label=label"),
    "source behind": (table(text=TEXTS, label=MOODS, source=SOURCES), "class: text=text label=label"),
    "unnamed label": (table(review=TEXTS, mood=MOODS), "class: text=review label=mood"),
    "two unnamed": (table(review=TEXTS, mood=MOODS, shop=SOURCES), "class?: text=review label=shop"),
    "tickets": (table(body=TEXTS, language=SOURCES, queue=MOODS), "class: text=body label=queue"),
    "two named": (table(text=TEXTS, intent=SOURCES, sentiment=MOODS), "class?: text=text label=sentiment"),
    "German": (table(Bewertung=TEXTS, Klasse=("gut", "schlecht")), "class: text=Bewertung label=Klasse"),
    "Greek": (table(κείμενο=TEXTS, ετικέτα=("καλό", "κακό")), "class: text=κείμενο label=ετικέτα"),
    "Chinese": (
        table(文本=("房间很干净", "早餐太少了", "服务员很热情", "包裹迟到了"), 标签=("好", "坏")),
        "class: text=文本 label=标签",
    ),
    "many classes": (
        table(2000, text=(f"{text} {n}" for n in range(100) for text in TEXTS), intent=(f"i{n}" for n in range(500))),
        "class: text=text label=intent",
    ),
    "capitals": (table(ID=range(20), Text=TEXTS, Label=MOODS), "class: text=Text label=Label"),
    "pandas index": (table(**{"Unnamed: 0": range(20)}, text=TEXTS, label=MOODS), "class: text=text label=label"),
    "True and False": (table(text=TEXTS, spam=(True, False, False)), "class: text=text label=spam"),
    "yes and no": (table(text=TEXTS, answered=("yes", "no", "no")), "class: text=text label=answered"),
    "0 and 1": (table(text=TEXTS, label=FLAG), "class: text=text label=label"),
    "-1 and 1": (table(text=TEXTS, label=(-1, 1)), "class: text=text label=label"),
    "-1, 0 and 1": (table(text=TEXTS, sentiment=(-1, 0, 1)), "class?: text=text label=sentiment"),
    "plus and minus": (table(text=TEXTS, label=("+", "-")), "class: text=text label=label"),
    "stars": (table(review=TEXTS, stars=(5, 1, 4, 2, 3)), "class?: text=review label=stars"),
    "missing labels": (table(text=TEXTS, label=("good", "bad", "", "bad")), "class: text=text label=label"),
    "a label and a flag": (
        table(text=TEXTS, label=MOODS, is_reply=FLAG, is_verified=OTHER_FLAG),
        "class: text=text label=label",
    ),
    "two named, one of them label": (
        table(text=TEXTS, sentiment=MOODS, label=SOURCES),
        "class: text=text label=label",
    ),
    "long names of sources": (
        table(id=range(20), text=TEXTS, source=("The Daily Harbour News", "Letters to the editor"), label=MOODS),
        "class: text=text label=label",
    ),
    "texts called links": (table(link=TEXTS, mood=MOODS), "class: text=link label=mood"),
    "amounts from 0": (table(text=TEXTS, user_rating=(0, 4, 1, 3, 2)), "class?: text=text label=user_rating"),
    "a label and all labels": (
        table(text=TEXTS, label=MOODS, labels=tuple([m] for m in MOODS)),
        "class: text=text label=label",
    ),
    # Labels beside columns that fit each other
    "a name in the text and a label": (
        table(headline=QUESTIONS, person=ASPECTS, text=PASSAGES, label=MOODS),
        "span?: question=headline context=text answers=person",
    ),
    "tagged words and a class of the text": (
        table(text=TEXTS, tokens=WORDS, pos=TAGS, sentiment=MOODS),
        "tags?: words=tokens tags=pos",
    ),
    "tags beside a sentence": (
        table(Sentence=TEXTS, Tag=tuple(str(tags) for tags in TAGS)),
        "tags: words=Sentence tags=Tag",
    ),
    "empty lists": (table(text=TEXTS, label=MOODS, Comments=([],)), "class: text=text label=label"),
    "a constant answer": (table(text=TEXTS, answer=("accept",), label=MOODS), "class: text=text label=label"),
    "a label of one value": (table(text=TEXTS, label=("spam",), source=SOURCES), "class?: text=text label=source"),
    # Columns that are no label
    "date": (table(date=DATES, text=TEXTS, label=MOODS), "class: text=text label=label"),
    "days that repeat": (table(text=TEXTS, mood=MOODS, day=DATES[:4]), "class: text=text label=mood"),
    "times with a zone": (
        table(text=TEXTS, mood=MOODS, created=(f"{day} 11:35:{n:02} -0800" for n, day in enumerate(DATES))),
        "class: text=text label=mood",
    ),
    "times in words": (
        table(text=TEXTS, mood=MOODS, posted=(f"Mon Apr 06 22:19:{n:02} PDT 2009" for n in range(10, 30))),
        "class: text=text label=mood",
    ),
    "a name that ends as labels do": (
        table(tweet=TEXTS, airline_sentiment=MOODS, airline=SOURCES, confidence=(0.35, 1.0, 0.66), retweets=FLAG),
        "class: text=tweet label=airline_sentiment",
    ),
    "stars beside a category": (
        table(review=TEXTS, stars=(5, 1, 4, 2, 3), product_category=SOURCES),
        "class?: text=review label=stars",
    ),
    "time": (
        table(text=TEXTS, mood=MOODS, timestamp=(1717000000 + n // 2 for n in range(20))),
        "class: text=text label=mood",
    ),
    "constant": (table(text=TEXTS, mood=MOODS, language=("en",)), "class: text=text label=mood"),
    "users": (table(text=TEXTS, mood=MOODS, user_id=(1001, 1002, 1003)), "class: text=text label=mood"),
    "users in words": (table(text=TEXTS, mood=MOODS, userId=("anna", "otto", "ida")), "class: text=text label=mood"),
    "urls": (table(text=TEXTS, mood=MOODS, link=URLS[:5]), "class: text=text label=mood"),
    "id of the class": (table(text=TEXTS, label_id=(0, 1, 2, 1)), "class: text=text label=label_id"),
    "folds": (table(text=TEXTS, mood=MOODS, fold=(0, 1, 2, 3, 4)), "class: text=text label=mood"),
    # Texts alone
    "text alone": (table(text=TEXTS), "corpus: text=text"),
    "text and date": (table(text=TEXTS, date=DATES[:6]), "corpus: text=text"),
    "text, url and date": (table(text=TEXTS, url=URLS, date=DATES), "corpus: text=text"),
    "text and id": (table(doc_id=(f"d{n}" for n in range(20)), text=TEXTS, lang=("en",)), "corpus: text=text"),
    # Numbers
    "scores": (table(text=TEXTS, score=(0.25, 1.5, 3.75, 2.2, 4.9, 0.1, 3.3)), "number: text=text label=score"),
    "prices": (
        table(text=TEXTS, price=(n * n + 17 for n in (*range(15), *range(5)))),
        "number: text=text label=price",
    ),
    "STS": (
        table(sentence1=TEXTS, sentence2=OTHERS, score=(5.0, 3.8, 0.4, 2.6, 1.25)),
        "number: text=sentence1 text_pair=sentence2 label=score",
    ),
    # Several labels
    "flags": (table(comment=TEXTS, toxic=FLAG, insult=RARE), "labels: text=comment labels=toxic,insult"),
    "Jigsaw": (
        table(
            id=(f"{n:016x}" for n in range(20)),
            comment_text=TEXTS,
            toxic=FLAG,
            severe_toxic=RARE,
            obscene=OTHER_FLAG,
            threat=(0, 0, 0, 1),
            insult=(0, 1),
            identity_hate=(0, 0, 0, 0, 0, 1),
        ),
        "labels: text=comment_text labels=toxic,severe_toxic,obscene,threat,insult,identity_hate",
    ),
    "flags and a source": (
        table(text=TEXTS, urgent=FLAG, source=SOURCES, spam=OTHER_FLAG),
        "labels?: text=text labels=urgent,spam",
    ),
    "one-hot": (
        table(text=TEXTS, sport=(1, 0, 0), politics=(0, 1, 0), music=(0, 0, 1)),
        "labels: text=text labels=sport,politics,music",
    ),
    "flags True and False": (
        table(text=TEXTS, rude=(True, False), loud=(False, False, True)),
        "labels: text=text labels=rude,loud",
    ),
    "a|b|c": (table(text=TEXTS, topics=("a|b", "b", "c|a|b", "", "c")), "labels: text=text labels=topics"),
    "a;b": (table(text=TEXTS, topics=("tax; rent", "rent", "tax", "water;tax")), "labels: text=text labels=topics"),
    "a, b": (table(text=TEXTS, tags=("tax, rent", "rent", "tax", "water, tax")), "labels?: text=text labels=tags"),
    "JSON in cells": (
        table(text=TEXTS, topics=('["tax"]', '["rent", "tax"]', "[]", '["rent"]')),
        "labels: text=text labels=topics",
    ),
    "lists": (table(text=TEXTS, labels=([0], [1, 2], [2], [0, 2])), "labels: text=text labels=labels"),
    "lists of one": (table(text=TEXTS, labels=(["joy"], ["fear"], ["calm"])), "class: text=text label=labels"),
    "lists of one in cells": (table(text=TEXTS, labels=("[0]", "[2]", "[1]")), "class: text=text label=labels"),
    # Two texts
    "NLI": (
        table(premise=TEXTS, hypothesis=OTHERS, label=("neutral", "entailment", "contradiction")),
        "class: text=premise text_pair=hypothesis label=label",
    ),
    "SNLI": (
        table(
            sentence1=TEXTS,
            sentence2=OTHERS,
            gold_label=("neutral", "entailment", "contradiction", "-"),
            pairID=(f"{n}#1r1n" for n in range(20)),
        ),
        "class: text=sentence1 text_pair=sentence2 label=gold_label",
    ),
    "MultiNLI": (
        table(promptID=range(20), premise=TEXTS, hypothesis=OTHERS, genre=SOURCES, label=(0, 1, 2, 1, -1)),
        "class: text=premise text_pair=hypothesis label=label",
    ),
    "MultiNLI of pandas": (
        table(premise=TEXTS, hypothesis=OTHERS, label=("0.0", "1.0", "2.0", "1.0", "-1.0")),
        "class: text=premise text_pair=hypothesis label=label",
    ),
    "NLI the other way round": (
        table(hypothesis=OTHERS, premise=TEXTS, label=("neutral", "entailment", "contradiction")),
        "class: text=premise text_pair=hypothesis label=label",
    ),
    "duplicates": (
        table(id=range(20), qid1=range(20), qid2=range(20, 40), question1=TEXTS, question2=OTHERS, is_duplicate=FLAG),
        "class: text=question1 text_pair=question2 label=is_duplicate",
    ),
    "title and body": (
        table(title=(f"About {other.lower()}" for other in OTHERS), body=TEXTS, label=MOODS),
        "class?: text=title text_pair=body label=label",
    ),
    "queries with several documents": (
        table(query=("cold soup", "broken zip"), document=TEXTS, relevance=(2, 0, 1)),
        "class: text=query text_pair=document label=relevance",
    ),
    "few second texts": (
        table(text=TEXTS, text_pair=OTHERS[:4], label=MOODS),
        "class: text=text text_pair=text_pair label=label",
    ),
    "two texts": (table(text=TEXTS, remark=OTHERS, label=MOODS), "class?: text=text text_pair=remark label=label"),
    # Questions, choices, tags
    "SQuAD": (
        table(id=(f"q{n}" for n in range(20)), question=QUESTIONS, context=PASSAGES, answers=SQUAD),
        "span: question=question context=context answers=answers",
    ),
    "answer texts": (
        table(question=QUESTIONS, context=PASSAGES, answer=ANSWERS),
        "span: question=question context=context answers=answer",
    ),
    "SubjQA": (
        table(
            item_id=(f"B{n:05}" for n in range(20)),
            domain=("hotels",),
            query_mod=OPINIONS,
            query_asp=ASPECTS,
            question=QUESTIONS,
            review=PASSAGES,
            human_ans_spans=ANSWERS,
            human_ans_indices=INDICES,
        ),
        "span: question=question context=review answers=human_ans_spans",
    ),
    "opinions": (
        table(question=QUESTIONS, review=PASSAGES, opinion=OPINIONS, answer_span=ANSWERS, start=STARTS),
        "span: question=question context=review answers=answer_span",
    ),
    "spans by position": (
        table(asked=QUESTIONS, review=PASSAGES, target=ASPECTS, copied=ANSWERS, begin=STARTS),
        "span?: question=asked context=review answers=target",
    ),
    "RACE": (
        table(article=PASSAGES, question=QUESTIONS, options=CHOICES, answer=("A", "C", "B")),
        "choice: context=article question=question choices=options label=answer",
    ),
    "letters": (
        table(question=QUESTIONS, A=OTHERS, B=TITLES, C=TEXTS, answer=("A", "C", "B")),
        "choice: context=question choices=A,B,C label=answer",
    ),
    "four texts": (
        table(one=TEXTS, two=OTHERS, three=TEXTS[1:], four=OTHERS[1:], mood=MOODS),
        "class?: text=one text_pair=three label=mood",
    ),
    "SWAG": (
        table(
            sent1=TEXTS,
            sent2=("Then the guest", "After that they"),
            ending0=OTHERS,
            ending1=TITLES,
            ending2=OTHERS[1:],
            label=(0, 2, 1),
        ),
        "choice: context=sent1 question=sent2 choices=ending label=label",
    ),
    "tokens and tags": (table(tokens=WORDS, ner_tags=TAGS), "tags: words=tokens tags=ner_tags"),
    "tokens and tags with ids": (
        table(id=(str(n) for n in range(20)), tokens=WORDS, tags=TAGS),
        "tags: words=tokens tags=tags",
    ),
    "tokens with one broken row": (
        [*table(tokens=WORDS, ner_tags=TAGS), {"tokens": ["a", "b"], "ner_tags": ["O"]}],
        "tags: words=tokens tags=ner_tags",
    ),
    "intent and slots": (table(tokens=WORDS, slots=TAGS, intent=SOURCES), "tags: words=tokens tags=slots"),
    # Splits
    "split": (table(text=TEXTS, label=MOODS, split=SPLITS), "class: text=text label=label split=split"),
    "set": (
        table(text=TEXTS, mood=MOODS, set=("Training", "Training", "Training", "Validation")),
        "class: text=text label=mood split=set",
    ),
    "no validation rows": (
        table(text=TEXTS, mood=MOODS, Partition=("train", "train", "test")),
        "class: text=text label=mood split=Partition",
    ),
    "a corpus in splits": (table(text=TEXTS, split=SPLITS), "corpus: text=text split=split"),
    "flags in splits": (
        table(text=TEXTS, rude=OTHER_FLAG, loud=FLAG, subset=SPLITS),
        "labels: text=text labels=rude,loud split=subset",
    ),
    "a split of other things": (table(text=TEXTS, label=MOODS, split=("even", "odd")), "class: text=text label=label"),
}

# name -> rows, and words of the refusal
REFUSED: Mapping[str, tuple[Rows, Sequence[str]]] = {
    "no text": (table(width=range(20), height=(n * n / 7 for n in range(20))), ("no column of texts", "'width'")),
    "nothing to learn": (table(text=TEXTS, more=OTHERS), ("no column to learn", "--label")),
    "ids and classes": (table(id=(f"a{n}" for n in range(20)), label=MOODS), ("no column of texts", "'id'")),
    "tags of numbers": (
        table(tokens=WORDS, ner_tags=TAG_IDS),
        ("'ner_tags'", "numbers from 0 to 2", "names", "--label ner_tags"),
    ),
    "no training rows": (table(text=TEXTS, label=MOODS, split=("test", "dev")), ("no training rows", "'split'")),
}


@pytest.mark.parametrize("name", READ)
def test_reading(name: str, tmp_path: Path, base: str) -> None:
    rows, expected = READ[name]
    draft = init_recipe(write(rows, tmp_path), output=tmp_path / "recipe.toml", model=base)
    assert reading(draft) == expected
    check(load_recipe(draft.path))


@pytest.mark.parametrize(
    ("name", "labels", "rows"),
    [
        ("SNLI", ("contradiction", "entailment", "neutral"), 15),
        ("MultiNLI", ("0", "1", "2"), 16),
        ("MultiNLI of pandas", ("0", "1", "2"), 16),
        ("-1 and 1", ("-1", "1"), 20),
        ("-1, 0 and 1", ("-1", "0", "1"), 20),
        ("plus and minus", ("+", "-"), 20),
        ("lists of one in cells", ("0", "1", "2"), 20),
        ("missing labels", ("bad", "good"), 15),
    ],
)
def test_labels_of_the_rows_that_have_one(
    name: str, labels: tuple[str, ...], rows: int, tmp_path: Path, base: str
) -> None:
    draft = init_recipe(write(READ[name][0], tmp_path), output=tmp_path / "recipe.toml", model=base)
    splits = check(load_recipe(draft.path)).splits
    assert draft.labels == labels
    assert all(tuple(split.label_counts) == tuple(sorted(labels, key=_number_or_name)) for split in splits)
    assert sum(split.rows for split in splits) == rows
    assert draft.left_out == 20 - rows
    assert any("says that a row has no label" in reason for reason in draft.reasons) == ("NLI" in name)


def test_several_files_are_not_divided(tmp_path: Path, base: str) -> None:
    write(READ["split"][0], tmp_path).rename(tmp_path / "a.csv")
    write(READ["split"][0], tmp_path).rename(tmp_path / "b.csv")
    draft = init_recipe(tmp_path / "*.csv", output=tmp_path / "recipe.toml", model=base)
    assert draft.spec.split_column is None
    assert [note for note in draft.reasons if "the column 'split' divides the rows" in note]


def _number_or_name(label: str) -> tuple[float, str]:
    return (float(label), "") if label.removeprefix("-").isdecimal() else (0.0, label)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name: str, tmp_path: Path, base: str) -> None:
    rows, words = REFUSED[name]
    with pytest.raises(DataError) as refused:
        init_recipe(write(rows, tmp_path), output=tmp_path / "recipe.toml", model=base)
    for word in words:
        assert word in str(refused.value)


def test_of_many_readings_the_first_are_shown(tmp_path: Path, base: str) -> None:
    columns = {f"text {name}": TEXTS for name in "abcdef"}
    rows = table(**columns, mood=MOODS, shop=SOURCES)
    draft = init_recipe(write(rows, tmp_path), output=tmp_path / "recipe.toml", model=base)
    assert len(draft.alternatives) == 9
    assert draft.alternatives[-1].endswith(" more")


def test_a_question_beside_the_context_of_choices_may_have_any_name(tmp_path: Path, base: str) -> None:
    rows = table(story=PASSAGES, asked=QUESTIONS, options=CHOICES, answer=(0, 2, 1))
    draft = init_recipe(write(rows, tmp_path), output=tmp_path / "recipe.toml", model=base, text=["story", "asked"])
    assert reading(draft) == "choice: context=story question=asked choices=options label=answer"
    check(load_recipe(draft.path))


def test_a_task_that_fits_in_too_few_rows_is_an_alternative(tmp_path: Path, base: str) -> None:
    """Answers that repeat may also be classes of pairs, so ``train FILE`` must not train these without a question."""
    answers = [answer if number % 5 else "none of it" for number, answer in enumerate(ANSWERS[:7])]
    rows = table(60, question=QUESTIONS, context=[f"{p} {n}" for n, p in enumerate(PASSAGES[:7] * 9)], answer=answers)
    draft = init_recipe(write(rows, tmp_path), output=tmp_path / "recipe.toml", model=base)
    assert draft.task == "pair-classification"
    assert any("span-extraction" in other and "--task" in other for other in draft.alternatives)
