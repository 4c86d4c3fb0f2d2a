"""The contract of tasks, for those in ``TASKS``."""

from bert_tasks.tasks import TASKS
from support.task_contract import TaskContract
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES


def test_every_task_has_an_example() -> None:
    assert {example.task.name for example in (EXAMPLES | FAMILY_EXAMPLES).values()} == set(TASKS)
    for name, task in TASKS.items():
        assert task.name == name


class TestContract(TaskContract):
    examples = EXAMPLES | FAMILY_EXAMPLES
