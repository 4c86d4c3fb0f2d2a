"""Several tasks on one encoder: their rows, their heads, the sum of their losses."""
