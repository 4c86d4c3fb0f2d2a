"""Export of trained models to folders that onnxruntime runs."""

from bert_tasks.export.exporting import Export, export

__all__ = ["Export", "export"]
