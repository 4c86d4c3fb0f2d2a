"""Replaced-token detection, the pre-training of ELECTRA.

The model detects which tokens replace others (Clark et al., arXiv:2003.10555). A small masked language model, the
generator, makes the inputs of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.replaced import Replaced, ReplacedTokenPrediction
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.corpus import CorpusTask
from bert_tasks.tasks.masked_language_modeling import MaskedLanguageModeling
from bert_tasks.tasks.masking import mask_features

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ReplacedTokens(CorpusTask[ReplacedTokenPrediction]):
    """Documents with replaced tokens. The generator has the settings of masking.

    As pre-training it needs less computation than masked language modelling for the same quality, because all tokens
    are trained, not 15 of 100 (Clark et al., https://arxiv.org/abs/2003.10555). It takes memory for two models, of
    which the generator is not used any more after training.

    Attributes:
        mask_replace_prob: Share of the predicted tokens that the mask token replaces. ELECTRA masks 85 of 100.
        random_replace_prob: Share of the predicted tokens that random tokens replace. The rest is not changed.
        generator_size: Width of the generator as a share of the model's width. Both have the same number of layers.

    Examples:
        >>> model = TaskModel.from_pretrained("google/electra-small-discriminator", task=ReplacedTokens)
        >>> model.predict("The soup was cold.")[0].scores
    """

    name: ClassVar[str] = "replaced-token-detection"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Replaced,)
    output: Replaced
    mask_replace_prob: float = 0.85
    random_replace_prob: float = 0.0
    generator_size: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.generator_size
        require(0 < size <= 1, f"generator_size is {size}, expected a share above 0 and at most 1")

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows as for masked language modelling, whose tokens are all read."""
        return [{**window, "gather_positions": None} for window in super().features(rows, tokenizer)]

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> Sequence[Feature]:
        """Returns features with masked tokens and a uniform number for each draw."""
        masked = mask_features(features, keys, corpus, tokenizer, self.rule)
        prepared: list[Feature] = []
        for feature, number in zip(masked, keys.numbers, strict=True):
            # Drawn here and not on the device, so that a step draws the same tokens on every device and process. The 1
            # makes them independent of the numbers by which positions were masked.
            generator = np.random.default_rng((keys.seed, keys.epoch, number, 1))
            labels = feature.get("labels")
            uniforms: list[float] = []
            if labels is not None:
                uniforms = generator.random(len(labels)).tolist()
            prepared.append({**feature, "fields": {heads.UNIFORM: uniforms}})
        return prepared

    def head(self, config: EncoderConfig) -> Head:
        return heads.ReplacedTokenHead(config)

    def generator(self) -> tuple[MaskedLanguageModeling, float]:
        """Returns the masked language model that replaces tokens, and its width as a fraction."""
        return MaskedLanguageModeling.of(max_length=self.max_length), self.generator_size
