"""Replaced token detection, the objective of ELECTRA (Clark et al., arXiv:2003.10555).

A small masked language model, the generator, fills masked positions with tokens that it draws. The discriminator, which
is the model that is saved, tells for each token whether it was replaced. Owns the loss of both and the making of the
generator.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from bert_tasks.encoder.heads import ReplacedTokenOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.families import family_of
from bert_tasks.inference.replaced_tokens import replaced_token_output
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import loss_terms
from bert_tasks.outputs.base import LossTerm
from bert_tasks.training import files as outputs
from bert_tasks.training.objectives import Objective

_HEAD_SIZE = 64  # size of the generator's attention heads, as in ELECTRA


class ReplacedTokenDetection(Objective):
    """The loss of a generator and of a discriminator, which is the model.

    Both share the tables of words, positions and segments and the norm after them. No gradient goes from the
    discriminator to the generator, because drawing a token cannot be differentiated. So the two are no adversaries, and
    both losses are minimised together.

    Attributes:
        model: The discriminator.
        generator: A masked language model.
    """

    allows_graphs: ClassVar[bool] = True
    model: TaskModel

    def __init__(self, model: TaskModel, generator: TaskModel) -> None:
        """Ties the embeddings of the generator to those of the model.

        Raises:
            UsageError: The embeddings of the two models differ in shape.
        """
        super().__init__(model)
        shared, theirs = model.encoder.embeddings, generator.encoder.embeddings
        for name in ("word", "position", "token_type", "norm"):
            shapes = [[value.shape for value in getattr(module, name).parameters()] for module in (shared, theirs)]
            if shapes[0] != shapes[1]:
                raise UsageError(f"the generator's {name} embeddings are not of the model's size")
            setattr(theirs, name, getattr(shared, name))
        self.generator = generator.eval()  # until a run trains it

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        output = self.output_of(batch)
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return loss_terms(self.model, output, batch)

    def output_of(self, batch: PackedBatch) -> ReplacedTokenOutput:
        """Runs the generator on the masked tokens, and the discriminator on those that the generator drew."""
        return replaced_token_output(batch, generator=self.generator, discriminator=self.model)

    @property
    def forward_fn(self) -> ForwardFn:
        return self.output_of

    @property
    def further_models(self) -> Mapping[str, TaskModel]:
        return {outputs.GENERATOR: self.generator}

    @property
    def notes(self) -> tuple[str, ...]:
        generator_size = sum(value.numel() for name, value in self.named_parameters() if name.startswith("generator."))
        width = self.generator.config.hidden_size
        return (f"generator: hidden size {width}, {generator_size:,} parameters beside the embeddings of the model",)


def make_generator(model: TaskModel, *, seed: int) -> TaskModel:
    """Returns a new generator, which is narrower than the model and has as many layers.

    Its embeddings have the shape of the model's, because `ReplacedTokenDetection` replaces them by the model's.

    Raises:
        UsageError: The task has no generator.
    """
    generator_task = model.task.generator()
    if generator_task is None:
        raise UsageError(f"{model.task.name} has no generator")
    task, share = generator_task
    config, fields = model.config, family_of(model.hf_config).fields
    width = max(1, round(share * config.hidden_size))
    # The largest number of heads that divides the width, with heads of at least the usual size.
    heads = next(count for count in range(max(1, width // _HEAD_SIZE), 0, -1) if width % count == 0)
    sizes = {
        "hidden_size": width,
        "embedding_size": config.embedding_size,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    changed = {fields[name][0]: value for name, value in sizes.items()}  # by the names of transformers' config
    # The weights depend on the seed of the run alone, and the random numbers of the caller stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TaskModel({**model.hf_config, **changed}, task, tokenizer=model.require_tokenizer())
