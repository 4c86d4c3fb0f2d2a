"""Owns the small checkpoints in the layout of Google's TensorFlow 1 programs that ``tests/tf1/google`` holds.

The names and shapes of the variables are those of google-research/bert, albert and electra. The tests import them; the
files were written once, by TensorFlow and SentencePiece themselves, which are no dependencies of anything here::

    pip install tensorflow-cpu sentencepiece transformers
    python tests/support/tf1_checkpoints.py
"""

import json
import sys
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "tf1" / "google"
_TOKENS = (
    "[PAD] [unused0] [UNK] [CLS] [SEP] [MASK] the The birds sang ##s 3 1 , . a film Film fine was и 你 好 house "
    "##es House in In ##ing sing night Nacht day red blue green ? ! ##a ##b"
)
VOCABULARY = _TOKENS.split()
BERT = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY),
}
ALBERT = {
    **BERT,
    "attention_probs_dropout_prob": 0,
    "down_scale_factor": 1,
    "embedding_size": 8,
    "gap_size": 0,
    "hidden_dropout_prob": 0,
    "inner_group_num": 1,
    "net_structure_type": 0,
    "num_hidden_groups": 1,
    "num_memory_blocks": 0,
    "vocab_size": 150,
}
ELECTRA = {**BERT, "embedding_size": 8}
Shapes = dict[str, tuple[int, ...]]


def dense(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def norm(name: str, size: int) -> Shapes:
    return {f"{name}/beta": (size,), f"{name}/gamma": (size,)}


def embeddings(scope: str, config: dict[str, Any], size: int) -> Shapes:
    return {
        f"{scope}/embeddings/word_embeddings": (config["vocab_size"], size),
        f"{scope}/embeddings/token_type_embeddings": (config["type_vocab_size"], size),
        f"{scope}/embeddings/position_embeddings": (config["max_position_embeddings"], size),
        **norm(f"{scope}/embeddings/LayerNorm", size),
    }


def layers(scope: str, config: dict[str, Any]) -> Shapes:
    """The layers of BERT and ELECTRA."""
    hidden, variables = config["hidden_size"], {}
    for number in range(config["num_hidden_layers"]):
        layer = f"{scope}/encoder/layer_{number}"
        for name in ("query", "key", "value"):
            variables |= dense(f"{layer}/attention/self/{name}", hidden, hidden)
        variables |= dense(f"{layer}/attention/output/dense", hidden, hidden)
        variables |= norm(f"{layer}/attention/output/LayerNorm", hidden)
        variables |= dense(f"{layer}/intermediate/dense", hidden, config["intermediate_size"])
        variables |= dense(f"{layer}/output/dense", config["intermediate_size"], hidden)
        variables |= norm(f"{layer}/output/LayerNorm", hidden)
    return variables


def vocabulary_head(scope: str, config: dict[str, Any], size: int) -> Shapes:
    variables = {
        **dense(f"{scope}/transform/dense", config["hidden_size"], size),
        **norm(f"{scope}/transform/LayerNorm", size),
    }
    return {**variables, f"{scope}/output_bias": (config["vocab_size"],)}


def output(scope: str, rows: int, config: dict[str, Any]) -> Shapes:
    """A head whose weights are stored as ``[outputs, hidden]``."""
    return {f"{scope}output_weights": (rows, config["hidden_size"]), f"{scope}output_bias": (rows,)}


def bert_encoder(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    return {
        **embeddings("bert", config, hidden),
        **layers("bert", config),
        **dense("bert/pooler/dense", hidden, hidden),
    }


def bert(config: dict[str, Any]) -> Shapes:
    """BERT as ``run_pretraining.py`` writes it, without what its optimizer adds."""
    head = vocabulary_head("cls/predictions", config, config["hidden_size"])
    return {**bert_encoder(config), **head, **output("cls/seq_relationship/", 2, config)}


def albert_encoder(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    variables = embeddings("bert", config, config["embedding_size"])
    variables |= dense("bert/encoder/embedding_hidden_mapping_in", config["embedding_size"], hidden)
    for group in range(config["num_hidden_groups"]):
        layer = f"bert/encoder/transformer/group_{group}/inner_group_0"
        for name in ("query", "key", "value"):
            variables |= dense(f"{layer}/attention_1/self/{name}", hidden, hidden)
        variables |= dense(f"{layer}/attention_1/output/dense", hidden, hidden)
        variables |= norm(f"{layer}/LayerNorm", hidden) | norm(f"{layer}/LayerNorm_1", hidden)
        variables |= dense(f"{layer}/ffn_1/intermediate/dense", hidden, inner)
        variables |= dense(f"{layer}/ffn_1/intermediate/output/dense", inner, hidden)
    return {**variables, **dense("bert/pooler/dense", hidden, hidden)}


def albert(config: dict[str, Any]) -> Shapes:
    """ALBERT as its ``run_pretraining.py`` writes it."""
    head = vocabulary_head("cls/predictions", config, config["embedding_size"])
    return {**albert_encoder(config), **head, **output("cls/seq_relationship/", 2, config)}


def electra(config: dict[str, Any], generator: dict[str, Any]) -> Shapes:
    """ELECTRA as its ``run_pretraining.py`` writes it: both models, which share their embeddings."""
    size, hidden = config["embedding_size"], config["hidden_size"]
    variables = embeddings("electra", config, size) | layers("electra", config) | layers("generator", generator)
    for scope, width in (("electra", hidden), ("generator", generator["hidden_size"])):
        if width != size:
            variables |= dense(f"{scope}/embeddings_project", size, width)
    variables |= dense("discriminator_predictions/dense", hidden, hidden)
    variables |= dense("discriminator_predictions/dense_1", hidden, 1)
    variables |= dense("generator_predictions/dense", generator["hidden_size"], size)
    variables |= norm("generator_predictions/LayerNorm", size)
    return {**variables, "generator_predictions/output_bias": (config["vocab_size"],)}


def with_optimizer(shapes: Shapes) -> Shapes:
    slots = {f"{name}/{slot}": shape for name, shape in shapes.items() for slot in ("adam_m", "adam_v")}
    return {**shapes, **slots, "global_step": ()}


GENERATOR = {**ELECTRA, "hidden_size": 8, "intermediate_size": 32}
CLASSIFIER = {**bert_encoder(BERT), **output("", 3, BERT)}
FIXTURES: dict[str, tuple[str, Shapes]] = {
    "bert": ("bert_model.ckpt", bert(BERT)),
    "bert_classifier": ("model.ckpt-12", with_optimizer(CLASSIFIER)),
    "bert_squad": ("model.ckpt-7", {**bert_encoder(BERT), **output("cls/squad/", 2, BERT)}),
    "albert": ("model.ckpt-best", albert(ALBERT)),
    "electra": ("electra_tiny", electra(ELECTRA, GENERATOR)),
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What a variable of this name holds: numbers between -0.5 and 0.5 that differ, exact in float32; scales near 1."""
    places = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    drawn = (places + zlib.crc32(name.encode())) * 2654435761 % 2**32 >> 8
    numbers = (drawn.astype(np.float64) / 2**24 - 0.5).astype(np.float32).reshape(shape)
    return numbers / 2 + 1 if name.endswith("gamma") else numbers


def _write_bundle(prefix: Path, shapes: Shapes, *, shards: int) -> None:
    """A checkpoint by TensorFlow's own operations, in so many data files."""
    import tensorflow

    names = sorted(shapes)
    parts = []
    for shard in range(shards):
        shard_names = names[shard::shards]
        parts.append(f"{prefix}.part{shard}")
        tensors = [values(name, shapes[name]) if name != "global_step" else np.int64(12) for name in shard_names]
        tensorflow.raw_ops.SaveV2(
            prefix=parts[-1], tensor_names=shard_names, shape_and_slices=[""] * len(shard_names), tensors=tensors
        )
    tensorflow.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix))


def _write_pieces(folder: Path) -> None:
    """A SentencePiece model with the options of ALBERT's, and the ids that it gives as ALBERT's program uses it."""
    import sentencepiece
    from small_tokenizers import LINES

    rules = folder / "rules.tsv"
    rules.write_text("2019\t27\n2009\t20\n3000\t20\nFF01\t21\n", "utf-8")
    prefix = folder / "30k-clean"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.lower() for line in LINES] * 4),
        model_prefix=str(prefix),
        vocab_size=ALBERT["vocab_size"],
        model_type="unigram",
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=["(", ")", '"', "-", ".", "\u2013", "£", "€"],
        normalization_rule_tsv=str(rules),
    )
    rules.unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prefix) + ".model")
    texts = [
        *LINES,
        "The (old) café \u2013 5,000 £ in 14, 15",
        "Don\u2019t  pay 2.50 -- ever.",
        "x\u3000y\uff01 Ünïcode 你好",
    ]
    ids = {text: _ids(processor, text) for text in texts}
    (folder / "ids.json").write_text(json.dumps(ids, indent=1) + "\n", "utf-8")


