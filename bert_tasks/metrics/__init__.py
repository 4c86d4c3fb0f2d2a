"""Metrics as pure functions of labels and predictions, and the formulas that they and the report share.

Nothing is imported here, so that one metric does not load the libraries of another.
"""
