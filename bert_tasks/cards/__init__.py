"""Model cards, and models on the hub: what others see of a model.

``card.py`` writes a card for a finished run, ``push.py`` uploads a model folder.
"""
