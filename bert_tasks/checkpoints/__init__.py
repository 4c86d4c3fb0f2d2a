"""Published checkpoints in and out: the family tables, where files come from, loading, saving."""
