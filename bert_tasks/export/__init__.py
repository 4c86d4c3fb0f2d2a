"""Trained models as folders that onnxruntime runs."""
