"""What may change on resuming is what the document says."""

import re
from pathlib import Path

from bert_tasks.recipe.schema import ModelSection, OptimSection, RunSection
from bert_tasks.training.files import NOTED, SILENT


def test_the_document_has_the_table(repository: Path) -> None:
    text = (repository / "docs" / "how_to" / "resuming.md").read_text("utf-8")
    table = re.findall(r"^\| `([\w.]+)` \| may change(, with a notice)?", text, flags=re.MULTILINE)
    assert [name for name, notice in table if not notice] == list(SILENT)
    assert [name for name, notice in table if notice] == list(NOTED)


def test_the_settings_exist() -> None:
    sections = {"model": ModelSection, "optim": OptimSection, "run": RunSection}
    for name in (*SILENT, *NOTED):
        section, _, field = name.partition(".")
        assert field in sections[section].model_fields
