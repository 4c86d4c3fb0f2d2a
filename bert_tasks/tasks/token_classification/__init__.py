"""Token classification: named entities and other tags."""
