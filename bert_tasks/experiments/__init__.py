"""Several runs as one experiment, and reproducing a finished run."""
