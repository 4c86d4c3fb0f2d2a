"""The metrics of all heads of a model together.

A function takes what belongs to each head by its name. A model of one task has one head with the name "", whose metrics
have no prefix.
"""

from collections.abc import Mapping
from statistics import fmean

from bert_tasks.metrics.tables import MetricTable, merged, untuned
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import head_key

MEAN_PRIMARY_METRIC = "mean_primary_metric"  # of several tasks


def primary_metric(tasks: Mapping[str, Task]) -> str:
    """Returns the metric that selects the best model, of several tasks the mean of their primary metrics."""
    if "" in tasks:
        return tasks[""].output.primary_metric
    return MEAN_PRIMARY_METRIC


def joined_metrics(metrics: Mapping[str, Mapping[str, float]], tasks: Mapping[str, Task]) -> dict[str, float]:
    """Returns the metrics of all heads that have labelled rows, with the mean of their primary metrics."""
    if "" in tasks:
        return dict(metrics[""])
    primary: list[float] = []
    before: list[float] = []  # before the thresholds of some tasks were tuned
    for name, of_head in metrics.items():
        metric = tasks[name].output.primary_metric
        primary.append(of_head[metric])
        before.append(of_head.get(untuned(metric), of_head[metric]))
    joined = {MEAN_PRIMARY_METRIC: fmean(primary)}
    if before != primary:
        joined[untuned(MEAN_PRIMARY_METRIC)] = fmean(before)
    for name, of_head in metrics.items():
        joined = merged(joined, {head_key(name, key): value for key, value in of_head.items()})
    return joined


def curves(tasks: Mapping[str, Task]) -> list[str]:
    """Returns the metrics that a report draws as learning curves, of several tasks the primary metrics."""
    if "" in tasks:
        return list(tasks[""].output.curves)
    names = [MEAN_PRIMARY_METRIC]
    for name, task in tasks.items():
        names.append(head_key(name, task.output.primary_metric))
    return names


def metric_table(tasks: Mapping[str, Task], metrics: Mapping[str, float]) -> MetricTable:
    """Returns metrics for people, of several tasks without those of single classes. See ``Output.metric_table``."""
    if "" in tasks:
        return tasks[""].output.metric_table(metrics)
    starts = {name: head_key(name, "") for name in tasks}
    overall = {key: value for key, value in metrics.items() if not key.startswith(tuple(starts.values()))}
    titles: dict[str, str] = {}
    # An output chooses the metrics that people see by their names, which have no prefix there.
    for name, task in tasks.items():
        start = starts[name]
        of_head = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
        table = task.output.metric_table(of_head)
        for key, value in table.overall.items():
            overall[head_key(name, key)] = value
            titles[head_key(name, key)] = head_key(name, table.title(key))
    return MetricTable(overall=overall, titles=titles)
