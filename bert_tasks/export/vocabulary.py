"""Saves a model without the pieces of its vocabulary that do not occur in some texts.

Most rows of a multilingual table of word embeddings are of languages that a user never reads (Abdaoui et al. 2020,
"Load What You Need", https://arxiv.org/abs/2010.05609). The rows that stay keep their weights and their order.

The texts keep their tokens, because a tokenizer does not miss the candidates that it did not choose. WordPiece takes
the longest piece that fits. BPE applies the merge of the lowest rank, and all merges on the way to a kept piece stay.
Unigram takes the pieces with the best sum of scores. An unknown character costs a fixed amount more than the piece
with the lowest score (tokenizers, ``models/unigram/model.rs``), so this piece stays.
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from bert_tasks.data.columns import Row
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import valid_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.families import config_of_kept_ids
from bert_tasks.model.encoder_with_heads import check_parameters
from bert_tasks.model.inputs import Data, load_table, load_trained, reading_for_prediction
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import features_of, forward_windows
from bert_tasks.tasks.features import checked_features

_UNLIMITED = 2**31 - 1  # tokens of a text
_ROWS = 200  # that are tokenized at once, and whose logits are compared


def save_with_vocabulary(
    model: TaskModel, texts: Data | Sequence[Path], folder: Path, reading: ReadOptions
) -> dict[str, Any]:
    """Saves a model with the vocabulary of some texts, and compares what is saved with the model. See ``export``.

    Raises:
        DataError: A row cannot be used, or there is none.
        CheckpointError: A row has other tokens or logits than before, or the folder cannot be written.
    """
    check_parameters(model)
    sources: Sequence[Any] = [texts]
    if isinstance(texts, list | tuple) and texts and all(isinstance(item, Path) for item in texts):
        sources = texts  # several files
    tables = []
    for data in sources:
        options = reading_for_prediction(model, data, reading)
        tables.append(load_table(data, model.row_columns, names=model.columns, reading=options, labels="unread"))
    table = Rows.joined(tables)
    if len(table) == 0:
        raise DataError("there is no row whose pieces could be the vocabulary. Pass files with texts")

    def chunks() -> Iterator[list[Row]]:
        rows = valid_rows(table, model.input_columns)
        while chunk := list(islice(rows, _ROWS)):
            yield chunk

    new_ids = _new_ids(model, chunks())
    _smaller_model(model, new_ids).save_pretrained(folder)
    _renumber_tokenizer(folder / "tokenizer.json", model.require_tokenizer().get_vocab(), new_ids)
    saved = load_trained(folder, task=type(model.task), settings=None, revision=None, reading=reading).one_task()
    _check_tokens(model, saved, new_ids, chunks())
    if not model.head.reads_embeddings:  # or the logits are those of pieces
        _check_logits(model, saved, next(chunks()))
    sizes: dict[str, dict[str, float]] = {}
    for when, measured in (("before", model), ("after", saved)):
        size = sum(parameter.nbytes for parameter in measured.parameters())
        sizes[when] = {"pieces": measured.config.vocab_size, "mib": size / 2**20}
    return {"rows": len(table), **sizes}


def _new_ids(model: TaskModel, chunks: Iterable[list[Row]]) -> dict[int, int]:
    """Returns the ids of the pieces that stay, in ascending order, with their new ids."""
    tokenizer = model.require_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    # What is behind the end of a truncated text decides which text of a pair is truncated, so texts are read whole.
    task = model.task.with_settings(max_length=_UNLIMITED)
    used = set[int]()
    for rows in chunks:
        for feature in checked_features(task, rows, tokenizer, model.config):
            used.update(feature["input_ids"])
    kept = {*tokenizer.all_special_ids, *(token["id"] for token in content["added_tokens"]), model.config.pad_token_id}
    vocabulary, settings = tokenizer.get_vocab(), content["model"]
    pieces = {piece for piece, number in vocabulary.items() if number in used - kept}
    if settings["type"] == "BPE":
        pieces |= _merged_pieces(pieces, settings["merges"])
    elif settings["type"] == "Unigram":
        pieces.add(min(settings["vocab"], key=lambda entry: entry[1])[0])
    pieces |= _fallback(pieces, vocabulary)
    kept.update(vocabulary[piece] for piece in pieces if piece in vocabulary)
    # Unigram names the piece for unknown characters by its id, the other types by its text. Some name none.
    for unknown in (settings.get("unk_id"), vocabulary.get(settings.get("unk_token"))):
        if unknown is not None:
            kept.add(unknown)
    # The positions of RoBERTa begin behind the id of padding, so all ids up to this one stay the same.
    kept.update(range(model.config.position_offset))
    return {number: place for place, number in enumerate(sorted(kept))}


def _merged_pieces(pieces: Iterable[str], merges: Sequence[Sequence[str]]) -> set[str]:
    """Returns the pieces that BPE makes on the way from characters to these pieces."""
    ranks = {(left, right): rank for rank, (left, right) in enumerate(merges)}
    made = set[str]()
    for piece in pieces:
        parts = list(piece)
        made.update(parts)
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, inf))
            if best not in ranks:  # the piece is found as a whole, for example the token of a byte
                break
            place = pairs.index(best)
            parts[place : place + 2] = ["".join(best)]
            made.add(parts[place])
    return made


def _fallback(pieces: Iterable[str], vocabulary: Iterable[str]) -> set[str]:
    """Returns the pieces that other texts are made of: bytes, and the characters of the scripts of ``pieces``."""
    scripts = {"", *map(_script, "".join(pieces))}
    bytes_and_latin = set(ByteLevel.alphabet())  # the characters that stand for bytes are Latin letters and signs
    found = set[str]()
    for piece in vocabulary:
        character = piece.removeprefix("##")  # WordPiece's mark within words
        is_character = len(character) == 1 and (character in bytes_and_latin or _script(character) in scripts)
        if is_character or piece.startswith("<0x"):  # the token of a byte
            found.add(piece)
    return found


def _script(character: str) -> str:
    """Returns the first word of a letter's name in Unicode, such as LATIN or CJK, and "" for other characters."""
    if unicodedata.category(character)[0] not in "LM":  # letters, and marks that combine with them
        return ""
    return unicodedata.name(character, "").partition(" ")[0]


