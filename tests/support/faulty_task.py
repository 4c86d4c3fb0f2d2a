"""A classification task that fails on one process at one step, in the way that ``ROW_ERROR`` names."""

import os
import signal
import time
from typing import Any

from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.classes import Classes
from bert_tasks.tasks.sequence_classification import SequenceClassification

CALL = 12  # losses before the fault


class FaultyClasses(Classes):
    calls = 0

    def loss(self, logits: Any, batch: Any) -> tuple[LossTerm, ...]:
        FaultyClasses.calls += 1
        if FaultyClasses.calls > CALL and os.environ.get("RANK", "0") == os.environ.get("FAULTY_RANK", "0"):
            _fail(os.environ["ROW_ERROR"])
        return super().loss(logits, batch)


class FaultyTask(SequenceClassification):
    outputs = (FaultyClasses,)


def _fail(fault: str) -> None:
    if fault == "raise":
        raise ArithmeticError("the barometer fell")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(0)
    if fault == "hang":
        time.sleep(600)
    if fault == "slow":
        time.sleep(0.2)
