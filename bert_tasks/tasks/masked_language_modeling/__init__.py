"""Masked language modelling: the task, and which tokens are masked."""