def _smaller_model(model: TaskModel, new_ids: Mapping[int, int]) -> TaskModel:
    """Returns a copy whose tables over the vocabulary have the kept rows only."""
    hf_config = config_of_kept_ids(model.hf_config, new_ids)
    smaller = TaskModel(hf_config, model.task, tokenizer=model.require_tokenizer())
    smaller.columns, smaller.reading = model.columns, model.reading
    rows, state = torch.tensor(list(new_ids), device=model.device), model.state_dict()
    for name, tensor in smaller.state_dict().items():
        if state[name].shape != tensor.shape:  # only the size of the vocabulary differs
            state[name] = state[name].index_select(0, rows)
    smaller.to(model.device, model.encoder.embeddings.word.weight.dtype).load_state_dict(state)
    return smaller


def _renumber_tokenizer(path: Path, vocabulary: Mapping[str, int], new_ids: Mapping[int, int]) -> None:
    """Removes all other pieces, and the merges that need them, from a tokenizer.json."""
    ids = {piece: new_ids[number] for piece, number in vocabulary.items() if number in new_ids}
    content = json.loads(path.read_text("utf-8"))
    settings = content["model"]
    if settings["type"] == "Unigram":
        settings["vocab"] = [entry for entry in settings["vocab"] if entry[0] in ids]
        settings["unk_id"] = new_ids.get(settings["unk_id"])  # None if the tokenizer names no such piece
    else:
        settings["vocab"] = {piece: ids[piece] for piece in settings["vocab"] if piece in ids}
    if "merges" in settings:
        settings["merges"] = [pair for pair in settings["merges"] if ids.keys() >= {*pair, "".join(pair)}]
    for token in content["added_tokens"]:
        token["id"] = ids[token["content"]]
    processor = content["post_processor"]
    if processor is None:
        processor = {}
    for step in processor.get("processors", [processor]):
        for token in step.get("special_tokens", {}).values():  # of a template
            token["ids"] = [ids[piece] for piece in token["tokens"]]
        for role in step.keys() & {"cls", "sep"}:  # of BERT's and RoBERTa's own types
            step[role][1] = ids[step[role][0]]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _check_tokens(model: TaskModel, saved: TaskModel, new_ids: Mapping[int, int], chunks: Iterable[list[Row]]) -> None:
    """Raises CheckpointError if a row has other tokens than before."""
    for rows in chunks:
        expected = []
        for feature in features_of(model, rows, model.require_tokenizer()):
            expected.append({**feature, "input_ids": [new_ids[number] for number in feature["input_ids"]]})
        if features_of(saved, rows, saved.require_tokenizer()) != expected:
            raise CheckpointError(
                "the texts have other tokens with a smaller vocabulary, so export wrote no file. This tokenizer is not "
                "supported. Export the model with its whole vocabulary"
            )


def _check_logits(model: TaskModel, saved: TaskModel, rows: Sequence[Row]) -> None:
    """Raises CheckpointError if a row has other logits than before."""
    before = forward_windows(model, features_of(model, rows, model.require_tokenizer()))
    after = forward_windows(saved, features_of(saved, rows, saved.require_tokenizer()))
    for expected, logits in zip(before, after, strict=True):
        # The last digit of a product depends on where the memory of the weights begins.
        if not torch.allclose(expected, logits, rtol=1e-5, atol=1e-5):
            raise CheckpointError(
                "the same tokens have other logits with a smaller vocabulary, so export wrote no file. This model is "
                "not supported. Export it with its whole vocabulary"
            )
