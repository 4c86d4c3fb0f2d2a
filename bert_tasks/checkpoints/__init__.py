"""Published checkpoints, from a name or a hub id to loaded and saved weights."""
