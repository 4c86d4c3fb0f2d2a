"""The encoder families that can be loaded and saved, as data."""
