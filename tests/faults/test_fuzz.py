"""Edited files: a short round of every target, and contents that once broke something."""

from pathlib import Path

import pytest

from fuzzing import READERS, RECIPES, attempt, fuzz, loaders

FIXED = {**READERS, **RECIPES}
LOADERS = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
EXAMPLES = 60


@pytest.mark.parametrize("name", FIXED)
def test_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    assert attempt(FIXED[name], FIXED[name].valid, tmp_path)
    fuzz(FIXED[name], tmp_path, examples=EXAMPLES)


def test_models_and_checkpoints_are_read_or_refused(tmp_path: Path) -> None:
    targets = loaders(tmp_path)
    assert {f"run {name}" for name in LOADERS} <= targets.keys()
    assert {"model config.json", "model model.safetensors"} <= targets.keys()
    for name, target in targets.items():
        place = tmp_path / name.replace(" ", "-")
        place.mkdir()
        assert attempt(target, target.valid, place), name
        fuzz(target, place, examples=EXAMPLES // 2)


# Contents that once broke something at full length.
FOUND = {"model vocab.txt": [b"[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\nm\nn\no\n"]}


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found_is_refused(name: str, tmp_path: Path) -> None:
    target = loaders(tmp_path)[name]
    for content in FOUND[name]:
        assert not attempt(target, content, tmp_path)
