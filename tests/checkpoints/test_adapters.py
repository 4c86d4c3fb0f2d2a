"""Adapters in the format of peft: what PeftModel opens around stock transformers, and what peft has written."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import Encoder, TaskModel, families, fit
from bert_tasks.checkpoints.adapters import model_weights
from bert_tasks.errors import CheckpointError, UsageError
from support.hf_models import FAMILIES, hf_class
from support.sampling import slow_except
from support.small_checkpoints import copied, save_checkpoint, tokenizer_of
from support.task_examples import EXAMPLES

# peft asks transformers for an attribute that it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

ROBERTA = families.FAMILIES["roberta"]
EVERY = ("query", "key", "value", "attention_output", "intermediate", "output")
SETTINGS = {
    "epochs": 2,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "lora_rank": 2,
    "lora_alpha": 3.0,
    "save_adapter": True,
}


def trained(folder: Path, case: str = "single", **settings: Any) -> TaskModel:
    """A model of the base in ``folder`` with trained adapters, which are in ``folder/run/adapter``."""
    example = EXAMPLES[case]
    model = TaskModel.from_pretrained(folder / "base", task=example.task)
    rows = list(example.rows)
    fit(model, rows, rows, output_dir=folder / "run", **{"progress": False} | SETTINGS | settings)
    return model


def logits_of(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


# Of the others each has other modules or names, which the adapters of a saved model must have, too.
@pytest.mark.parametrize("family", slow_except(FAMILIES, "roberta"))
def test_peft_opens_them_around_stock_transformers(
    family: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(family, by_kind)
    save_checkpoint(tmp_path / "base", family, tokenizer, wide=True)
    ours = trained(tmp_path, lora_targets=EVERY)
    adapter = tmp_path / "run" / "adapter"
    base = hf_class(family, "sequence").from_pretrained(tmp_path / "base", num_labels=3)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    texts = [row["text"] for row in EXAMPLES["single"].rows[:4]]
    logits = torch.tensor([prediction.logits for prediction in ours.predict(texts, logits=True)])
    stock = logits_of(theirs, ours.require_tokenizer(), texts)
    assert (stock - logits).abs().max() < 1e-4 * logits.abs().max()
    opened = TaskModel.from_pretrained(adapter)
    assert opened.task == ours.task
    read = torch.tensor([prediction.logits for prediction in opened.predict(texts, logits=True)])
    assert (read - logits).abs().max() < 1e-5 * logits.abs().max()
    assert len(load_file(adapter / "adapter_model.safetensors")) > 12  # of two layers


@pytest.mark.slow  # it trains
@pytest.mark.parametrize("case", ["token", "span"])
def test_heads_of_every_kind(case: str, bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer, wide=True)
    ours = trained(tmp_path, case)
    rows = list(EXAMPLES[case].rows)
    opened = TaskModel.from_pretrained(tmp_path / "run" / "adapter")
    for prediction, other in zip(ours.predict(rows), opened.predict(rows), strict=True):
        assert prediction.to_json().keys() == other.to_json().keys()
    for name, value in ours.state_dict().items():
        assert (opened.state_dict()[name] - value).abs().max() < 1e-5


def test_what_peft_has_written_is_read(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer, wide=True)
    stock = hf_class("roberta", "sequence").from_pretrained(tmp_path / "base", num_labels=3)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=6, use_rslora=True, target_modules=["query", "output.dense"]
    )
    theirs = peft.get_peft_model(stock, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    texts = [row["text"] for row in EXAMPLES["single"].rows[:4]]
    expected = logits_of(theirs, bpe_tokenizer, texts)
    ours = TaskModel.from_pretrained(
        tmp_path / "adapter", task="sequence-classification", labels=["a", "b", "c"], max_length=40
    )
    logits = torch.tensor([prediction.logits for prediction in ours.predict(texts, logits=True)])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    merged = theirs.merge_and_unload().roberta
    vectors = Encoder.from_pretrained(tmp_path / "adapter").embed(texts, normalize=False)
    with torch.inference_mode():
        hidden = [merged(**bpe_tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for text in texts]
    assert (torch.as_tensor(vectors) - torch.stack(hidden)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def adapted(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and trained adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    save_checkpoint(folder / "base", "roberta", bpe_tokenizer, wide=True)
    trained(folder)
    return folder


@pytest.fixture
def adapter(adapted: Path, tmp_path: Path) -> Path:
    """A copy of the adapters that a test may damage."""
    return copied(adapted / "run" / "adapter", tmp_path / "adapter")


def test_a_model_without_adapters_saves_none(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer, wide=True)
    model = TaskModel.from_pretrained(tmp_path / "base", task=EXAMPLES["single"].task)
    with pytest.raises(UsageError, match=r"no adapters to save. Train it with lora_rank"):
        model.save_adapter(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no adapters to save. Train it with lora_rank"):
        trained(tmp_path, lora_rank=None, lora_alpha=None)  # before the first step
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # it trains twice
def test_a_run_that_replaces_another_leaves_no_adapters_of_it(
    bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer, wide=True)
    trained(tmp_path)
    assert (tmp_path / "run" / "adapter").exists()
    trained(tmp_path, save_adapter=False, overwrite=True)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"adapter_config\.json: use_dora = True is not supported, expected False"),
        ({"base_model_name_or_path": None}, r"base_model_name_or_path does not name the model"),
        ({"lora_alpha": "much"}, r"adapter_config\.json: lora_alpha is 'much', expected a finite number"),
        ({"lora_alpha": True}, r"lora_alpha is True, expected a finite number"),
        ({"lora_alpha": 10**400}, r"lora_alpha is 10{59}0*\.\.\. \(401 characters\), expected a finite number"),
        ({"alpha_pattern": {"query": 10**400}}, r"alpha_pattern\['query'\] is 1.*, expected a finite number"),
        ({"alpha_pattern": ["a"]}, r"alpha_pattern is \['a'\], expected an object of patterns"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has the key '\(', which is no regular expression"),
        ({"r": 0}, r"r is 0, expected a whole number from 1"),
        ({"r": 2.0}, r"r is 2\.0, expected a whole number from 1"),
        ({"r": 7}, r"query\.lora_A\.weight has rank 2, but adapter_config\.json says 7"),
        ({"rank_pattern": {"value": 10**30}}, r"value\.lora_A\.weight has rank 2, but adapter_config.json says 10{30}"),
        ({"rank_pattern": {"query": None}}, r"rank_pattern\['query'\] is None, expected a whole number from 1"),
        ({"use_rslora": "x"}, r"use_rslora is 'x', expected true or false"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication = \[\[0, 2\]\] is not supported, expected None"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(change: dict[str, Any], message: str, adapter: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(CheckpointError, match=message):
        model_weights(adapter, ROBERTA)


def test_tensors_that_cannot_be_read_are_named(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    first, second = (
        next(name for name in weights if name.endswith(half)) for half in ("lora_A.weight", "lora_B.weight")
    )
    matrix = weights[second]
    half_is_missing = r"{}\.weight is there, but .*{}\.weight is missing"
    for changes, message in (
        ({second: matrix[:-1].clone()}, r"lora_A\.weight fits no weight of .*base, so it belongs to another"),
        ({second: matrix.to(torch.complex64)}, r"lora_B\.weight has dtype torch.complex64, expected floating"),
        ({second: matrix.to(torch.int32)}, r"lora_B\.weight has dtype torch.int32, expected floating"),
        ({second: None}, half_is_missing.format("lora_A", "lora_B")),
        ({first: None}, half_is_missing.format("lora_B", "lora_A")),
        ({first: weights[first][:0].clone(), second: matrix[:, :0].clone()}, r"has rank 0, but .* says 2"),
        ({first: matrix[0].clone()}, r"fits no weight of .*base"),
        ({name: None for name in weights if "lora_" in name}, r"it has no adapters, which would be called"),
    ):
        tensors = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
        save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            model_weights(adapter, ROBERTA)


def test_a_base_that_has_only_adapters_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = copied(adapter, tmp_path / "other")
    content = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    for own, named in ((adapter, adapter), (adapter, other), (other, adapter)):
        changed = json.dumps(content | {"base_model_name_or_path": str(named)})
        (own / "adapter_config.json").write_text(changed, "utf-8")
        with pytest.raises(CheckpointError, match=r"base_model_name_or_path is '.*', which has only adapters, too"):
            TaskModel.from_pretrained(own)
    (adapter / "config.json").unlink()  # as peft leaves it
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path is '.*', which has only adapters, too"):
        TaskModel.from_pretrained(adapter)


LAYER = "encoder.layer.0.attention.self"


@pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize(
    ("ranks", "alphas", "has_root"),
    [
        ({"query": 2}, {"value": 5}, False),
        ({}, {f"roberta.{LAYER}.query": 5, "query": 3, "self.value": 7}, False),  # the first that fits counts
        ({r"layer\.\d+\.attention\.self\.(query|value)": 2}, {"attention.self.query": 5, "self": 9}, False),
        ({"layer.1.attention.self.key": 3}, {"encoder|query": 5, "": 9, "dense": 7, "^value": 11}, True),
    ],
)
def test_patterns_count_as_peft_counts_them(
    ranks: dict[str, int],
    alphas: dict[str, int],
    has_root: bool,
    bpe_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer, wide=True)
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=4,
        lora_alpha=6,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=has_root,
        target_modules=["query", "key", "value", "output.dense"],
        init_lora_weights=False,  # both matrices are random
    )
    stock = hf_class("roberta", "sequence")
    peft.get_peft_model(stock.from_pretrained(tmp_path / "base", num_labels=3), config).save_pretrained(
        tmp_path / "adapter"
    )
    # What peft opens: its file has the patterns in another order.
    theirs = peft.PeftModel.from_pretrained(
        stock.from_pretrained(tmp_path / "base", num_labels=3), tmp_path / "adapter"
    )
    expected = theirs.merge_and_unload().state_dict()
    merged = model_weights(tmp_path / "adapter", ROBERTA)
    adapted = [name for name in merged if name.endswith(("query.weight", "key.weight", "value.weight", "dense.weight"))]
    adapted = [name for name in adapted if name.startswith("encoder.")]
    assert len(adapted) > 6
    for name in adapted:
        assert (merged[name] - expected[f"roberta.{name}"]).abs().max() < 1e-5, name
