"""Outputs, which say what the logits of a head mean: loss, predictions, metrics, report and files, one file each."""
