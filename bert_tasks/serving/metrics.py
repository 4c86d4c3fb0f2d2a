"""The counters of the server, which ``GET /metrics`` shows."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ServerMetrics:
    """The Prometheus metrics of one server, in a registry of its own, so that two servers may be in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = ("bert_tasks_requests", "Requests for predictions by status (499 if the client disconnected).")
        self._requests = Counter(*requests, ["status"], registry=registry)
        self._rows = Counter("bert_tasks_rows", "Rows that were predicted.", registry=registry)
        latency = ("bert_tasks_request_seconds", "Seconds from the headers of a request to the end of its response.")
        self._seconds = Histogram(*latency, registry=registry)
        sizes = [2**power for power in range(10)]
        together = ("bert_tasks_batch_requests", "Requests of a batch.")
        self._batch_requests = Histogram(*together, buckets=sizes, registry=registry)
        self._batch_rows = Histogram("bert_tasks_batch_rows", "Rows of a batch.", buckets=sizes, registry=registry)
        self.queue_depth = Gauge("bert_tasks_queue_depth", "Requests that wait for the model.", registry=registry)
        self.ready = Gauge("bert_tasks_ready", "1 while the server answers predictions.", registry=registry)
        self.answered = 0

    def request(self, status: int, seconds: float) -> None:
        """Counts a request for predictions."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self.answered += status == 200

    def batch(self, requests: int, rows: int) -> None:
        """Counts a batch that was run."""
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._rows.inc(rows)
