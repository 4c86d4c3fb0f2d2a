"""The encoder families that can be loaded and saved: one data file each, which defines ``FAMILY``."""
