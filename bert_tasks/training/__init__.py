"""Fine-tuning: the loop, its optimizer, the order of samples, and what a run leaves on disk."""
