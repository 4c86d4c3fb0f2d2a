"""Where a run tells what happens: to people, to metrics.jsonl, and to the trackers what metrics.jsonl gets.

Must not know how training works.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.training import outputs
from bert_tasks.training.job import Callback
from bert_tasks.training.progress import Reporter
from bert_tasks.training.tracking import Trackers


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The listeners of one process; only the first process's are not silent. ``callback``: the user's own, if any."""

    folder: Path
    reporter: Reporter
    trackers: Trackers
    callback: Callback | None = None

    def note(self, text: str) -> None:
        """Tells people."""
        self.reporter.note(text)

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds a line to metrics.jsonl; for the first process.

        Raises:
            CheckpointError: it cannot be written.
        """
        outputs.append_event(self.folder, event)
        self.trackers.log(event)

    def call_back(self, event: Mapping[str, Any]) -> bool:
        """Shows the user's callback what was recorded; whether it asks to stop."""
        return self.callback is not None and bool(self.callback(dict(event)))

    def close(self) -> None:
        self.reporter.close()
        self.trackers.close()
