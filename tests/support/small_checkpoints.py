"""Owns small checkpoint folders: a transformers model of any family with a tokenizer of its kind, as transformers saves
them. Texts fit 48 tokens.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.hf_models import AFTER_PADDING, Head, hf_class, hf_config, widen


def save_checkpoint(
    folder: Path,
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    head: Head = "base",
    labels: Sequence[str] = (),
    problem_type: Literal["regression", "multi_label_classification"] | None = None,
    wide: bool = False,
    positions: int = 48,
) -> PreTrainedModel:
    """Saves a model of two layers and returns it.

    ``wide``: weights as in parity tests, so that logits differ. ``positions``: the longest input in tokens.
    """
    rows = positions + (2 if family in AFTER_PADDING else 0)
    config = hf_config(
        family,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        initializer_range=0.1,
        max_position_embeddings=rows,
        num_labels=2 if head == "span" else 3,
        # Both kinds of layers. By default the first two are local, which no published model has.
        **({"layer_types": ["full_attention", "sliding_attention"]} if family == "ultrabert" else {}),
    )
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = problem_type
    torch.manual_seed(0)
    options: dict[str, Any] = (
        {"add_pooling_layer": False} if head == "base" and family in ("bert", *AFTER_PADDING) else {}
    )
    model = hf_class(family, head)(config, **options).eval()
    if wide:
        widen(model, seed=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def tokenizer_of(family: str, by_kind: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """Of the kind of the family's published models; WordPiece for most."""
    kinds = {"roberta": "bpe", "albert": "unigram", "xlm-roberta": "multilingual", "camembert": "french"}
    kinds |= {"roberta-prelayernorm": "bpe", "xlm-roberta-xl": "multilingual"}
    kinds |= {"mpnet": "mpnet", "modernbert": "modern", "deberta-v2": "deberta", "eurobert": "llama"}
    kinds |= {"gte": "multilingual"}
    return by_kind[kinds.get(family, "wordpiece")]


def edit_config(folder: Path, **changes: Any) -> None:
    """Replaces keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def copied(source: Path, target: Path) -> Path:
    """A copy of a folder of files that a test may change."""
    return Path(shutil.copytree(source, target, copy_function=shutil.copyfile))
