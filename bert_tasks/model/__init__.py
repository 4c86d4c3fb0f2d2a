"""``Encoder`` and ``TaskModel``, which load, save and predict."""
