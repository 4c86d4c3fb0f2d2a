"""Checkpoints of Google's TensorFlow 1 programs, converted to folders of Hugging Face without TensorFlow.

``bert-tasks convert`` is the only caller. ``tensor_bundle.py`` reads the files, ``names.py`` holds Google's names, and
``convert.py`` writes the folder.
"""
