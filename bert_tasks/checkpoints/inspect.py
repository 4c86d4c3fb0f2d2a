"""The report of ``bert-tasks inspect`` on a model folder and its problems.

It shows family, sizes, tokenizer, labels, and how each key is loaded. A key that does not fit is a line of the report
here, but a folder without a readable config.json or weights is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bert_tasks.checkpoints.adapters import model_weights
from bert_tasks.checkpoints.files import read_config
from bert_tasks.checkpoints.hub import is_model_file, resolve
from bert_tasks.checkpoints.load import LoadReport, match_weights
from bert_tasks.checkpoints.save import read_head_tensors
from bert_tasks.checkpoints.tokenizers import load_tokenizer, trained_segments
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import (
    ChoiceHead,
    PerTokenHead,
    PretrainingHead,
    ReplacedTokenHead,
    SequenceHead,
    VocabularyHead,
)
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.errors import CheckpointError
from bert_tasks.families import (
    CONFIG_KEY,
    copies_of_tied,
    encoder_config,
    family_of,
    head_kind,
    label_names,
    parameter_map,
    pooler_is_there,
)
from bert_tasks.families.base import Family
from bert_tasks.tables import Result


@dataclass(frozen=True, kw_only=True)
class Inspection(Result):
    """The content of a model folder.

    Attributes:
        folder: The folder, also of a hub id in the cache.
        family: ``model_type`` of the configuration.
        architectures: Classes of transformers that config.json names.
        head: Type of head, base, sequence, token or span, from ``architectures``. It is base for unknown classes.
        sizes: Dimensions, and numbers of parameters as this package builds the model.
        usable_length: Maximum length of an input in tokens, including special tokens.
        dtypes: Dtypes of the file's tensors, which are float32 after loading.
        report: Report of the loader for every key.
        head_keys: Names in task_head.safetensors.
        tokenizer: Class name. None if there is no tokenizer or it does not load (then ``problems`` says why).
        tokenizer_vocabulary: Number of its tokens.
        labels: Names in the order of their ids.
        task: Name of the task if this package saved the folder.
        files: Bytes of each file, by name.
        problems: Reasons why the folder cannot be used as it is.
    """

    folder: str
    family: str
    architectures: tuple[str, ...]
    head: str
    sizes: Mapping[str, int]
    usable_length: int
    dtypes: tuple[str, ...]
    report: LoadReport
    head_keys: tuple[str, ...]
    tokenizer: str | None
    tokenizer_vocabulary: int | None
    labels: tuple[str, ...]
    task: str | None
    files: Mapping[str, int]
    problems: tuple[str, ...]

    def lines(self, *, verbose: bool = False) -> list[str]:
        """Returns the lines of the report for a terminal. With ``verbose`` they also name every key."""
        sizes = self.sizes
        family = self.family
        if self.architectures:
            family = f"{self.family} ({', '.join(self.architectures)})"
        tokenizer = "none"
        if self.tokenizer is not None:
            tokenizer = f"{self.tokenizer}, {self.tokenizer_vocabulary} tokens"
        entries = {
            "folder": self.folder,
            "family": family,
            "head": self.head,
            "task": self.task,
            "labels": ", ".join(self.labels),
            "sizes": f"hidden {sizes['hidden']}, layers {sizes['layers']}, heads {sizes['heads']}",
            "vocabulary": f"{sizes['vocabulary']} tokens",
            "parameters": f"{sizes['parameters']:,} ({sizes['embedding_parameters']:,} of them in the embeddings)",
            "usable length": f"{self.usable_length} tokens",
            "stored as": ", ".join(self.dtypes),
            "tokenizer": tokenizer,
            "files": ", ".join(f"{name} ({size:,} bytes)" for name, size in self.files.items()),
        }
        loaded = "loaded"
        if self.report.renamed:
            loaded = f"loaded ({self.report.renamed} under another name in the file)"
        listed = {
            loaded: self.report.loaded,
            "dropped": self.report.dropped,
            "ignored": self.report.ignored,
            "in task_head.safetensors": self.head_keys,
            "problem": self.problems,
        }
        lines = [f"{name + ':':<15}{value}" for name, value in entries.items() if value]
        for title, names in listed.items():
            if names:
                lines.append(f"{title}: {len(names)}")
            if verbose or title == "problem":
                lines += [f"  {name}" for name in names]
        return lines


def inspect_checkpoint(name: str | Path, *, revision: str | None = None) -> Inspection:
    """Reads the files of a model and compares them with what the model needs, without building it.

    ``bert-tasks inspect`` shows the result. It costs the reading of all weights, and downloads a hub id.

    Args:
        name: A folder, ``package:NAME/PATH`` or a hub id, as for ``hub.resolve``.
        revision: Branch, tag or commit of a hub id.

    Raises:
        CheckpointError: The model does not exist, its family is not supported, or a file is damaged.
    """
    folder = resolve(name, revision=revision)
    hf_config = read_config(folder)
    family, config = family_of(hf_config), encoder_config(hf_config)
    head = head_kind(hf_config)
    if head is None:
        head = "base"
    labels = _labels(hf_config, head)
    shapes, names = _expected(family, config, head, num_labels=len(labels))
    tensors = model_weights(folder, family)
    # Many base models were saved without their pooler, which only the sequence head reads, so it may be missing.
    if not pooler_is_there(family, tensors):
        names = {key: sources for key, sources in names.items() if not key.startswith("pooler.")}
        shapes = {key: shapes[key] for key in names}
    copies = copies_of_tied(family, config, names, head=head)
    matched = match_weights(tensors, names, shapes=shapes, family=family, copies=copies, copy=False, strict=False)
    problems = list(matched.problems)
    head_keys: tuple[str, ...] = ()
    head_tensors = read_head_tensors(folder)
    if head_tensors is not None:
        head_keys = tuple(sorted(head_tensors))
    tokenizer_class, tokenizer_vocabulary = None, None
    try:
        tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size, required=False)
        if tokenizer is not None:
            tokenizer = trained_segments(tokenizer, second=config.second_segment)
            tokenizer_class, tokenizer_vocabulary = type(tokenizer).__name__, len(tokenizer)
    except CheckpointError as error:
        problems.append(str(error))
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list):
        architectures = []
    task = None
    settings = hf_config.get(CONFIG_KEY)
    if isinstance(settings, dict) and "task" in settings:
        task = str(settings["task"])
    # Only of parameters, because old files also hold buffers of integers.
    dtypes = {str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and is_model_file(file.name)]
    return Inspection(
        folder=str(folder),
        family=family.model_type,
        architectures=tuple(map(str, architectures)),
        head=head,
        sizes=_sizes(config, shapes),
        usable_length=config.usable_length,
        dtypes=tuple(sorted(dtype.removeprefix("torch.") for dtype in dtypes)),
        report=matched.report,
        head_keys=head_keys,
        tokenizer=tokenizer_class,
        tokenizer_vocabulary=tokenizer_vocabulary,
        labels=labels,
        task=task,
        files={file.name: file.stat().st_size for file in files},
        problems=tuple(problems),
    )


def _sizes(config: EncoderConfig, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    """Returns the dimensions of a model, and the numbers of its parameters."""
    numbers = {key: shape.numel() for key, shape in shapes.items()}
    return {
        "hidden": config.hidden_size,
        "layers": len(config.layer_order),
        "heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "parameters": sum(numbers.values()),
        "embedding_parameters": sum(numbers[key] for key in numbers if key.startswith("encoder.embeddings.")),
    }


def _expected(
    family: Family, config: EncoderConfig, head: str, *, num_labels: int
) -> tuple[dict[str, torch.Size], dict[str, tuple[str, ...]]]:
    """Returns shapes and Hugging Face names of the parameters, including the pooler."""
    pooler = head == "base" and family.pooler is not None
    # The meta device has shapes and no numbers, so even a model of many gigabytes is described at once.
    with torch.device("meta"):
        model = nn.ModuleDict({"encoder": TransformerEncoder(config)})
        if pooler:
            model["pooler"] = nn.Linear(config.hidden_size, config.hidden_size)
        match head:
            case "sequence":
                model["head"] = SequenceHead(config, num_labels)
            case "token":
                model["head"] = PerTokenHead(config, num_labels, dropout=0.0)
            case "span":
                model["head"] = PerTokenHead(config, 2, dropout=0.0)  # a span's start and its end
            case "masked-lm":
                model["head"] = VocabularyHead(config)
            case "choice":
                model["head"] = ChoiceHead(config)
            case "pretraining":
                model["head"] = PretrainingHead(config)
            case "replaced-token":
                model["head"] = ReplacedTokenHead(config)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    return shapes, parameter_map(family, config, head=head, pooler=pooler)


def _labels(hf_config: Mapping[str, Any], head: str) -> tuple[str, ...]:
    """Returns the names of the labels by id. A classifier without names has transformers' default names."""
    names = label_names(hf_config)
    if names or isinstance(hf_config.get("id2label"), dict):
        return names
    if head not in ("sequence", "token"):
        return ()
    number = hf_config.get("num_labels")
    if number is None:
        number = 2  # the default of transformers
    return tuple(f"LABEL_{index}" for index in range(number))
