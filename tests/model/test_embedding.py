"""Embeddings equal the formula over transformers' hidden states, and sentence-transformers' own."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModel, PreTrainedTokenizerBase

from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.model.encoder import Encoder
from support.hf_models import FAMILIES
from support.sampling import one_of_each, slow_except
from support.small_checkpoints import save_checkpoint, tokenizer_of

TEXTS = ["a ferry", "", "the boats were late and the harbour was full of birds again", "one", "rain, all of the day"]
POOLINGS = ("mean", "cls", "max")


def by_formula(
    folder: Path, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, pooling: str, layer: int, normalize: bool
) -> np.ndarray[Any, Any]:
    """The pooled hidden states of a padded batch of transformers' model."""
    model = AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[layer]
    mask = inputs["attention_mask"][..., None].bool()
    if pooling == "cls":
        vectors = hidden[:, 0]
    elif pooling == "max":
        vectors = hidden.masked_fill(~mask, -torch.inf).amax(1)
    else:
        vectors = hidden.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
    embeddings: np.ndarray[Any, Any] = (vectors / vectors.norm(dim=1, keepdim=True) if normalize else vectors).numpy()
    return embeddings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("bert")
    save_checkpoint(path, "bert", wordpiece_tokenizer, wide=True)
    return path


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "roberta"))
def test_every_family_has_the_mean_of_its_last_layer(
    family: str, tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    save_checkpoint(tmp_path, family, tokenizer_of(family, by_kind), wide=True)
    encoder = Encoder.from_pretrained(tmp_path)
    expected = by_formula(tmp_path, encoder.tokenizer, TEXTS, pooling="mean", layer=-1, normalize=True)
    np.testing.assert_allclose(encoder.embed(TEXTS), expected, atol=5e-5)


@pytest.mark.parametrize(("pooling", "layer"), one_of_each([*product(POOLINGS, [-1, 1, 0])]))
def test_pooling_and_layers(pooling: Any, layer: int, folder: Path) -> None:
    encoder = Encoder.from_pretrained(folder)
    expected = by_formula(folder, encoder.tokenizer, TEXTS, pooling=pooling, layer=layer, normalize=False)
    vectors = encoder.embed(TEXTS, pooling=pooling, layer=layer, normalize=False)
    np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max())
    lengths = np.linalg.norm(encoder.embed(TEXTS, pooling=pooling, layer=layer), axis=1)
    np.testing.assert_allclose(lengths, 1.0, atol=1e-6)


def test_a_frame_is_no_list_of_texts(folder: Path) -> None:
    encoder, frame = Encoder.from_pretrained(folder), pandas.DataFrame({"text": TEXTS}, index=[4, 2, 0, 1, 3])
    with pytest.raises(DataError, match="not DataFrame"):
        encoder.embed(frame)  # whose items are the names of its columns
    np.testing.assert_array_equal(encoder.embed(frame["text"]), encoder.embed(TEXTS))


