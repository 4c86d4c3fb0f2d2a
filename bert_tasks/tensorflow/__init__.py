"""Converts checkpoints of Google's TensorFlow 1 programs without TensorFlow.

The result is a folder of Hugging Face. ``bert-tasks convert`` is the only caller. ``tensor_bundle.py`` reads the files,
``names.py`` holds Google's names, and ``convert.py`` writes the folder.
"""
