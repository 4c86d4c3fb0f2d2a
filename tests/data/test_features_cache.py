"""Features are made once, kept, made anew when anything they depend on changes, and repaired when damaged."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.features import cached_features
from bert_tasks.data.rows import Rows

ROWS = [{"text": "a fine film"}, {"text": "dull"}, {"text": "so so, but long enough for a second window"}]
KEY = {"task": "test", "settings": {"max_length": 8}, "version": "1"}


@pytest.fixture
def tokenizer(wordpiece_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that a test may change."""
    return deepcopy(wordpiece_tokenizer)


class Maker:
    """Makes one feature a row, and a second one for a long row; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
        self.calls += 1
        features: list[dict[str, Any]] = []
        for number, row in enumerate(rows):
            ids = tokenizer(row["text"], add_special_tokens=False, truncation=False, padding=False)["input_ids"]
            for start in range(0, len(ids), 6):
                piece = ids[start : start + 6]
                features.append({"row": number, "input_ids": piece, "token_type_ids": [0] * len(piece)})
            if row["text"] == "dull":
                features[-1] |= {"labels": [1.0, 0.5], "lost_tokens": 3, "lost_answers": 2}
        return features


def keep(folder: Path, make: Maker, tokenizer: Any, table: Rows | None = None, **changes: Any) -> list[Any]:
    table = Rows.unchecked(ROWS) if table is None else table
    options = {"key": KEY, "cache_dir": folder, **changes}
    return list(cached_features(table, features=make, tokenizer=tokenizer, **options))


def test_features_are_numbered_over_batches(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    make = Maker()
    kept = keep(tmp_path, make, tokenizer, batch_size=2)
    assert make.calls == 2
    assert [feature["row"] for feature in kept] == [0, 1, 2, 2]
    assert kept[0]["input_ids"] == tokenizer("a fine film", add_special_tokens=False)["input_ids"]
    assert [feature["labels"] for feature in kept] == [None, [1.0, 0.5], None, None]
    assert [feature["lost_tokens"] for feature in kept] == [0, 3, 0, 0]
    assert kept[3]["token_type_ids"] == [0] * len(kept[3]["input_ids"])


def test_using_the_tokenizer_in_between_keeps_the_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    make = Maker()
    keep(tmp_path, make, tokenizer)
    tokenizer("some words", truncation=True, max_length=5, padding="max_length")
    keep(tmp_path, make, tokenizer)
    assert make.calls == 1


def test_what_features_depend_on_makes_them_anew(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    make = Maker()
    keep(tmp_path, make, tokenizer)
    keep(tmp_path, make, tokenizer, key=KEY | {"settings": {"max_length": 9}})
    keep(tmp_path, make, tokenizer, key=KEY | {"version": "2"})
    assert make.calls == 3
    keep(tmp_path, make, tokenizer, Rows.unchecked([*ROWS[:2], {"text": "changed"}]))
    keep(tmp_path, make, tokenizer, Rows.unchecked(ROWS).select([1, 0]))
    assert make.calls == 5
    tokenizer.add_tokens(["film"])
    keep(tmp_path, make, tokenizer)
    assert make.calls == 6
    tokenizer.add_special_tokens({"cls_token": "[UNK]"})
    keep(tmp_path, make, tokenizer)
    assert make.calls == 7


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "note cut", "note lies"])
def test_damage_is_repaired(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, damage: str) -> None:
    make = Maker()
    first = keep(tmp_path, make, tokenizer)
    (arrow,), (note,) = (list(tmp_path.rglob(pattern)) for pattern in ("*.arrow", "*.json"))
    data = arrow.read_bytes()
    middle = len(data) // 2
    new = {"cut": data[:-50], "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]}
    target = note if damage.startswith("note") else arrow
    told = note.read_bytes()
    new |= {"note cut": told[:20], "note lies": told.replace(b'"rows": 4', b'"rows": 5')}
    target.unlink()
    if damage in new:
        target.write_bytes(new[damage])
    assert keep(tmp_path, make, tokenizer) == first
    assert keep(tmp_path, make, tokenizer) == first
    assert make.calls == 2
    assert arrow.read_bytes() == data


def test_an_interrupted_run_leaves_no_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def stop(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_features(Rows.unchecked(ROWS), features=stop, tokenizer=tokenizer, key=KEY, cache_dir=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_rows_make_no_features(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    empty = Rows.unchecked(ROWS).select([])
    kept = cached_features(empty, features=Maker(), tokenizer=tokenizer, key=KEY, cache_dir=tmp_path)
    assert len(kept) == 0
    assert {"lost_tokens", "lost_answers"} <= set(kept.column_names)
