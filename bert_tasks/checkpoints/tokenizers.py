"""Loads a folder's tokenizer with AutoTokenizer, checks it, and saves it.

Code of the checkpoint never runs. This module owns the checks that AutoTokenizer lacks (without vocabulary files it
silently returns a tokenizer of five tokens), and the segment ids of a tokenizer. The backend object never reads texts
directly, because files may set truncation and padding.
"""

import copy
import errno
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import PreTokenizer

from bert_tasks.checkpoints.files import checked_file, read_json
from bert_tasks.checkpoints.hub import TOKENIZER_SETTINGS, VOCABULARIES
from bert_tasks.data.issues import shortened
from bert_tasks.errors import CheckpointError
from bert_tasks.storage import library_errno

if TYPE_CHECKING:  # the import takes a second
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_MAX_BYTES = 200 * 2**20
_SLOW = "a slow tokenizer without offsets. Expected a tokenizer.json"
_PYTHON_WORDS = (
    "the tokenizer splits words with a Python library, such as jieba for Chinese, which no tokenizer.json can hold"
)
# Every real vocabulary has a letter, a digit or a mark of ordinary text. Hardly any has the cuneiform sign, so
# WordPiece without its unknown token fails there, as it would in the middle of somebody's data.
_PROBE = "The 3 birds sang, и пели. 你好 a 1 , . \U00012000"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Classes of transformers that build a SentencePiece tokenizer anew, and the argument by which they get the characters
# to replace. transformers before 5.3 lacks it, and before 5.14 for ALBERT and CamemBERT.
_SENTENCEPIECE_CLASSES = ("AlbertTokenizer", "CamembertTokenizer", "RemBertTokenizer", "XLMRobertaTokenizer")
_REPLACEMENTS = "_spm_precompiled_charsmap"
# Arguments of the loading call, which transformers writes among the settings.
_NOT_SETTINGS = ("is_local", "local_files_only")


def load_tokenizer(folder: Path, *, vocab_size: int, required: bool = True) -> "PreTrainedTokenizerBase | None":
    """Returns a folder's tokenizer, or None without vocabulary if not ``required``.

    Args:
        vocab_size: Number of rows of the model's embedding table, which must hold every token id.

    Raises:
        CheckpointError: A file is missing or damaged, or the tokenizer does not fit the model.
    """
    vocabularies = [name for name in VOCABULARIES if os.path.lexists(folder / name)]
    if not vocabularies:
        if not required:
            return None
        raise CheckpointError(f"{folder}: no tokenizer. Expected one of {', '.join(VOCABULARIES)}")
    for name in (*vocabularies, *TOKENIZER_SETTINGS):
        if os.path.lexists(folder / name):
            path = checked_file(folder, name)
            if path.suffix == ".json":
                read_json(path, max_bytes=_MAX_BYTES)
    from transformers import AutoTokenizer

    path = folder / vocabularies[0]
    with _quiet(), ExitStack() as stack:
        # A callback of the stack also gets the errors that are no ``Exception``, such as a panic of the Rust library.
        stack.push(lambda error_type, error, trace: _raise_load_error(path, error))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, config=_class_config(folder), trust_remote_code=False, local_files_only=True
        )
        if path.suffix == ".model":  # transformers takes symbols that users defined, such as "(", for special tokens
            special = list(tokenizer.all_special_tokens)
            tokenizer.extra_special_tokens = []
            symbols = [symbol for symbol in special if symbol not in tokenizer.all_special_tokens]
            tokenizer.backend_tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
        needed = max(tokenizer.get_vocab().values(), default=-1) + 1
        roles = {
            "pad": (tokenizer.pad_token_id,),
            "cls or bos": (tokenizer.cls_token_id, tokenizer.bos_token_id),
            "sep or eos": (tokenizer.sep_token_id, tokenizer.eos_token_id),
        }
        longest = tokenizer.model_max_length  # 1e30 if the files do not set it
        is_length = type(longest) is int or (isinstance(longest, float) and longest.is_integer())
        missing = [role for role, ids in roles.items() if set(ids) == {None}]
        if not tokenizer.is_fast:
            problem = f"{type(tokenizer).__name__} is {_SLOW}"
        elif type(tokenizer.backend_tokenizer.pre_tokenizer) is PreTokenizer:  # all others have classes of their own
            problem = _PYTHON_WORDS
        elif needed > vocab_size:
            problem = (
                f"the tokenizer has {needed} tokens, but the model has {vocab_size} embeddings, so they do not "
                "belong together"
            )
        elif not is_length or longest < 1:
            problem = f"model_max_length is {shortened(longest)}, expected a number of tokens"
        elif missing:
            problem = f"the tokenizer has no {', no '.join(missing)} token"
        elif set(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]) <= {tokenizer.unk_token_id}:
            problem = f"the tokenizer ({needed} tokens) recognises no ordinary text, because its vocabulary is missing"
        else:
            _restore_steps(path, tokenizer)
            _split_written_specials(tokenizer)
            return tokenizer
    raise CheckpointError(f"{path}: {problem}")


