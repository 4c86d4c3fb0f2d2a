"""Owns small byte-level BPE and Unigram tokenizers in transformers' classes, trained on the texts below.

The classes are the real ones, so prefix spaces, double separators, segment ids and offsets behave as they do
in published RoBERTa, ALBERT, XLM-RoBERTa, CamemBERT and ModernBERT checkpoints; only the vocabularies are small.
"""

import inspect
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AlbertTokenizer,
    CamembertTokenizer,
    DebertaV2Tokenizer,
    MPNetTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

TEXT = """
The ferry leaves the old harbour at seven, and whoever misses it walks home along the shore.
Nobody had told the baker that the oven was broken, so the queue outside kept growing.
She read the letter twice, folded it, and put it back into the drawer without a word.
A cold wind from the north brought rain, then sleet, then the first snow of the year.
Please bring your own cup; the café near the station charges 2.50 for a paper one.
The committee met on Tuesday 14 March 2017 and agreed on nothing except the next meeting.
If the engine does not start, check the battery before you call for help.
We watched the film until the end, although the sound was terrible and the seats were worse.
My grandmother kept bees, three cats and a parrot that could whistle half of the anthem.
The second edition corrects many mistakes of the first and adds several new ones.
He doesn't like mushrooms, she can't stand onions: cooking for them isn't easy.
What a wonderful evening! Thank you all for coming, and do drive carefully.
Prices rose by 4 % last winter; wages, as usual, did not.
In the museum's cellar there is a map on which our street is still a river.
Waiting is unbearable, unless there is somebody who is waiting with you.
The child asked why the moon follows the car, and none of the adults knew what to say.
They painted the door green, then blue, and finally took it off its hinges altogether.
Is this seat free? It was when I sat down in it an hour ago.
An unexpected guest is welcome here at every hour, provided that he washes up.
The manual explains everything about the machine apart from how to switch it on.
"""
LINES = TEXT.strip().splitlines()
MULTILINGUAL = """
Angela Merkel besuchte am Dienstag die Universität Göttingen in Niedersachsen.
Die Straße nach München war wegen des Schnees gesperrt, der Zug fuhr über Nürnberg.
Frau Weiß wohnt seit 2003 in Köln und arbeitet bei der Bahn.
安格拉·默克尔星期二访问了北京大学。
北京是中华人民共和国的首都，人口超过两千万。
长江全长约6300公里，是亚洲最长的河流。
زارت أنجيلا ميركل جامعة القاهرة يوم الثلاثاء.
القاهرة هي عاصمة جمهورية مصر العربية ويسكنها ملايين الناس.
يقع نهر النيل في أفريقيا ويبلغ طوله 6650 كيلومترا.
Le train de Besançon part à sept heures, et l'œuvre est au musée du Louvre.
"""
MULTILINGUAL_LINES = MULTILINGUAL.strip().splitlines()
# What the charsmap of XLM-RoBERTa does to them (NFKC, and no characters without width); some become more than one.
REPLACED = {
    "\u3000": " ",
    "\u00a0": " ",
    "１": "1",
    "９": "9",
    "ﬁ": "fi",
    "…": "...",
    "ﻻ": "لا",
    "\u200b": "",
    "\u00ad": "",
}


def _train_bytes(backend: Tokenizer, special: Sequence[str], vocab_size: int) -> None:
    """Trains byte-level BPE."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)


def train_bpe(folder: Path, vocab_size: int = 600) -> Path:
    """Saves a RoBERTa tokenizer; special tokens have the published ids (<s> 0, <pad> 1, ...)."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _train_bytes(backend, special, vocab_size)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=512).save_pretrained(folder)
    return folder


def train_modernbert(folder: Path, vocab_size: int = 600) -> Path:
    """Saves byte-level BPE with ``[CLS]`` and ``[SEP]``, no segments and a mask that takes the space before it.

    As in published ModernBERT checkpoints, which have no class of their own; but ``[PAD]`` has the id 0.
    """
    special = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train_bytes(backend, list(special.values()), vocab_size)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokens = {f"{name}_token": token for name, token in special.items()}
    tokens["mask_token"] = AddedToken("[MASK]", lstrip=True, special=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=8192,
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )
    tokenizer.save_pretrained(folder)
    return folder


def train_llama(folder: Path, vocab_size: int = 600) -> Path:
    """Saves byte-level BPE that splits texts by the expression of Llama 3, as EuroBERT has it.

    One token ends texts and pads them. There is no unknown token.
    """
    begin, end, mask = special = ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"]
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _train_bytes(backend, special, vocab_size)
    return _saved(backend, folder, begin=begin, end=end, bos_token=begin, eos_token=end, pad_token=end, mask_token=mask)


def train_gemma(folder: Path, vocab_size: int = 600) -> Path:
    """Saves BPE as Gemma and mmBERT have it: bytes stand for unknown characters, and a mark stands for a space."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    in_bytes = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special, *in_bytes], max_token_length=12, show_progress=False
    )
    words = [word for line in LINES for word in line.replace(" ", " ▁").split()]
    backend.train_from_iterator(words, trainer)
    content = json.loads(backend.to_str())  # in which all special tokens of the trainer are added tokens
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    backend = Tokenizer.from_str(json.dumps(content))
    tokens = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
    return _saved(backend, folder, begin="<bos>", end="<eos>", cls_token="<bos>", sep_token="<eos>", **tokens)


def _saved(backend: Tokenizer, folder: Path, *, begin: str, end: str, **tokens: str) -> Path:
    """Saves a tokenizer without a class of its own, whose texts begin and end with special tokens."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B {end}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (begin, end)],
    )
    names = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=8192, model_input_names=names, **tokens
    )
    tokenizer.save_pretrained(folder)
    return folder


