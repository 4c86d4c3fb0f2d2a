"""Reads the files that sentence-transformers writes beside a checkpoint.

They define how embeddings are made of the hidden states. ``modules.json`` lists the modules that run one after another.
Most published models have Transformer, Pooling and Normalize. No code that it names is imported. The formats come from
sentence-transformers 2 to 6.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, read_json_value, refuse

MODULES = "modules.json"
_TRANSFORMER = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
# Files that a hub id needs beside a checkpoint.
SENTENCE_FILES = (MODULES, _TRANSFORMER, _PROMPTS, "*_Pooling/config.json")
_IGNORED = ("Transformer", "Normalize", "Dropout")  # Dropout does nothing in evaluation, and the caller normalises
_MODES = ("mean", "cls", "max")
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class SentenceSettings:
    """The settings with which sentence-transformers embeds texts.

    Attributes:
        pooling: mean, cls or max. None if ``unsupported`` says why.
        source: File that defines the pooling, below the folder.
        max_length: Number of tokens after which it cuts a text, or None if the files do not say.
        unsupported: Setting that this package does not support, as a clause for messages.
        prompt: Default prompt, which it puts in front of every text unless the user asks for another prompt.
        pools_prompt: The mean and the maximum include the tokens of the prompt.
        lowercase: It changes texts, with their prompts, to lower case before the tokenizer reads them.
    """

    pooling: str | None
    source: str
    max_length: int | None = None
    unsupported: str | None = None
    prompt: str = ""
    pools_prompt: bool = True
    lowercase: bool = False


def read_sentence_settings(folder: Path) -> SentenceSettings | None:
    """Returns the settings of a folder, or None without sentence-transformers files.

    Raises:
        CheckpointError: A file is damaged.
    """
    if not os.path.lexists(folder / MODULES):
        return None
    kinds = _modules(folder)
    transformer = _optional(folder, _TRANSFORMER)
    prompts = _optional(folder, _PROMPTS)
    length = transformer.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        refuse(folder / _TRANSFORMER, f"max_seq_length is {length!r}, expected a number of tokens")
    further = [module for module in kinds if module not in (*_IGNORED, "Pooling")]
    source, pools_prompt = MODULES, True
    pooling: str | None = None
    unsupported: str | None = f"{MODULES} lists no pooling"
    if "Pooling" in kinds:
        source = str(PurePosixPath(kinds["Pooling"], "config.json"))
        config = read_json(checked_file(folder, source), max_bytes=MAX_CONFIG_BYTES)
        modes = _pooling_modes(config, folder / source)
        pools_prompt = config.get("include_prompt") is not False
        # Several modes mean several vectors one after another, which no embedding of this package is.
        if len(modes) == 1 and modes[0] in _MODES:
            pooling, unsupported = modes[0], None
        else:
            unsupported = f"{source} asks for {' and '.join(modes)} pooling"
    if further:  # such as Dense, whose weights would change the vector
        pooling, unsupported = None, f"{MODULES} lists the further module {further[0]}"
    return SentenceSettings(
        pooling=pooling,
        source=source,
        max_length=length,
        unsupported=unsupported,
        prompt=_default_prompt(prompts, folder / _PROMPTS),
        pools_prompt=pools_prompt,
        lowercase=transformer.get("do_lower_case") is True,
    )


def _modules(folder: Path) -> dict[str, str]:
    """Maps the class name of each module to its folder, in order."""
    path = checked_file(folder, MODULES)
    expected = "expected a list of modules, each with a type and a path"
    entries = read_json_value(path, max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(entries, list):
        refuse(path, expected)
    folders: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            refuse(path, expected)
        module_type, folder_name = entry.get("type"), entry.get("path")
        if not isinstance(module_type, str) or not isinstance(folder_name, str):
            refuse(path, expected)
        if PurePosixPath(folder_name).is_absolute() or ".." in PurePosixPath(folder_name).parts or "\0" in folder_name:
            refuse(path, f"the path {folder_name!r} leads out of the folder")
        # Versions differ in the package that a type belongs to, but not in the class.
        folders[module_type.rpartition(".")[2]] = folder_name
    return folders


def _default_prompt(config: Mapping[str, Any], path: Path) -> str:
    """Returns the prompt that ``default_prompt_name`` names, or "" without a default."""
    default, prompts = config.get("default_prompt_name"), config.get("prompts")
    if default is None:
        return ""
    prompt = None
    if isinstance(prompts, Mapping) and isinstance(default, str):
        prompt = prompts.get(default)
    if not isinstance(prompt, str):
        refuse(path, f"default_prompt_name is {default!r}, expected the name of one of the prompts")
    return prompt


def _pooling_modes(config: Mapping[str, Any], path: Path) -> list[str]:
    """Returns the names of the modes, from ``pooling_mode`` or from the flags of older versions."""
    pooling_mode = config.get("pooling_mode")
    modes = pooling_mode
    if isinstance(pooling_mode, str):
        modes = [pooling_mode]
    elif pooling_mode is None:
        modes = [mode for key, mode in _LEGACY_MODES.items() if config.get(key) is True]
        if not modes:
            modes = ["mean"]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        refuse(path, f"pooling_mode is {pooling_mode!r}, expected a name or a list of names")
    return modes


def _optional(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one if there is no such file."""
    if not os.path.lexists(folder / name):
        return {}
    return read_json(checked_file(folder, name), max_bytes=MAX_CONFIG_BYTES)
