"""Models: ``Encoder`` and ``TaskModel``, loading, saving, predicting."""
