"""The training loop, its optimizer, the order of samples, and a run's files."""
