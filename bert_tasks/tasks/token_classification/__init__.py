"""Token classification for named entities and other tags."""
