"""Masked language modelling, with the choice of masked tokens."""