def test_the_norm_after_the_last_layer_belongs_to_no_other(
    tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    save_checkpoint(tmp_path, "modernbert", wordpiece_tokenizer, wide=True)
    expected = by_formula(tmp_path, wordpiece_tokenizer, TEXTS, pooling="mean", layer=1, normalize=False)
    vectors = Encoder.from_pretrained(tmp_path).embed(TEXTS, layer=-2, normalize=False)
    np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture
def prompted(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder of sentence-transformers with a default prompt, whose texts it changes to lower case."""
    save_checkpoint(tmp_path, "roberta", bpe_tokenizer, wide=True)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    files = {
        "modules": modules,
        "sentence_bert_config": {"do_lower_case": True},
        "config_sentence_transformers": {"prompts": {"query": "Query: ", "b": "b"}, "default_prompt_name": "query"},
        "1_Pooling/config": {"pooling_mode_mean_tokens": True},
    }
    (tmp_path / "1_Pooling").mkdir()
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("prompt", "expected"), [(None, "query: "), ("", ""), ("Find THE ", "find the ")], ids=["default", "none", "own"]
)
def test_prompt_and_lower_case_are_those_of_sentence_transformers(
    prompt: str | None, expected: str, prompted: Path
) -> None:
    texts = ["A Ferry", "THE boats were LATE", "rain"]
    encoder = Encoder.from_pretrained(prompted)
    lowered = [expected + text.lower() for text in texts]
    vectors = by_formula(prompted, encoder.tokenizer, lowered, pooling="mean", layer=-1, normalize=True)
    np.testing.assert_allclose(encoder.embed(texts, prompt=prompt), vectors, atol=5e-5)
    np.testing.assert_allclose(encoder.embed(texts[0], prompt=prompt), vectors[0], atol=5e-5)
    others = texts if expected else [text.upper() for text in texts]
    changed = by_formula(prompted, encoder.tokenizer, others, pooling="mean", layer=-1, normalize=True)
    assert np.abs(changed - vectors).max() > 1e-3


def test_a_prompt_that_is_left_out_of_the_pooling_is_rejected(prompted: Path) -> None:
    (prompted / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    encoder = Encoder.from_pretrained(prompted)
    poolings: tuple[Any, ...] = (None, "max")
    for pooling in poolings:
        with pytest.raises(CheckpointError, match=r"1_Pooling/config.json leaves the tokens of the prompt out of the"):
            encoder.embed("rain", pooling=pooling)
    assert encoder.embed("rain", prompt="").shape == encoder.embed("rain", pooling="cls").shape == (36,)


def test_layers_that_are_not_read_do_not_run(folder: Path) -> None:
    encoder = Encoder.from_pretrained(folder)
    before = encoder.embed(TEXTS, layer=1)
    with torch.no_grad():
        encoder.encoder.layers[1].attention.qkv.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
    np.testing.assert_array_equal(encoder.embed(TEXTS, layer=1), before)
    with pytest.raises(CheckpointError, match="not finite"):
        encoder.embed(TEXTS)


def test_shapes_and_order(folder: Path) -> None:
    encoder = Encoder.from_pretrained(folder)
    assert encoder.embed([]).shape == (0, 36)
    many = encoder.embed(text for text in [*TEXTS, *TEXTS])
    assert many.shape == (10, 36)
    assert many.dtype == np.float32
    np.testing.assert_allclose(many[:5], many[5:], atol=1e-6)
    np.testing.assert_allclose(encoder.embed(TEXTS[2]), many[2], atol=1e-6)


def test_a_text_is_cut_after_max_length_tokens(folder: Path) -> None:
    encoder = Encoder.from_pretrained(folder)
    long, longer = "the boats " * 10, "the boats " * 30
    np.testing.assert_allclose(encoder.embed(long, max_length=8), encoder.embed(longer, max_length=8), atol=1e-6)
    assert np.abs(encoder.embed(long, max_length=8) - encoder.embed(long)).max() > 1e-3


def test_embedding_does_not_change_the_mode_of_an_encoder_in_training(folder: Path) -> None:
    encoder = Encoder.from_pretrained(folder).train()
    np.testing.assert_array_equal(encoder.embed(TEXTS), encoder.embed(TEXTS))
    assert encoder.training
    assert encoder.encoder.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "sum"}, "pooling is 'sum', expected one of 'mean', 'cls', 'max'"),
        ({"layer": 3}, "layer is 3, expected a whole number from -3 to 2"),
        ({"layer": -4}, "layer is -4, expected"),
        ({"layer": 1.0}, "layer is 1.0, expected a whole number"),
        ({"max_length": 2}, "max_length is 2, expected at least 3"),
        ({"max_length": 49}, "the checkpoint has 48 positions"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Encoder.from_pretrained(folder).embed(TEXTS, **options)


@pytest.mark.parametrize("texts", [["a", None], {"text": "a"}, b"a", 5], ids=str)
def test_what_is_no_text_is_named(folder: Path, texts: Any) -> None:
    with pytest.raises(DataError, match="text"):
        Encoder.from_pretrained(folder).embed(texts)


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(embedded_model: Path, repository: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    lines = (repository / "recipes" / "data" / "feedback" / "validation.csv").read_text("utf-8").splitlines()[1:]
    texts = [*lines, "", "word " * 400, *TEXTS]
    theirs = library.SentenceTransformer(str(embedded_model), device="cpu").encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(Encoder.from_pretrained(embedded_model).embed(texts), theirs, atol=1e-5)
