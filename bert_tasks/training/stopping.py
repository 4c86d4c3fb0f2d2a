"""A polite end: SIGTERM or SIGINT asks the run to save and stop after the step; a second one stops it at once.

Owns the signal handlers of a run. Must not know what is saved, or how processes agree.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While the context is open, signals are remembered instead of ending the process.

    Only in the main thread, which alone may handle signals; elsewhere signals do what they did before.

    Attributes:
        received: the signal that asked to stop; None if none did.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)
