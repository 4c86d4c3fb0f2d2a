"""Model cards, and models on the hub.

``card.py`` writes a card for a finished run, ``push.py`` uploads a model folder.
"""