def builds_as_stated(tokenizer_class: type) -> bool:
    """Returns False for a class of an older transformers, which does not follow what its tokenizer.json states.

    Such a class forgets the characters to replace, changes all letters to lower case (ALBERT), or puts one special
    token between two texts where there should be two (XLM-RoBERTa).
    """
    if tokenizer_class.__name__ not in _SENTENCEPIECE_CLASSES:
        return True
    return _REPLACEMENTS in inspect.signature(tokenizer_class).parameters


def _restore_steps(path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Gives a tokenizer the steps before and after the model that its tokenizer.json states."""
    if path.name == "tokenizer.json" and not builds_as_stated(type(tokenizer)):
        stated = Tokenizer.from_file(str(path))
        backend = tokenizer.backend_tokenizer
        backend.normalizer = stated.normalizer
        backend.pre_tokenizer = stated.pre_tokenizer
        backend.post_processor = stated.post_processor


def _split_written_specials(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Makes a Unigram tokenizer read special tokens in a text as characters."""
    # With ``split_special_tokens`` they are no special tokens, but the Unigram model has them among its pieces, so that
    # a text could end a sequence. A space after their first character keeps the piece from being found.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    plain: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
    readable = []
    for token in tokenizer.all_special_tokens:
        ids = tokenizer(token, **plain)["input_ids"]
        if special.intersection(ids):
            readable.append(token)
    backend = tokenizer.backend_tokenizer
    steps = []
    if backend.normalizer is not None:
        steps.append(backend.normalizer)
    for first in sorted({token[0] for token in readable}):
        rests = "|".join(re.escape(token[1:]) for token in readable if token[0] == first)
        steps.append(normalizers.Replace(Regex(f"{re.escape(first)}(?={rests})"), f"{first} "))
    if readable:
        backend.normalizer = normalizers.Sequence(steps)


def class_fields(folder: Path) -> dict[str, str]:
    """Returns the fields of config.json from which AutoTokenizer chooses a class.

    Raises:
        CheckpointError: The file is damaged.
    """
    if not os.path.lexists(folder / "config.json"):
        return {}
    entries = read_json(checked_file(folder, "config.json"), max_bytes=_MAX_BYTES)
    fields = {}
    for name in ("model_type", "tokenizer_class", "model_name"):
        if isinstance(entries.get(name), str):
            fields[name] = entries[name]
    return fields


def _class_config(folder: Path) -> "PreTrainedConfig":
    """Returns a configuration with ``class_fields``."""
    # transformers rejects a config.json for the type of any field, also of fields that no tokenizer depends on.
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    entries = class_fields(folder)
    model_type = entries.pop("model_type", "")
    config = PreTrainedConfig()
    if model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type]()
    for name, value in entries.items():
        setattr(config, name, value)
    return config


