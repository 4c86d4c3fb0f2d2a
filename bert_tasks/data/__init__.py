"""Reads, checks, splits and caches labelled text, without models or recipes."""
