"""What is read of sentence-transformers' files, of any of its versions, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.checkpoints.sentence_transformers import SentenceSettings, read_sentence_settings
from bert_tasks.errors import CheckpointError

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def written(folder: Path, *kinds: str, pooling: Any = None, **files: Any) -> Path:
    """A folder with the modules of these classes, and further files by the part of their name before ``.json``."""
    modules = [
        {"type": class_name, "path": f"{i}_{class_name.rpartition('.')[2]}" if i else ""}
        for i, class_name in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({} if pooling is None else pooling))
    for name, content in ({"modules": modules} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_embedded_weights_have_mean_pooling(embedded_model: Path) -> None:
    expected = SentenceSettings(pooling="mean", source="1_Pooling/config.json", max_length=256)
    assert read_sentence_settings(embedded_model) == expected


def test_a_folder_of_transformers_has_none(tmp_path: Path) -> None:
    assert read_sentence_settings(tmp_path) is None


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
        ({"pooling_mode": ["max"]}, "max"),
        ({}, "mean"),
    ],
)
@pytest.mark.parametrize("module", [f"{OLD}Pooling", f"{NEW}Pooling"])
def test_pooling_of_old_and_new_versions(pooling: dict[str, Any], expected: str, module: str, tmp_path: Path) -> None:
    settings = read_sentence_settings(written(tmp_path, f"{OLD}Transformer", module, pooling=pooling))
    assert settings is not None
    assert (settings.pooling, settings.unsupported) == (expected, None)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (("Transformer",), {}, "modules.json lists no pooling"),
        (("Transformer", "Pooling", "Dense"), {}, "lists the further module Dense"),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, "1_Pooling/config.json asks for lasttoken pooling"),
        (("Transformer", "Pooling"), {"pooling_mode": ["cls", "mean"]}, "asks for cls and mean pooling"),
    ],
)
def test_what_is_not_computed_is_named(
    kinds: tuple[str, ...], pooling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = read_sentence_settings(
        written(tmp_path, *(f"{OLD}{class_name}" for class_name in kinds), pooling=pooling)
    )
    assert settings is not None
    assert settings.pooling is None
    assert message in str(settings.unsupported)


def test_prompt_and_case(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    options = {"config_sentence_transformers": prompts, "sentence_bert_config": {"do_lower_case": True}}
    settings = read_sentence_settings(written(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", **options))
    assert settings is not None
    assert (settings.prompt, settings.pools_prompt) == ("query: ", True)
    assert (settings.lowercase, settings.max_length) == (True, None)


def test_a_prompt_may_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    settings = read_sentence_settings(
        written(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", pooling={"include_prompt": False})
    )
    assert settings is not None
    assert (settings.pooling, settings.prompt, settings.pools_prompt) == ("mean", "", False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": {"type": "x"}}, "expected a list of modules"),
        ({"modules": [{"type": "x"}]}, "expected a list of modules"),
        ({"modules": [{"type": "x.Pooling", "path": "../other"}]}, "leads out of the folder"),
        ({"modules": [{"type": "x.Pooling", "path": "/etc"}]}, "leads out of the folder"),
        ({"modules": [{"type": "x.Pooling", "path": "9_Pooling"}]}, "No such file"),
        ({"modules": [{"type": "x.Pooling", "path": "1_Pooling"}], "1_Pooling/config": {"pooling_mode": 3}}, "is 3"),
        ({"sentence_bert_config": {"max_seq_length": "many"}}, "max_seq_length is 'many'"),
        ({"sentence_bert_config": [1]}, "expected a JSON object"),
        ({"config_sentence_transformers": {"default_prompt_name": ["a"], "prompts": {"a": "b"}}}, r"\['a'\], expected"),
        ({"config_sentence_transformers": {"default_prompt_name": "q", "prompts": {"a": "b"}}}, "is 'q', expected the"),
        ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "is 'q', expected the name of one of the"),
        ({"modules": [{"type": "x.Pooling", "path": "1_\ud800"}]}, r"'\\ud800', half of a surrogate pair"),
    ],
)
def test_damaged_files_are_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_sentence_settings(written(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", **files))
