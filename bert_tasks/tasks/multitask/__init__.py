"""Several tasks on one encoder, with their rows, their heads and their losses."""
