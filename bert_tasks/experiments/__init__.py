"""Several runs as one experiment: seeds, folds and search."""
