"""Owns small byte-level BPE and Unigram tokenizers in transformers' classes, trained on the text below.

The classes are the real ones, so prefix spaces, double separators, segment ids and offsets behave as they do
in published RoBERTa and ALBERT checkpoints; only the vocabularies are small.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AlbertTokenizer, RobertaTokenizer

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


def train_bpe(folder: Path, vocab_size: int = 600) -> Path:
    """Saves a RoBERTa tokenizer; special tokens have the published ids (<s> 0, <pad> 1, ...)."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=512).save_pretrained(folder)
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
