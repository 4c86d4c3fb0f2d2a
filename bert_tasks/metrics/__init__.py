"""Metrics as pure functions of labels and predictions, and shared formulas.

Nothing is imported here, so that one metric does not load the libraries of another.
"""
