"""Several runs as one: seeds, their summary, and reproducing a finished run."""
