"""``make_report`` writes one HTML file about a run, about several runs side by side, or about a search."""

from bert_tasks.report.build import Report as Report
from bert_tasks.report.build import make_report as make_report

__all__ = ["Report", "make_report"]
