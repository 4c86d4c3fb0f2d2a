"""What the server counts, for Prometheus, in a registry of its own.

Must not know HTTP's or the model's types: it is told numbers.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """Counters of one server; ``queue_depth`` is asked when somebody looks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Answered calls of /predict by status; 499: the caller had gone.")
        self._requests = Counter(*requests, ["status"], registry=self.registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=self.registry)
        latency = ("bert_tasks_request_seconds", "From a call's headers to the end of its answer.")
        self._seconds = Histogram(*latency, buckets=SECONDS, registry=self.registry)
        together = ("bert_tasks_batch_requests", "Requests that ran together.")
        self._batch_requests = Histogram(*together, buckets=SIZES, registry=self.registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=SIZES, registry=self.registry)
        self._depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=self.registry)
        self._ready = Gauge("bert_tasks_ready", "1 while predictions are answered.", registry=self.registry)
        self.answered = 0

    def watch(self, *, queue_depth: Callable[[], float], ready: Callable[[], float]) -> None:
        self._depth.set_function(queue_depth)
        self._ready.set_function(ready)

    def request(self, status: int, seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self.answered += status == 200

    def batch(self, requests: int, rows: int) -> None:
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._rows.inc(rows)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
