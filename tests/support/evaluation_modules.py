"""Owns small modules of Hugging Face's evaluate, in files. Their inputs are declared as in the modules of that name.

What the original scripts accept is at https://huggingface.co/spaces/evaluate-metric/NAME. They are on the hub, so the
tests have modules of their own, whose numbers come from scikit-learn and seqeval, or from a few lines.
"""

from pathlib import Path

_HEAD = """
import datasets
import evaluate


class {name}(evaluate.Metric):
    {extra}

    def _info(self):
        return evaluate.MetricInfo(
            description="A module of the tests.",
            citation="",
            inputs_description="",
            features=datasets.Features({{"predictions": {predictions}, "references": {references}}}),
        )

    def _compute(self, predictions, references):
"""
_NUMBERS = """datasets.Sequence(datasets.Value({kind!r}))
            if self.config_name == {configuration!r}
            else datasets.Value({other!r})"""
_TAGS = 'datasets.Sequence(datasets.Value("string", id="label"), id="sequence")'
_ANSWERS = """{
                "id": datasets.Value("string"),
                "answers": datasets.features.Sequence(
                    {"text": datasets.Value("string"), "answer_start": datasets.Value("int32")}
                ),
            }"""
_WORDS = """
        def words(text):
            kept = "".join(char for char in text.lower() if char not in string.punctuation)
            return [word for word in kept.split() if word not in ("a", "an", "the")]

        def f1(one, other):
            same = sum((Counter(one) & Counter(other)).values())
            return 2 * same / (len(one) + len(other)) if one and other else float(one == other)

        answers = {row["id"]: row["answers"]["text"] for row in references}
        exact, scores = [], []
        for row in predictions:
            labels = [words(text) for text in answers[row["id"]]] or [[]]
            exact.append(max(words(row["prediction_text"]) == label for label in labels))
            scores.append(max(f1(words(row["prediction_text"]), label) for label in labels))
        count = len(predictions)
"""
_ACCURACY = _NUMBERS.format(kind="int32", configuration="multilabel", other="int32")
_GLUE = 'datasets.Value("float32" if self.config_name == "stsb" else "int64")'
_ANSWER = '{"id": datasets.Value("string"), "prediction_text": datasets.Value("string")%s}'
# Name -> class, types of predictions and references, and the body of ``_compute``.
_MODULES = {
    "accuracy": (
        "Accuracy",
        _ACCURACY,
        _ACCURACY,
        """
        from sklearn.metrics import accuracy_score

        return {"accuracy": float(accuracy_score(references, predictions))}
""",
    ),
    "glue": (
        "Glue",
        _GLUE,
        _GLUE,
        """
        from scipy.stats import pearsonr
        from sklearn.metrics import accuracy_score, f1_score

        if self.config_name not in ("mrpc", "sst2", "stsb"):
            raise KeyError("expected a configuration such as mrpc")
        if self.config_name == "stsb":
            return {"pearson": pearsonr(predictions, references)[0]}
        scores = {"accuracy": accuracy_score(references, predictions)}
        if self.config_name == "mrpc":
            scores["f1"] = f1_score(references, predictions)
        return scores
""",
    ),
    "mse": (
        "Mse",
        'datasets.Value("float")',
        'datasets.Value("float")',
        """
        from sklearn.metrics import mean_squared_error

        return {"mse": mean_squared_error(references, predictions)}
""",
    ),
    "seqeval": (
        "Seqeval",
        _TAGS,
        _TAGS,
        """
        from seqeval.metrics import accuracy_score, classification_report

        report = classification_report(references, predictions, output_dict=True, zero_division=0)
        overall = report.pop("micro avg")
        report = {name: scores for name, scores in report.items() if not name.endswith(" avg")}
        names = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}
        scores = {kind: {new: row[old] for new, old in names.items()} for kind, row in report.items()}
        scores |= {f"overall_{new}": overall[old] for new, old in names.items() if new != "number"}
        return scores | {"overall_accuracy": accuracy_score(references, predictions)}
""",
    ),
    "squad": (
        "Squad",
        _ANSWER % "",
        _ANSWERS,
        _WORDS + '        return {"exact_match": 100 * sum(exact) / count, "f1": 100 * sum(scores) / count}\n',
    ),
    "squad_v2": (
        "SquadV2",
        _ANSWER % ', "no_answer_probability": datasets.Value("float32")',
        _ANSWERS,
        _WORDS
        + '        return {"exact": 100 * sum(exact) / count, "f1": 100 * sum(scores) / count, "total": count}\n',
    ),
    "broken": (
        "Broken",
        'datasets.Value("int32")',
        'datasets.Value("int32")',
        '        raise ZeroDivisionError("nothing is\\nright")\n',
    ),
}


def write_module(folder: Path, name: str, *, lower_is_better: tuple[str, ...] | None = None) -> Path:
    """Writes ``folder/NAME/NAME.py``, and returns ``folder/NAME``. As on the hub, it states no direction by default."""
    class_name, predictions, references, body = _MODULES[name]
    extra = "" if lower_is_better is None else f"lower_is_better = {lower_is_better!r}"
    head = _HEAD.format(name=class_name, extra=extra, predictions=predictions, references=references)
    home = folder / name
    home.mkdir(parents=True)
    imports = "import string\nfrom collections import Counter\n"
    (home / f"{name}.py").write_text(imports + head + body, encoding="utf-8")
    return home