def _ids(processor: Any, text: str) -> list[int]:
    """As google-research/albert reads a text: lower-cased, without accents, commas after digits apart."""
    plain = unicodedata.normalize("NFKD", " ".join(text.split()))
    pieces = processor.encode_as_pieces("".join(c for c in plain if not unicodedata.combining(c)).lower())
    result: list[str] = []
    for piece in pieces:
        if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
            parts = processor.encode_as_pieces(piece[:-1].replace("▁", ""))
            if piece[0] != "▁":
                parts = parts[1:] if parts[0] == "▁" else [parts[0].removeprefix("▁"), *parts[1:]]
            result += [*parts, ","]
        else:
            result.append(piece)
    return [processor.piece_to_id(piece) for piece in result]


def main() -> None:
    for folder, (name, shapes) in FIXTURES.items():
        path = FOLDER / folder
        path.mkdir(parents=True, exist_ok=True)
        _write_bundle(path / name, shapes, shards=2 if folder == "bert" else 1)
        if folder.startswith("bert"):
            (path / "bert_config.json").write_text(json.dumps(BERT, indent=2) + "\n")
        if folder != "albert":
            (path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", "utf-8")
    # The heads of so small a model are not 64 wide, which its checkpoint does not tell.
    (FOLDER / "electra" / "config.json").write_text(json.dumps({"num_attention_heads": 2}) + "\n")
    (FOLDER / "albert" / "albert_config.json").write_text(json.dumps(ALBERT, indent=2) + "\n")
    _write_pieces(FOLDER / "albert")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
