"""Rules by which ``init`` recognises the rows of a task."""
