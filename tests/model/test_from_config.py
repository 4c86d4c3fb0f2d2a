"""Models from scratch: transformers' defaults, the tokenizer's sizes, weights of a seed, training by recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from bert_tasks import TaskModel, load_recipe, train
from bert_tasks.errors import CheckpointError, RecipeError, UsageError
from bert_tasks.families import FAMILIES, new_hf_config
from bert_tasks.recipe.schema import resolved_toml
from support.sampling import slow_except
from support.training_runs import make_rows

TINY = {
    "family": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "max_position_embeddings": 48,
}
LABELS = ["negative", "positive"]


def tiny(tokenizer: PreTrainedTokenizerBase | Path, config: dict[str, Any] = TINY, **options: Any) -> TaskModel:
    arguments: dict[str, Any] = {"task": "sequence-classification", "labels": LABELS, "max_length": 48} | options
    return TaskModel.from_config(config, tokenizer=tokenizer, **arguments)


@pytest.mark.parametrize("family", slow_except(tuple(FAMILIES), "bert", "albert"))
def test_fields_that_are_not_stated_have_the_defaults_of_transformers(family: str) -> None:
    config = new_hf_config({"family": family})
    stock = AutoConfig.for_model(family).to_dict()
    read = AutoConfig.for_model(**config).to_dict()
    assert {name: read[name] for name in stock} == stock
    options = {name: value for name, value in config.items() if name not in ("model_type", "pad_token_id")}
    assert new_hf_config({"family": family, **options}) == config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "family is missing. Known families are albert, bert, "),
        ({"family": "brt"}, "unknown family 'brt', did you mean 'bert'"),
        ({"family": "bert", "hiden_size": 16}, "bert has no field 'hiden_size', did you mean 'hidden_size'"),
        ({"family": "distilbert", "hidden_size": 16}, "distilbert has no field 'hidden_size'"),
        ({"family": "bert", "hidden_size": 100}, "hidden_size 100 is not a multiple of num_attention_heads 12"),
        ({"family": "bert", "hidden_size": "16"}, "hidden_size = '16', expected an integer"),
        ({"family": "bert", "vocab_size": 10}, "vocab_size = 10, but the tokenizer has 80 tokens"),
        ({"family": "bert", "pad_token_id": 3}, "bert has no field 'pad_token_id'"),
        ({"family": "bert", "is_decoder": True}, "is_decoder = True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        new_hf_config(config, vocab_size=80, special_ids={"pad_token_id": 0})


def test_weights_follow_from_the_seed_alone(bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    before = torch.random.get_rng_state()
    models = [tiny(bpe_tokenizer, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.embeddings.word.weight"], other["encoder.embeddings.word.weight"])
    assert not torch.equal(first["head.output.weight"], other["head.output.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", slow_except(("wordpiece", "bpe", "unigram"), "wordpiece"))
def test_stock_transformers_opens_a_new_model(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(f"{name}_tokenizer")
    family = {"bpe": "roberta", "unigram": "albert"}.get(name, "bert")
    config = {**TINY, "family": family, "max_position_embeddings": 50}
    model = tiny(tokenizer, config, seed=3)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    model.save_pretrained(tmp_path)
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.tensor([tokenizer("It rained in the night.")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, model(ids), atol=1e-6)
    assert TaskModel.from_pretrained(tmp_path).predict(["It rained."]) == model.predict(["It rained."])


@pytest.mark.slow
def test_a_classifier_is_trained_from_scratch_by_a_recipe(
    bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bpe_tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(24)))
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in TINY.items())
    text = (
        f'task = "sequence-classification"\n[model]\nconfig = {{{fields}}}\ntokenizer = "tok"\n'
        '[settings]\nmax_length = 48\n[data]\ntrain = "train.jsonl"\nvalidation = "train.jsonl"\n'
        "[optim]\nepochs = 20\nbatch_size = 8\nlearning_rate = 1e-2\nwarmup_ratio = 0.1\n"
        "[run]\nseed = 5\neval_steps = 60\n"
    )
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.toml", output_dir=tmp_path / "run")
    assert recipe.model.tokenizer == str(tmp_path / "tok")
    result = train(recipe, progress=False)
    assert result.metrics["accuracy"] > 0.9
    assert train(recipe, progress=False).reused
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(resolved_toml(recipe))
    assert load_recipe(resolved) == recipe
    smaller = load_recipe(tmp_path / "recipe.toml", overrides=["model.config.hidden_size=8"])
    assert smaller.model.config == {**TINY, "hidden_size": 8}
    first = json.loads((tmp_path / "run" / "run.json").read_text())["initial_weights"]
    again = train(load_recipe(tmp_path / "recipe.toml", output_dir=tmp_path / "again"), progress=False)
    assert json.loads((tmp_path / "again" / "run.json").read_text())["initial_weights"] == first
    assert again.metrics == result.metrics
    with pytest.raises(UsageError, match=r"model\.config"):
        train(
            load_recipe(tmp_path / "recipe.toml", overrides=["model.config.hidden_size=8"], output_dir=tmp_path / "run")
        )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("", r"\[model\] needs either name \(a checkpoint\) or config \(a new model\)\. Neither is set"),
        ('name = "m"\nconfig = {family = "bert"}\ntokenizer = "t"', "Both are set"),
        ('config = {family = "bert"}', r"\[model\] config needs tokenizer"),
        ('name = "m"\ntokenizer = "t"', "tokenizer belongs to config"),
        ('config = {family = "bert"}\ntokenizer = "t"\nrevision = "x"', "revision belongs to name"),
        ('config = {family = "bert", layers = 2}\ntokenizer = "t"', r"config is invalid\. bert has no field 'layers'"),
    ],
)
def test_model_sections_that_are_refused(model: str, said: str, tmp_path: Path) -> None:
    text = f'task = "sequence-classification"\n[model]\n{model}\n[data]\ntrain = "train.csv"\n'
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_recipe(tmp_path / "recipe.toml")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\. Expected one of"):
        tiny(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        tiny(tmp_path / "missing")