def trained_segments(tokenizer: "PreTrainedTokenizerBase", *, second: int) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer with the segments that a trained model has learned, or a copy.

    They are the family's unless the tokenizer states that pairs have none. It does so if its ``model_input_names`` in
    tokenizer_config.json lack ``token_type_ids``, or if its post-processor gives segment 0 to both texts. transformers
    feeds zeros for such a tokenizer, in training, too, so a model that was fine-tuned with it expects zeros. ALBERT's
    and RemBERT's classes in transformers 5.23 omit segment ids, too, but state nothing: their post-processors have
    them, and the published models were trained with them.

    Args:
        tokenizer: The tokenizer of the model's folder, or one that a caller sets.
        second: ``EncoderConfig.second_segment``.

    Raises:
        CheckpointError: See ``with_segments``.
    """
    return with_segments(tokenizer, second=min(second, _stated_segment(tokenizer)))


def _stated_segment(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns 0 if the tokenizer states that the texts of a pair have the same segment, else 1."""
    names = tokenizer.init_kwargs.get("model_input_names")
    if names is not None and "token_type_ids" not in names:
        return 0
    pair = tokenizer("a", "a", truncation=False, padding=False, return_token_type_ids=True)
    return int(any(pair["token_type_ids"]))


def with_segments(tokenizer: "PreTrainedTokenizerBase", *, second: int) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer with segment 0 for single and first texts, or a copy.

    Tokenizers of published models disagree with their models. For example, a template gives RoBERTa segment 1, for
    which it has no row. The decision is stored in the tokenizer's files, and stock transformers then returns the same
    ids. A new model has the segments of its family, and a trained one those of ``trained_segments``.

    Args:
        tokenizer: The tokenizer.
        second: Segment of the second text of a pair, 0 or 1. With 0 the tokenizer passes stock models no segment ids,
            which they read as zeros.

    Raises:
        CheckpointError: The tokenizer returns other ids that cannot be changed.
    """
    if not tokenizer.is_fast:
        raise CheckpointError(f"{type(tokenizer).__name__} is {_SLOW}")
    are_right = _gives_segments(tokenizer, second)
    if are_right and ("token_type_ids" in tokenizer.model_input_names) == bool(second):
        return tokenizer
    changed = copy.deepcopy(getattr(tokenizer, "of_transformers", tokenizer))
    if not are_right:
        backend = changed.backend_tokenizer
        template = _resegmented(json.loads(backend.to_str())["post_processor"], second)
        outline = json.loads(Tokenizer(type(backend.model)()).to_str()) | {"post_processor": template}
        backend.post_processor = Tokenizer.from_str(json.dumps(outline)).post_processor
        if second:
            # When read again, transformers' own classes would replace the stored template. A plain fast
            # tokenizer is read from tokenizer.json alone.
            sides = {name: getattr(changed, name) for name in ("padding_side", "truncation_side", "model_max_length")}
            from transformers import PreTrainedTokenizerFast

            # transformers leaves it untyped.
            tokenizer_class: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
            changed = tokenizer_class(tokenizer_object=backend, **sides, **changed.special_tokens_map)
    names = [name for name in changed.model_input_names if name != "token_type_ids"]
    if second:
        names.append("token_type_ids")
    changed.model_input_names = names
    changed.init_kwargs["model_input_names"] = changed.model_input_names  # what is saved
    if not _gives_segments(changed, second):
        raise CheckpointError(
            f"the tokenizer ({type(tokenizer).__name__}) returns other segment ids than the model expects (0 for "
            f"the first text of a pair and {second} for the second). Choose the tokenizer of the model's family"
        )
    return changed


def _gives_segments(tokenizer: "PreTrainedTokenizerBase", second: int) -> bool:
    """Returns True if a text has segment 0, and the second text of a pair with all that follows has ``second``."""
    quiet: dict[str, Any] = {"truncation": False, "padding": False, "return_token_type_ids": True}
    single, pair = tokenizer("a", **quiet), tokenizer("a", "a", **quiet)
    position = pair.sequence_ids(0).index(1)
    expected = [0] * position + [second] * (len(pair["input_ids"]) - position)
    return not any(single["token_type_ids"]) and bool(pair["token_type_ids"] == expected)


def _resegmented(processor: dict[str, Any] | None, second: int) -> dict[str, Any]:
    """Returns a post-processor as a template that sets the second text's segment."""
    if processor is None:
        return _template([], [], [], second)
    match processor["type"]:
        case "Sequence":
            return {**processor, "processors": [_resegmented(child, second) for child in processor["processors"]]}
        case "TemplateProcessing":
            return {**processor, "single": _placed(processor["single"], 0), "pair": _placed(processor["pair"], second)}
        case "BertProcessing":
            return _template([processor["cls"]], [processor["sep"]], [], second)
        case "RobertaProcessing":
            trim = {key: processor[key] for key in ("trim_offsets", "add_prefix_space")}
            template = _template([processor["cls"]], [processor["sep"]], [processor["sep"]], second)
            return {"type": "Sequence", "processors": [{"type": "ByteLevel", "use_regex": True, **trim}, template]}
    return processor


