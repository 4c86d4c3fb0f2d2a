"""Model cards, and models on the hub: what others see of a model.

``card.py`` writes a card for a finished run, ``push.py`` uploads a model folder. Must not know how training works: all
that a card says comes from the files of the run.
"""
