"""Metrics as pure functions of references and predictions; ``hf`` wraps them as ``evaluate.Metric`` classes.

Nothing is imported here, so that asking for a number never loads a library that only the wrappers need.
"""