def _template(before: list[Any], after: list[Any], between: list[Any], second: int) -> dict[str, Any]:
    """Returns a template from special tokens ``(text, id)`` around and between texts."""

    def special(tokens: list[Any]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": text, "type_id": 0}} for text, _ in tokens]

    texts: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    single = [*special(before), texts[0], *special(after)]
    special_tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in [*before, *after]}
    pair = _placed([*single, *special(between), texts[1], *special(after)], second)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens}


def _placed(pieces: list[dict[str, Any]], second: int) -> list[dict[str, Any]]:
    """Returns a template's pieces with segment 0, but ``second`` for the second text."""
    segment, placed = 0, []
    for piece in pieces:
        ((piece_type, content),) = piece.items()
        if piece_type == "Sequence" and content["id"] == "B":
            segment = second
        placed.append({piece_type: {**content, "type_id": segment}})
    return placed


def same_token_ids(first: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Returns True if the token ids of any text or pair are equal, segments aside."""
    ids = []
    for tokenizer in (first, other):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        quiet: dict[str, Any] = {"truncation": False, "padding": False}
        samples = [tokenizer(_PROBE, **quiet)["input_ids"], tokenizer(_PROBE, _PROBE, **quiet)["input_ids"]]
        rules = [backend["normalizer"], backend["pre_tokenizer"], backend["model"].get("merges")]
        ids.append((rules, samples, tokenizer.get_vocab(), dict(tokenizer.special_tokens_map)))
    return ids[0] == ids[1]


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Writes the tokenizer's files, without truncation and padding of its last call.

    Raises:
        OSError: A file is not writable.
    """
    with _quiet(), ExitStack() as stack:
        stack.push(lambda error_type, error, trace: _raise_write_error(error, folder))
        tokenizer.save_pretrained(folder)
    changes = {"tokenizer.json": {"truncation": None, "padding": None}, _TOKENIZER_CONFIG: {}}
    for name, changed in changes.items():
        path = folder / name
        if path.exists():
            content = json.loads(path.read_text("utf-8")) | changed
            kept = {key: value for key, value in content.items() if key not in _NOT_SETTINGS}
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' log lines about fallbacks, because failures are reported."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _raise_load_error(path: Path, error: BaseException | None) -> None:
    """Raises a CheckpointError about ``path`` for an error of these libraries."""
    # tokenizers raises plain ``Exception`` for most errors, and a special ``BaseException`` if it panics.
    expected_errors = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError)
    if not (isinstance(error, expected_errors) or type(error) is Exception or type(error).__name__ == "PanicException"):
        return
    text = str(error)
    if "rjieba" in text:  # whose installation would not help
        raise CheckpointError(f"{path}: {_PYTHON_WORDS}") from None
    reason = f"{type(error).__name__}: {text.partition(chr(10))[0][:160]}"
    if "trust_remote_code" in text:
        reason = "it needs Python code from the checkpoint, which is never run"
    raise CheckpointError(f"{path}: the tokenizer does not load ({reason})") from None


def _raise_write_error(error: BaseException | None, folder: Path) -> None:
    """Raises an OSError for the plain ``Exception`` of tokenizers about a file."""
    if type(error) is Exception:
        number = library_errno(error)
        if number is None:
            number = errno.EIO
        raise OSError(number, str(error), str(folder)) from error
