"""Opens tokenizers without importing transformers, which takes long.

This module owns the cache of opened tokenizers, and the class that stands for a tokenizer of transformers. The cache
stores the result of AutoTokenizer, the tokenizer of the library ``tokenizers`` and the additions of
transformers. It is read if the same files are opened again. The classes of transformers build a tokenizer anew from its
vocabulary, so tokenizer.json alone would not give the same ids for every family.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding, Tokenizer

from bert_tasks.checkpoints.files import checked_file
from bert_tasks.checkpoints.hub import TOKENIZER_SETTINGS, VOCABULARIES, resolve
from bert_tasks.checkpoints.tokenizers import (
    class_fields,
    load_tokenizer,
    save_tokenizer,
    trained_segments,
    with_segments,
)
from bert_tasks.data.arrow import cache_folder
from bert_tasks.environment import installed_version
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.families import encoder_config, new_hf_config
from bert_tasks.storage import atomic_path, sha256, sha256_file, sha256_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 3  # of what is stored
_MOST_TOKENS = 2**31 - 1
_FILES = ("tokenizer.json", "tokenizer_config.json")
_ROLES = ("pad", "unk", "cls", "sep", "bos", "eos", "mask")
_ATTRIBUTES = (
    *(f"{role}_token" for role in _ROLES),
    *(f"{role}_token_id" for role in _ROLES),
    *("all_special_ids", "all_special_tokens", "special_tokens_map", "model_input_names", "model_max_length"),
    *("is_fast", "padding_side", "truncation_side", "split_special_tokens"),
)
# Arguments of a call that need no more than the library tokenizers.
_OPTIONS = {
    *("add_special_tokens", "split_special_tokens", "is_split_into_words", "padding", "verbose"),
    *("truncation", "max_length", "stride", "return_overflowing_tokens"),
    *("return_token_type_ids", "return_attention_mask", "return_offsets_mapping"),
}


class StoredEncoding(dict[str, Any]):
    """The encoding of a call, which takes the methods that it lacks from transformers' ``BatchEncoding``.

    Args:
        content: The lists that the call returns.
        complete: Returns the objects of the library tokenizers, with words and offsets.
    """

    def __init__(self, content: Mapping[str, Any], complete: Callable[[], Sequence[Encoding]]) -> None:
        super().__init__(content)
        self._complete = complete

    @cached_property
    def encodings(self) -> Sequence[Encoding]:
        return self._complete()

    def word_ids(self, index: int = 0) -> list[int | None]:
        return self.encodings[index].word_ids

    def sequence_ids(self, index: int = 0) -> list[int | None]:
        return self.encodings[index].sequence_ids

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from transformers import BatchEncoding

        return getattr(BatchEncoding(dict(self), list(self.encodings)), name)


class StoredTokenizer:
    """A tokenizer that encodes as transformers does, and leaves the rest to it."""

    def __init__(self, stored: Mapping[str, Any], name: str) -> None:
        """Opens what ``_stored_content`` returned, under a name for messages.

        Raises:
            Exception: The content is damaged.
        """
        self.backend_tokenizer = Tokenizer.from_str(stored["backend"])
        self._stored, self.name_or_path = stored, name
        self.second_segment: int = stored["second"]  # of the family whose segments it has, see ``trained_segments``
        self._attributes: dict[str, Any] = {attribute: stored["attributes"][attribute] for attribute in _ATTRIBUTES}

    @cached_property
    def of_transformers(self) -> "PreTrainedTokenizerBase":
        """Returns the same tokenizer of transformers."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            tokenizer = load_tokenizer(Path(folder), vocab_size=self._stored["size"])
        if tokenizer is None:
            raise CheckpointError(f"{self.name_or_path}: no tokenizer")
        tokenizer.name_or_path = self.name_or_path
        return trained_segments(tokenizer, second=self._stored["second"])

    @property
    def init_kwargs(self) -> Mapping[str, Any]:
        """The content of tokenizer_config.json."""
        config: Mapping[str, Any] = self._stored["config"]
        return config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_attributes" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        if name in self._attributes:
            return self._attributes[name]
        return getattr(self.of_transformers, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the files that transformers would write."""
        content = self.backend_tokenizer.to_str(pretty=True)
        for name, text in zip(_FILES, (content, json.dumps(self._stored["config"])), strict=True):
            (Path(folder) / name).write_text(text, "utf-8")

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Encodes texts as the tokenizer of transformers does."""
        truncation = options.get("truncation", False)
        is_split = options.get("is_split_into_words", False)
        # Without a length transformers truncates at ``model_max_length``, and warns if that is not set.
        is_unlimited = truncation and options.get("max_length") is None
        if options.keys() - _OPTIONS or options.get("padding") or is_unlimited:
            return self.of_transformers(text, text_pair, **options)
        # A list of words is one text if ``is_split_into_words`` is set, and several texts otherwise.
        is_batch = not isinstance(text, str) and not (is_split and (not text or isinstance(text[0], str)))
        inputs = [text]
        if is_batch:
            inputs = text
            if text_pair is not None:
                inputs = list(zip(text, text_pair, strict=True))
        elif text_pair:
            inputs = [(text, text_pair)]
        self._prepare(options)
        backend = self.backend_tokenizer
        # The faster method leaves out words and offsets, which few callers read, and gives the later windows of a pair
        # other segments.
        is_complete = bool(is_split or truncation or options.get("return_offsets_mapping"))
        encode = backend.encode_batch_fast
        if is_complete:
            encode = backend.encode_batch
        encodings = encode(
            inputs,
            is_pretokenized=is_split,
            add_special_tokens=options.get("add_special_tokens", True),
        )
        has_windows = options.get("return_overflowing_tokens", False)
        flat: list[Encoding] = []  # the windows of all texts
        text_of_window: list[int] = []
        for index, encoding in enumerate(encodings):
            windows = [encoding]
            if has_windows:
                windows += encoding.overflowing
            flat += windows
            text_of_window += [index] * len(windows)

        def complete() -> Sequence[Encoding]:
            if is_complete:
                return flat
            repeated: StoredEncoding = self(text, text_pair, **{**options, "return_offsets_mapping": True})
            return repeated.encodings

        result = StoredEncoding(self._content(flat, options), complete)
        if has_windows:
            result["overflow_to_sample_mapping"] = text_of_window
        elif not is_batch:
            result.update({name: values[0] for name, values in result.items()})
        return result

    def _prepare(self, options: Mapping[str, Any]) -> None:
        """Sets what the backend remembers from one call to the next."""
        backend, truncation = self.backend_tokenizer, options.get("truncation", False)
        backend.no_padding()
        backend.no_truncation()
        if truncation:
            strategy = truncation
            if truncation is True:
                strategy = "longest_first"
            backend.enable_truncation(
                options["max_length"],
                stride=options.get("stride", 0),
                strategy=strategy,
                direction=self.truncation_side,
            )
        backend.encode_special_tokens = options.get("split_special_tokens", self.split_special_tokens)

    def _content(self, encodings: Sequence[Encoding], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the lists of a call by name, one entry for each encoding."""
        result: dict[str, Any] = {"input_ids": [encoding.ids for encoding in encodings]}
        wanted = {}
        for name in ("token_type_ids", "attention_mask"):
            wanted[name] = options.get(f"return_{name}")
            if wanted[name] is None:  # then the names that the tokenizer gives to models decide, as in transformers
                wanted[name] = name in self.model_input_names
        if wanted["token_type_ids"]:
            result["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        if wanted["attention_mask"]:
            result["attention_mask"] = [encoding.attention_mask for encoding in encodings]
        if options.get("return_offsets_mapping", False):
            result["offset_mapping"] = [encoding.offsets for encoding in encodings]
        return result


def open_tokenizer(folder: Path, *, vocab_size: int, second: int, required: bool = True) -> Any:
    """Returns the tokenizer of a folder, from the cache if its files are unchanged.

    Args:
        folder: Folder with the files of a tokenizer.
        vocab_size: Number of rows of the model's embedding table, which must hold every token id.
        second: The family's segment of the second text of a pair, see ``trained_segments``.
        required: Raise an error if the folder has no tokenizer. Otherwise the result is None.

    Raises:
        CheckpointError: See ``load_tokenizer``.
    """
    names = [name for name in (*VOCABULARIES, *TOKENIZER_SETTINGS) if os.path.lexists(folder / name)]
    digests = {name: sha256_file(checked_file(folder, name)) for name in names}
    versions = [installed_version(name) for name in ("bert-tasks", "transformers", "tokenizers")]
    # Everything that the result depends on, so that another version of a library or a changed file has another entry.
    key = sha256_json(_VERSION, digests, versions, class_fields(folder), vocab_size, second)
    with suppress(DataError, OSError, ValueError):  # missing or damaged, so it is written again
        digest, _, content = (cache_folder(None, "tokenizers") / f"{key}.json").read_text("utf-8").partition("\n")
        if sha256(content) == digest:
            return StoredTokenizer(json.loads(content), str(folder))
    tokenizer = load_tokenizer(folder, vocab_size=vocab_size, required=required)
    if tokenizer is None:
        return None
    content = json.dumps(_stored_content(trained_segments(tokenizer, second=second), vocab_size, second))
    with (
        suppress(DataError, OSError),
        atomic_path(cache_folder(None, "tokenizers") / f"{key}.json", durable=False) as temporary,
    ):
        temporary.write_text(f"{sha256(content)}\n{content}", "utf-8")
    return StoredTokenizer(json.loads(content), str(folder))


def _stored_content(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, second: int) -> dict[str, Any]:
    """Returns the content that ``StoredTokenizer`` opens."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        config = json.loads((Path(folder) / _FILES[1]).read_text("utf-8"))
    return {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "attributes": {name: getattr(tokenizer, name) for name in _ATTRIBUTES},
        "config": config,
        "size": vocab_size,
        "second": second,
    }


def new_tokenizer(settings: Mapping[str, Any], name: str | Path) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a new model, with the segments of its family.

    Args:
        settings: The configuration of ``new_hf_config``.
        name: A folder or a hub id with the files of a tokenizer.

    Raises:
        CheckpointError: There is no such tokenizer or family.
    """
    second = encoder_config(new_hf_config(settings)).second_segment
    opened = open_tokenizer(resolve(name, weights=False), vocab_size=_MOST_TOKENS, second=second)
    return with_segments(opened, second=second)


def config_with_tokenizer(settings: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Returns a new model's configuration with its tokenizer's vocabulary and ids.

    Raises:
        CheckpointError: An unknown family or field, or a value that does not fit.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return new_hf_config(
        settings,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        special_ids={name: number for name, number in special.items() if number is not None},
    )
