"""Trains tokenizers on a corpus and saves folders for ``AutoTokenizer``.

Each type has a class of transformers, which defines normalizer, splitting and special tokens, with the ids that the
configurations of its family expect, and a trainer of the library ``tokenizers`` for its vocabulary.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AlbertTokenizer, BertTokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from bert_tasks.checkpoints.tokenizers import builds_as_stated, save_tokenizer
from bert_tasks.data.columns import Column
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read
from bert_tasks.errors import DataError, UsageError
from bert_tasks.storage import check_new_folder, new_folder

TokenizerType = Literal["wordpiece", "bpe", "unigram"]

CORPUS_COLUMNS = (Column(name="text", kind="text"), Column(name="sentences", kind="texts", required=False))
MODEL_MAX_LENGTH = 512
_LARGEST_VOCABULARY = 1_000_000
_UNIGRAM_STEP = 1e-4  # of the trainer

# The special tokens of each type. The id of a token is its position.
_SPECIAL: Mapping[TokenizerType, tuple[str, ...]] = MappingProxyType(
    {
        "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        "bpe": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
        "unigram": ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
    }
)
_CLASSES: Mapping[TokenizerType, Any] = MappingProxyType(
    {"wordpiece": BertTokenizer, "bpe": RobertaTokenizer, "unigram": AlbertTokenizer}
)
# The fewest tokens beside the special ones. BPE on bytes has one for each byte, the others a character and its form
# within words, or the mark of a space.
_FEWEST: Mapping[TokenizerType, int] = MappingProxyType({"wordpiece": 2, "bpe": 256, "unigram": 2})


def _make(type: TokenizerType, vocabulary: Mapping[str, Any] | None, *, lowercase: bool) -> PreTrainedTokenizerBase:
    """Returns a tokenizer of transformers, with a vocabulary in the JSON of ``tokenizers`` or with an empty one."""
    content: Mapping[str, Any] = {}
    if vocabulary is not None:
        content = vocabulary
    words = content.get("vocab")
    options: dict[str, Any] = {"do_lower_case": lowercase}
    if type == "bpe":
        options = {"merges": [tuple(pair) for pair in content.get("merges", ())]}
    elif type == "unigram":
        if words is not None:  # JSON has lists, but the class expects pairs
            words = [(piece, score) for piece, score in words]
        options["keep_accents"] = not lowercase
    tokenizer: PreTrainedTokenizerBase = _CLASSES[type](vocab=words, model_max_length=MODEL_MAX_LENGTH, **options)
    return tokenizer


def train_tokenizer(
    corpus: Sequence[str | Path],
    output: str | Path,
    *,
    type: TokenizerType,
    vocab_size: int,
    lowercase: bool = False,
    reading: ReadOptions | None = None,
) -> PreTrainedTokenizerBase:
    """Trains a tokenizer on files and saves it. Equal files give an equal tokenizer.

    Use it before pre-training a model from scratch, if no published tokenizer suits the language or the domain. A
    published model needs its own tokenizer, whose ids its embeddings know. The texts are read once for ``bpe``
    and twice for the other types, whose characters are counted first. The trainer runs on one thread, so that its sums
    have a fixed order.

    The trainer of WordPiece merges the most frequent pairs, as BPE's trainer does, because ``tokenizers`` has no other.

    Args:
        corpus: Files with a column ``text`` or ``sentences``, or of plain text.
        output: New folder, which must be empty if it exists.
        type: ``wordpiece`` as in BERT, ``bpe`` on bytes as in RoBERTa, or ``unigram`` as in ALBERT.
        vocab_size: Number of tokens, including special tokens. There are fewer if the corpus has no more.
        lowercase: Change letters to lower case and remove accents, as in BERT's uncased models. Not for ``bpe``.
        reading: Options to read the files. Default: those of every other command.

    Returns:
        The tokenizer, as ``AutoTokenizer`` opens it.

    Raises:
        DataError: A file cannot be used, or holds too little text.
        UsageError: The folder is not empty, or the options do not fit together.
        OSError: The folder is not writable.
    """
    if type not in _SPECIAL:
        raise UsageError(f"type is {type!r}, expected one of {', '.join(_SPECIAL)}")
    if lowercase and type == "bpe":
        raise UsageError("bpe works on bytes and keeps all letters as they are. Train it without lowercase")
    if not builds_as_stated(_CLASSES[type]):
        raise UsageError("unigram needs transformers 5.14 or newer. Install it, or choose wordpiece or bpe")
    least = len(_SPECIAL[type]) + _FEWEST[type]
    if not least <= vocab_size <= _LARGEST_VOCABULARY:
        raise UsageError(f"vocab_size is {vocab_size}, expected {least} to {_LARGEST_VOCABULARY} for {type}")
    target = Path(output)
    check_new_folder(target)
    if reading is None:
        reading = ReadOptions()
    reading = replace(reading, split="train")
    tables = [read(path, CORPUS_COLUMNS, reading) for path in corpus]

    def texts() -> Iterator[str]:
        for table in tables:
            for row in table:
                yield row["text"]

    with _one_thread():
        vocabulary = _trained(type, texts, vocab_size=vocab_size, lowercase=lowercase)
    tokenizer = _make(type, vocabulary, lowercase=lowercase)
    with new_folder(target, suffix=".training") as folder:
        save_tokenizer(tokenizer, folder)
    return tokenizer


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs ``tokenizers`` on one thread, so that sums have a fixed order."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _trained(
    type: TokenizerType, texts: Callable[[], Iterable[str]], *, vocab_size: int, lowercase: bool
) -> dict[str, Any]:
    """Returns the model of a trained tokenizer in the JSON of ``tokenizers``."""
    outline = _make(type, None, lowercase=lowercase).backend_tokenizer
    shared: dict[str, Any] = {"vocab_size": vocab_size, "show_progress": False}
    special = list(_SPECIAL[type])
    trainer: Any
    if type == "bpe":
        backend = Tokenizer(models.BPE())
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(**shared, special_tokens=special, initial_alphabet=alphabet)
    else:
        characters = Counter[str]()
        for text in texts():
            characters.update(outline.normalizer.normalize_str(text))
        # The trainers choose by chance among equally frequent characters, so the choice is made here.
        visible = [character for character in characters if not character.isspace()]
        ranked = sorted(visible, key=lambda character: (-characters[character], character))
        if not ranked:
            raise DataError("the corpus holds no text to train a tokenizer on")
        if type == "wordpiece":
            alphabet, joined = _wordpiece_alphabet(ranked, outline, vocab_size - len(special))
            # The trainer numbers "##a" and so on as it meets them, in an order that changes with each process, and
            # breaks ties by these numbers. Special tokens are numbered first.
            continued = [f"##{character}" for character in sorted(joined)]
            backend = Tokenizer(models.WordPiece(unk_token=special[1]))
            trainer = trainers.WordPieceTrainer(
                **shared,
                special_tokens=[*special, *continued],
                initial_alphabet=alphabet,
                limit_alphabet=len(alphabet),
            )
        else:
            needed = len(special) + len(ranked) + 1  # and the mark of a space
            if needed > vocab_size:
                raise UsageError(
                    f"vocab_size is {vocab_size}, expected at least {needed}, because unigram has a token for each of "
                    f"the {len(ranked)} different characters of the corpus"
                )
            alphabet = ranked
            backend = Tokenizer(models.Unigram())
            trainer = trainers.UnigramTrainer(
                **shared, special_tokens=special, initial_alphabet=alphabet, unk_token=special[1]
            )
    backend.normalizer, backend.pre_tokenizer = outline.normalizer, outline.pre_tokenizer
    backend.train_from_iterator(texts(), trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    if type == "unigram":
        special_pieces = [(token, 0.0) for token in special]
        model["vocab"] = [*special_pieces, *_ordered(model["vocab"][len(special) :])]
    return model


def _wordpiece_alphabet(characters: Sequence[str], outline: Tokenizer, room: int) -> tuple[list[str], list[str]]:
    """Returns the characters that get a token, and those of them that get a second one within words.

    The most frequent ones come first, until there is no ``room`` for one more with its tokens.
    """
    # Punctuation and Chinese characters are words of their own, so they need no second token such as "##a".
    alphabet, joined = list[str](), list[str]()
    for character in characters:
        words = outline.pre_tokenizer.pre_tokenize_str(outline.normalizer.normalize_str(2 * character))
        is_joined = len(words) == 1
        if len(alphabet) + len(joined) + 1 + is_joined > room:
            break
        alphabet.append(character)
        if is_joined:
            joined.append(character)
    return alphabet, joined


def _ordered(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Orders the pieces of a Unigram vocabulary independently of the trainer's order."""
    # Sums in another order differ in their last digits. Characters that are pieces only because each character must be
    # one get the lowest score and 0, 1, 2, ... times a step more, in any order. Here the order is fixed.
    lowest = min(score for _, score in pieces)
    steps = {piece: (score - lowest) / _UNIGRAM_STEP for piece, score in pieces if len(piece) == 1}
    added: dict[str, int] = {}
    for piece, step in steps.items():
        whole_step = round(step)
        if abs(step - whole_step) < 1e-3 and whole_step < len(steps):
            added[piece] = whole_step
    scores = dict(pieces)
    for piece, whole_step in zip(sorted(added), sorted(added.values()), strict=True):
        scores[piece] = lowest + whole_step * _UNIGRAM_STEP
    rounded = [(piece, round(score, 6)) for piece, score in scores.items()]
    return sorted(rounded, key=lambda pair: (-pair[1], pair[0]))
