"""Fine-tuning.

Holds the loop, its optimizer, the order of samples, and the files of a run.
"""
