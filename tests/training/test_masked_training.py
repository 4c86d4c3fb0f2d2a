"""Runs of masked language modelling: masks and pairs are those of the epoch and the sample, also after a stop."""

import pytest
import torch

from bert_tasks.data.reading import read
from bert_tasks.data.splits import Splits
from bert_tasks.errors import StoppedError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.training.loop import Trainer
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.step import OptimizerSteps
from support.runs import digests, events
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES
from support.stopped_runs import signalling
from support.training_runs import make_steps, walk

ROWS = [{"text": "\n".join(LINES[i : i + 4]), "sentences": LINES[i : i + 4]} for i in range(0, 20, 4)]
SETTINGS = [{"whole_word_mask": True}, {"mask_smoothing": 0.7, "sentence_objective": "nsp"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, unigram_tokenizer):
    folder = tmp_path_factory.mktemp("bert")
    save_checkpoint(folder, "bert", unigram_tokenizer)
    return folder


def model_of(folder, settings):
    torch.manual_seed(0)
    return TaskModel.from_pretrained(folder, task=MaskedLanguageModeling.of(max_length=40, **settings))


def trainer(folder, output, settings):
    model = model_of(folder, settings)
    tables = [read(rows, model.task.columns, require_labels=False) for rows in (ROWS, ROWS[:2])]
    return Trainer(
        objective=model,
        splits=Splits(train=tables[0], validation={"": tables[1]}),
        optim=OptimSection(epochs=2, batch_size=4, learning_rate=1e-3, micro_batch_tokens=80),
        run=RunSection(output_dir=str(output), logging_steps=1, keep_checkpoints=True),
    )


@pytest.mark.parametrize("settings", slow_except(SETTINGS, SETTINGS[1]))
def test_a_stopped_run_ends_with_the_same_bits(folder, tmp_path, monkeypatch, settings):
    trainer(folder, tmp_path / "straight", settings).train(progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSteps, "update", signalling(OptimizerSteps.update, 2))
        with pytest.raises(StoppedError):
            trainer(folder, tmp_path / "stopped", settings).train(progress=False)
    trainer(folder, tmp_path / "stopped", settings).train(progress=False)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "straight")
    assert events(tmp_path / "stopped") == events(tmp_path / "straight")


class Recording(Supervised):
    """Keeps what it prepared: by epoch and number of the feature."""

    def __init__(self, model):
        super().__init__(model)
        self.seen = {}

    def prepare(self, features, keys, corpus):
        masked_features = super().prepare(features, keys, corpus)
        for number, feature in zip(keys.numbers, masked_features, strict=True):
            seen = (feature["input_ids"], feature["gather_positions"], feature["labels"], feature.get("fields"))
            assert self.seen.setdefault((keys.epoch, number), seen) == seen
        return masked_features


@pytest.mark.parametrize(("settings", "masking"), [(SETTINGS[0], "dynamic"), (SETTINGS[1], "static")])
def test_neither_batches_nor_micro_batches_change_a_mask(folder, settings, masking):
    seen = []
    for batch_size, micro_batch_tokens in ((8, 16384), (3, 50)):
        objective = Recording(model_of(folder, {**settings, "masking": masking}))
        sizes = {"batch_size": batch_size, "micro_batch_tokens": micro_batch_tokens, "epochs": 2}
        walk(make_steps(objective.model, ROWS, objective=objective, **sizes))
        seen.append(objective.seen)
    assert seen[0] == seen[1]
    epochs = [{number: content for (epoch, number), content in seen[0].items() if epoch == index} for index in (0, 1)]
    assert len(epochs[0]) == len(epochs[1]) >= len(ROWS)
    assert (epochs[0] == epochs[1]) == (masking == "static")
