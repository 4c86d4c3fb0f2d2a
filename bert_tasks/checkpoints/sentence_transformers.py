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
    transformer, prompts = _optional(folder, _TRANSFORMER), _optional(folder, _PROMPTS)
    length = transformer.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        refuse(folder / _TRANSFORMER, f"max_seq_length is {length!r}, expected a number of tokens")
    further = [module for module in kinds if module not in (*_IGNORED, "Pooling")]
    source, pooling, unsupported, pools_prompt = MODULES, None, f"{MODULES} lists no pooling", True
    if "Pooling" in kinds:
        source = str(PurePosixPath(kinds["Pooling"], "config.json"))
        config = read_json(checked_file(folder, source), max_bytes=MAX_CONFIG_BYTES)
        modes, pools_prompt = _pooling_modes(config, folder / source), config.get("include_prompt") is not False
        pooling = modes[0] if len(modes) == 1 and modes[0] in _MODES else None
        unsupported = f"{source} asks for {' and '.join(modes)} pooling"
    if further:
        pooling, unsupported = None, f"{MODULES} lists the further module {further[0]}"
    return SentenceSettings(
        pooling=pooling,
        source=source,
        max_length=length,
        unsupported=unsupported if pooling is None else None,
        prompt=_default_prompt(prompts, folder / _PROMPTS),
        pools_prompt=pools_prompt,
        lowercase=transformer.get("do_lower_case") is True,
    )


def _modules(folder: Path) -> dict[str, str]:
    """Maps the class name of each module to its folder, in order."""
    path = checked_file(folder, MODULES)
    entries = read_json_value(path, max_bytes=MAX_CONFIG_BYTES)
    folders: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        module_type, folder_name = map((entry if isinstance(entry, Mapping) else {}).get, ("type", "path"))
        if not isinstance(module_type, str) or not isinstance(folder_name, str):
            refuse(path, "expected a list of modules, each with a type and a path")
        if PurePosixPath(folder_name).is_absolute() or ".." in PurePosixPath(folder_name).parts or "\0" in folder_name:
            refuse(path, f"the path {folder_name!r} leads out of the folder")
        folders[module_type.rpartition(".")[2]] = folder_name
    return folders


def _default_prompt(config: Mapping[str, Any], path: Path) -> str:
    default, prompts = config.get("default_prompt_name"), config.get("prompts")
    if default is None:
        return ""
    prompt = prompts.get(default) if isinstance(prompts, Mapping) and isinstance(default, str) else None
    if not isinstance(prompt, str):
        refuse(path, f"default_prompt_name is {default!r}, expected the name of one of the prompts")
    return prompt


def _pooling_modes(config: Mapping[str, Any], path: Path) -> list[str]:
    pooling_mode = config.get("pooling_mode")
    modes = [pooling_mode] if isinstance(pooling_mode, str) else pooling_mode
    if modes is None:
        modes = [mode for key, mode in _LEGACY_MODES.items() if config.get(key) is True]
        modes = modes if modes else ["mean"]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        refuse(path, f"pooling_mode is {pooling_mode!r}, expected a name or a list of names")
    return modes


def _optional(folder: Path, name: str) -> dict[str, Any]:
    if not os.path.lexists(folder / name):
        return {}
    return read_json(checked_file(folder, name), max_bytes=MAX_CONFIG_BYTES)
