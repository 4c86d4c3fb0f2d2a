"""The code that a card shows: how to use the model with this package and with stock transformers.

Owns these texts; a test runs each of them in a model's folder. Must not hold a word of a user's.
"""

_ROWS = {
    "sequence-classification": '{"text": "The text to classify."}',
    "pair-classification": '{"text": "The first text.", "text_pair": "The second text."}',
    "token-classification": '{"words": ["The", "words", "of", "one", "sentence", "."]}',
    "span-extraction": '{"question": "Who wrote it?", "context": "The letter was written by Ada in May."}',
}
_INPUTS = {
    "pair-classification": '"The first text.", "The second text."',
    "token-classification": '["The", "words", "of", "one", "sentence", "."], is_split_into_words=True',
    "span-extraction": '"Who wrote it?", "The letter was written by Ada in May."',
}
_CLASSES = {
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
_READ = {
    "sequence": "print(output.logits)  # one number for each label, in the order of model.config.id2label",
    "token": "print(output.logits.argmax(-1))  # for each sub-word, in the order of model.config.id2label",
    "span": "print(output.start_logits.argmax(-1), output.end_logits.argmax(-1))  # places of sub-words",
}
_HIDDEN = "print(output.last_hidden_state.shape)  # rows, sub-words, hidden size"


def with_bert_tasks(task: str) -> str | None:
    """None for a task that is not built in: its class is the author's."""
    if task not in _ROWS:
        return None
    return f"""\
from bert_tasks import TaskModel

model = TaskModel.from_pretrained(".")  # this folder, or its name on the hub
print(model.predict([{_ROWS[task]}]))"""


def with_transformers(task: str, head: str | None) -> str:
    """``head``: the one that transformers has; without it its AutoModel gives hidden states."""
    name = "AutoModel" if head is None else _CLASSES[head]
    example = _INPUTS.get(task, '"The text to classify."')
    return f"""\
import torch
from transformers import {name}, AutoTokenizer

folder = "."  # this folder, or its name on the hub
tokenizer, model = AutoTokenizer.from_pretrained(folder), {name}.from_pretrained(folder)
with torch.no_grad():
    output = model(**tokenizer({example}, return_tensors="pt"))
{_HIDDEN if head is None else _READ[head]}"""