def train_unigram(folder: Path, vocab_size: int = 400) -> Path:
    """Saves an ALBERT tokenizer; special tokens have the published ids (<pad> 0, <unk> 1, ...)."""
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    vocab = [(piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]]
    AlbertTokenizer(vocab=vocab, model_max_length=512).save_pretrained(folder)
    return folder


def train_mpnet(folder: Path, vocab_size: int = 400) -> Path:
    """Saves an MPNet tokenizer: WordPiece between RoBERTa's special tokens, with the published ids; <mask> last."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["<s>", "<pad>", "</s>", "[UNK]"]
    backend.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special))
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    MPNetTokenizer(vocab={**vocab, "<mask>": len(vocab)}, model_max_length=512).save_pretrained(folder)
    return folder


def train_xlm_roberta(folder: Path, vocab_size: int = 500) -> Path:
    """Saves an XLM-RoBERTa tokenizer; special tokens have the published ids (<s> 0, <pad> 1, ..., <mask> last)."""
    vocab = [*unigram_pieces(["<s>", "<pad>", "</s>", "<unk>"], vocab_size), ("<mask>", 0.0)]
    tokenizer = XLMRobertaTokenizer(vocab=vocab, model_max_length=512, **_replacements(XLMRobertaTokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def train_camembert(folder: Path, vocab_size: int = 500) -> Path:
    """Saves a CamemBERT tokenizer, with names that are not used and <s> at 5, as published."""
    first = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    vocab = [*unigram_pieces(first, vocab_size), ("<mask>", 0.0)]
    tokenizer = CamembertTokenizer(vocab=vocab, model_max_length=512, **_replacements(CamembertTokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def _replacements(tokenizer_class: type) -> dict[str, bytes]:
    """Returns the argument for what the tokenizer replaces in texts, which transformers takes since 5.3 and 5.14."""
    name = "_spm_precompiled_charsmap"
    if name not in inspect.signature(tokenizer_class).parameters:
        return {}
    return {name: charsmap(REPLACED)}


def train_deberta(folder: Path, vocab_size: int = 500) -> Path:
    """Saves a DeBERTa-v3 tokenizer; special tokens have the published ids ([PAD] 0, [CLS] 1, ..., [MASK] last)."""
    vocab = unigram_pieces(["[PAD]", "[CLS]", "[SEP]", "[UNK]"], vocab_size, unknown="[UNK]")
    DebertaV2Tokenizer(vocab=vocab, model_max_length=512).save_pretrained(folder)
    return folder


def sentencepiece_model(pieces: Sequence[tuple[str, float]], replaced: Mapping[str, str]) -> bytes:
    """A SentencePiece file of Unigram pieces: names in brackets are control symbols, ``<user>`` is a user's symbol.

    See ``sentencepiece_model.proto``: pieces are field 1, the trainer's options 2, the normaliser's 3.
    """

    def number(value: int) -> bytes:
        low, high = value & 127, value >> 7
        return bytes([low | 128]) + number(high) if high else bytes([low])

    def content(field: int, value: bytes) -> bytes:
        return number(field << 3 | 2) + number(len(value)) + value

    written = b""
    unknown = next(index for index, (text, _) in enumerate(pieces) if text in ("<unk>", "[UNK]"))
    for index, (text, score) in enumerate(pieces):
        code = 2 if index == unknown else 4 if text == "<user>" else 3 if score == 0.0 else 1
        written += content(1, content(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + number(code))
    options = b"\x18\x01" + number(40 << 3) + number(unknown)  # Unigram, the id of the unknown piece
    return written + content(2, options) + content(3, content(2, charsmap(replaced)))


def unigram_pieces(first: Sequence[str], vocab_size: int, *, unknown: str = "<unk>") -> list[tuple[str, float]]:
    """Unigram pieces of all texts, with those that are given before the others."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(first), unk_token=unknown, show_progress=False
    )
    backend.train_from_iterator([*LINES, *MULTILINGUAL_LINES], trainer)
    return [(piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]]


def charsmap(replaced: Mapping[str, str]) -> bytes:
    """A ``precompiled_charsmap`` as SentencePiece files hold it: a trie of UTF-8 bytes as a double array, and texts.

    A node whose children begin at ``base`` has the child of byte c at ``base ^ c``; its value stands at ``base``. See
    darts-clone, whose format SentencePiece uses.
    """
    texts = b""
    children: list[dict[int, int]] = [{}]
    values: dict[int, int] = {}
    for source, text in replaced.items():
        node = 0
        for byte in source.encode():
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        values[node] = len(texts)
        texts += text.encode() + b"\0"
    bases = [256 * (node + 1) for node in range(len(children))]
    units = [0] * (256 * (len(children) + 1))
    units[0] = bases[0] << 10
    for node, following in enumerate(children):
        if node in values:
            units[bases[node]] = 1 << 31 | values[node]
        for byte, child in following.items():
            slot = bases[node] ^ byte
            units[slot] = (slot ^ bases[child]) << 10 | (child in values) << 8 | byte
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + texts
