"""Owns what holds for every test: a private Hugging Face home, no network, the order of the files, and which families
are slow. The fixtures are in `support/fixtures.py`.

The environment is set before anything imports a Hugging Face library, because these read it at import.
"""

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

HF_HOME = Path(tempfile.mkdtemp(prefix="bert-tasks-tests-"))
FOLDERS_BELOW_HOME = (
    "HF_DATASETS_CACHE",
    "HF_EVALUATE_CACHE",
    "HF_HUB_CACHE",
    "HF_METRICS_CACHE",
    "HF_MODULES_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
)
for variable in (*FOLDERS_BELOW_HOME, "HF_TOKEN", "HF_ENDPOINT"):
    os.environ.pop(variable, None)
os.environ.update(
    HF_HOME=str(HF_HOME),
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    ORT_DISABLE_TELEMETRY="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

pytest.register_assert_rewrite("support.task_contract")

from hypothesis import settings  # noqa: E402  # only now that the environment is set

from support import durations  # noqa: E402  # only now that the environment is set

# Two runs of the suite try the same examples. `pytest --hypothesis-profile=default` draws twice as many new ones.
# No example has a deadline, because a busy machine would miss it.
settings.register_profile("repeatable", derandomize=True, max_examples=50, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write the time of each file to {durations.FILE}")


def pytest_configure(config: pytest.Config) -> None:
    # With `-n 2` this process only hands out tests to others. The libraries that the fixtures import take five
    # seconds, for which both workers would wait.
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not is_controller:
        config.pluginmanager.import_plugin("support.fixtures")
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder(), "durations")


def pytest_unconfigure() -> None:
    shutil.rmtree(HF_HOME, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    from support.hf_models import LONG_FAMILIES, lacks  # it imports transformers, which the controller does without

    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        families = [value for value in values if isinstance(value, str) and value in LONG_FAMILIES]
        if families and item.get_closest_marker("every_family") is None:
            item.add_marker(pytest.mark.slow)
        if any(lacks(family) for family in families):
            item.add_marker(pytest.mark.skip(reason="this version of transformers is no reference for the family"))
    yield  # here pytest chooses tests by their marks
    items.sort(key=durations.longest_first(items))
