"""The folder of a run: its files, its checkpoints, and whether an earlier run in it can be resumed."""
