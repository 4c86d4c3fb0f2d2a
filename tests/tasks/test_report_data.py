"""The figures that a report shows of the predictions of a task."""

from bert_tasks.tasks.report_data import SHOWN_CLASSES, Confusion
from bert_tasks.tasks.sequence_classification.report import regression_sections
from bert_tasks.tasks.sequence_classification.task import SequencePrediction


def test_a_cell_of_the_confusion_matrix_is_the_number_of_its_rows() -> None:
    matrix = Confusion.of(["no", "no", "yes"], ["no", "yes", "yes"], ["no", "yes", "perhaps"], "rows").matrix
    assert matrix.labels == ("no", "yes", "perhaps")
    assert matrix.counts == ((1, 1, 0), (0, 1, 0), (0, 0, 0))


def test_the_last_cells_of_a_cut_confusion_matrix_count_all_other_classes() -> None:
    labels = [f"c{number}" for number in range(SHOWN_CLASSES + 4)]
    wrong = [*labels[1 : SHOWN_CLASSES - 1], labels[0], *labels[SHOWN_CLASSES - 1 :]]
    matrix = Confusion.of(labels, wrong, labels, "rows").matrix
    assert matrix.labels == (*labels[: SHOWN_CLASSES - 1], "5 others")
    assert [sum(row) for row in matrix.counts] == [1] * (SHOWN_CLASSES - 1) + [5]
    assert matrix.counts[-1][-1] == 5


def test_a_number_is_correct_if_it_is_the_label() -> None:
    pairs = [({"text": "a", "label": 2.0}, 2.0), ({"text": "b", "label": 2.0}, 3.5)]
    sections = regression_sections(
        [(row, SequencePrediction(label=None, score=number, scores={})) for row, number in pairs]
    )
    assert [(one.is_correct, one.score) for one in sections.results] == [(True, 0.0), (False, 1.5)]
