"""Sequence classification and regression."""
