"""The linear probe: a head that is fitted to the vectors of a frozen encoder, in seconds.

The run has one step, over all training rows. The encoder computes the vector of each row once, as in evaluation, and
scikit-learn fits the last linear layer of the head to them (``outputs/linear_probe.py``). Layers of the head below it,
such as BERT's pooler, stay as they were loaded. All else, from evaluation to the saved model, is as in other runs.

Source: Alain and Bengio, Understanding intermediate layers using linear classifier probes (arXiv:1610.01644).

Shape legend: S rows, H hidden.
"""

from typing import cast

import numpy as np
import torch
from accelerate import Accelerator

from bert_tasks.data.features import Samples
from bert_tasks.data.rows import Rows
from bert_tasks.encoder.heads import SequenceHead
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import forward_windows
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.linear_probe import LinearlyFitted, Numbers
from bert_tasks.outputs.samples import row_logits
from bert_tasks.training.objectives import Objective, Supervised

_FITTED = "head.output."
_OF_OTHER_LOSSES = ("focal_gamma", "label_smoothing", "ranking_loss")


def freeze_below_output(objective: Objective, accelerator: Accelerator) -> None:
    """Freezes all parameters but those of the layer that is fitted, or raises UsageError if none can be."""
    model = objective.model
    if accelerator.num_processes > 1 or not isinstance(objective, Supervised) or not isinstance(model, TaskModel):
        raise UsageError("optim.linear_probe needs one process and one task without a teacher. Remove it to train")
    output = model.task.output
    if not isinstance(output, LinearlyFitted) or not isinstance(model.head, SequenceHead):
        raise UsageError("optim.linear_probe fits classes, labels or a number of texts and pairs. Fine-tune this task")
    for name, setting in output.own_settings().items():
        if name in _OF_OTHER_LOSSES and getattr(output, name) != setting.default:
            raise UsageError(f"optim.linear_probe has the loss of scikit-learn. Remove settings.{name}, or fine-tune")
    state = model.state_dict()
    for name, drawn in model.drawn.items():
        if not name.startswith(_FITTED) and torch.equal(state[name].to(drawn), drawn):
            raise UsageError(
                f"optim.linear_probe: {name} is new, so the probe would read the features of random weights. Set "
                'settings.pooling = "mean", whose head has no such layer, or remove linear_probe to fine-tune'
            )
    for name, parameter in model.named_parameters():
        if not name.startswith(_FITTED):
            parameter.requires_grad_(False)


def fit_output_layer(model: TaskModel, samples: Samples, rows: Rows, *, seed: int) -> None:
    """Fits the last layer of the head to rows with labels, whose features are ``samples``.

    ``seed`` decides which rows are in which fold of the cross-validation.
    """
    output = model.task.output
    labels = np.array([output.encode(row) for row in rows])
    weight, bias = cast(LinearlyFitted, output).fit_linear(head_inputs(model, samples), labels, seed=seed)
    with torch.no_grad():
        model.head.output.weight.copy_(torch.from_numpy(weight))
        model.head.output.bias.copy_(torch.from_numpy(bias))


def head_inputs(model: TaskModel, samples: Samples) -> Numbers:
    """Returns ``[S, H]`` what the last layer of the head reads for each row, in evaluation mode.

    A mean over the windows of a row, or over its tokens in a head that pools logits, is the same before a linear layer
    as behind it. So the layer passes on what it reads, and the rest of the model does the pooling.
    """
    features = cast("list[Feature]", samples.whole_features_of(range(len(samples))))
    with model.head.output.register_forward_hook(lambda _, inputs, __: inputs[0]):
        windows = forward_windows(model, features)  # [H] of each window
    vectors: Numbers = row_logits(windows, features).to(torch.float64).numpy()
    return vectors
