"""Model cards, and the upload of models to the Hugging Face Hub.

``card.py`` writes the card of a finished run, and ``push.py`` uploads the folder of a model together with its card.
"""
