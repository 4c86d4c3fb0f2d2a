"""The configuration of low-rank adapters in a folder of the library peft.

This module owns what ``adapter_config.json`` means: for which model the adapters are, their ranks and scales, and which
of peft's options this package does not compute. The format is documented at https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, refuse
from bert_tasks.checkpoints.hub import ADAPTER_CONFIG, resolve
from bert_tasks.data.issues import shortened
from bert_tasks.errors import CheckpointError

TASK_TYPES = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS", "span": "QUESTION_ANS"}
# Fields of peft's configuration that change what adapters compute, with the values that this package computes.
_SUPPORTED: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "use_qalora": False,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "trainable_token_indices": None,
}
_USUAL = 8  # rank and alpha of peft, if a configuration states none

ValueT = TypeVar("ValueT", int, float)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What adapters compute, and for which model.

    Attributes:
        base: Name of the model that the adapters belong to.
        head: Type of the head that they were trained with. None if unknown.
        rank: R, the rank of the adapters of all modules that no pattern of ``ranks`` fits.
        alpha: The numerator of the scale of all modules that no pattern of ``alphas`` fits.
        ranks: Pairs of a pattern of names of modules, and the rank of these modules.
        alphas: Pairs of a pattern of names of modules, and the numerator of the scale of these modules.
        has_root: True if the scale is ``alpha / sqrt(R)`` (rsLoRA, arXiv:2312.03732), not ``alpha / R``.
    """

    base: str
    head: str | None
    rank: int
    alpha: float
    ranks: Sequence[tuple[re.Pattern[str], int]]
    alphas: Sequence[tuple[re.Pattern[str], float]]
    has_root: bool

    def rank_of(self, module: str) -> int:
        """Returns R of the adapter of a module."""
        return _of_module(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of ``B A`` of a module."""
        rank = self.rank_of(module)
        # Plain LoRA divides by R, so a larger R makes every adapter's change smaller. rsLoRA shows that the size of the
        # change stays the same if the divisor is the root of R.
        divisor: float = rank
        if self.has_root:
            divisor = math.sqrt(rank)
        return _of_module(self.alphas, module, self.alpha) / divisor


def _of_module(patterns: Sequence[tuple[re.Pattern[str], ValueT]], module: str, usual: ValueT) -> ValueT:
    """Returns the value of the first pattern that fits a module's name."""
    for pattern, value in patterns:
        if pattern.match(module):
            return value
    return usual


def is_adapter(folder: Path) -> bool:
    """Returns True for a folder of peft, which holds adapters and perhaps the weights of a model, too."""
    return os.path.lexists(folder / ADAPTER_CONFIG)


def has_only_adapters(folder: Path) -> bool:
    """Returns True for a folder with adapters and no weights of a model."""
    return is_adapter(folder) and not (folder / "model.safetensors").exists()


def base_folder(folder: Path, name: str) -> Path:
    """Returns the folder of the base that the configuration of adapters names.

    Raises:
        CheckpointError: There is no such model, or it is another folder of adapters.
    """
    base = resolve(name)
    if has_only_adapters(base):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {name!r}, which has only adapters, too. Write the "
            "name of the model that the adapters were trained on"
        )
    return base


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Returns the configuration of a folder of peft.

    Raises:
        CheckpointError: It is damaged, or it has adapters of another type.
    """
    path = checked_file(folder, ADAPTER_CONFIG)
    config = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    for name, value in _SUPPORTED.items():
        if config.get(name, value) != value:
            refuse(path, f"{name} = {config[name]!r} is not supported, expected {value!r}")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        refuse(path, "base_model_name_or_path does not name the model that the adapters belong to")
    has_root = config.get("use_rslora", False)
    if not isinstance(has_root, bool):
        refuse(path, f"use_rslora is {has_root!r}, expected true or false")
    head = None
    for kind, name in TASK_TYPES.items():
        if name == config.get("task_type"):
            head = kind
    return AdapterConfig(
        base=base,
        head=head,
        rank=_rank(path, "r", config.get("r", _USUAL)),
        alpha=_alpha(path, "lora_alpha", config.get("lora_alpha", _USUAL)),
        ranks=_patterns(path, "rank_pattern", config.get("rank_pattern"), _rank),
        alphas=_patterns(path, "alpha_pattern", config.get("alpha_pattern"), _alpha),
        has_root=has_root,
    )


def _rank(path: Path, name: str, value: Any) -> int:
    """Returns a rank, or refuses the file."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(path, f"{name} is {shortened(value)}, expected a whole number from 1")
    return value


def _alpha(path: Path, name: str, value: Any) -> float:
    """Returns the numerator of a scale, or refuses the file."""
    # True and False are numbers to Python, but in JSON they are not.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    alpha = math.nan
    if is_number:
        try:
            alpha = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            alpha = math.inf
    if not math.isfinite(alpha):
        refuse(path, f"{name} is {shortened(value)}, expected a finite number")
    return alpha


def _patterns(
    path: Path, name: str, value: Any, check: Callable[[Path, str, Any], ValueT]
) -> Sequence[tuple[re.Pattern[str], ValueT]]:
    """Returns pairs of a pattern and its value, checked by ``check``.

    The keys are regular expressions. They fit the last components of a name, as in peft's ``get_pattern_key``
    (https://github.com/huggingface/peft/blob/main/src/peft/utils/other.py).
    """
    if value is None:
        return ()
    if not isinstance(value, dict):
        refuse(path, f"{name} is {shortened(value)}, expected an object of patterns and their values")
    checked = []
    for key, of_key in value.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about syntax that a later Python may read differently
                pattern = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            refuse(path, f"{name} has the key {shortened(key)}, which is no regular expression ({error})")
        checked.append((pattern, check(path, f"{name}[{shortened(key)}]", of_key)))
    return checked
