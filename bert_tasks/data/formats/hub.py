"""Splits of data sets on the hub, or in folders with the layout of such a data set."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from yaml import YAMLError

from bert_tasks.data.batch import Batches
from bert_tasks.data.parsers import dataset_batches
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """One split of a data set.

    Attributes:
        dataset: Name of the data set on the hub, or a folder.
        config: Its configuration, such as ``sst2``.
        split: Name of the split.
        revision: Its branch, tag or commit.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def name(self) -> str:
        """The name of the split in messages, such as ``glue/sst2/train``."""
        return "/".join(part for part in (self.dataset, self.config, self.split) if part is not None)

    def open(self) -> tuple[Batches, dict[str, str | None] | None]:
        """Returns the rows, and their data set, configuration, split, commit and licence if they are of the hub.

        Class ids become the names that the data set defines for them. -1 means that a label is hidden.

        Raises:
            DataError: The data set cannot be loaded.
        """
        rows = _hub_rows(self.dataset, self.config, self.split, self.revision)
        commit = None
        if not Path(self.dataset).exists():
            commit = _commit(rows)
        if commit is None:
            return dataset_batches(rows), None
        origin = {"dataset": self.dataset, "config": self.config, "split": self.split, "commit": commit}
        origin["licence"] = _licence(self.dataset, commit)
        return dataset_batches(rows), origin


def hub_splits(dataset: str, *, config: str | None = None, revision: str | None = None) -> list[str]:
    """Returns the names of a data set's splits."""
    import datasets

    try:
        return list(datasets.get_dataset_split_names(dataset, config, revision=revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error


def _hub_rows(dataset: str, config: str | None, split: str, revision: str | None) -> "Dataset":
    """Loads a split of a data set, from the hub, from the cache of ``datasets``, or from a folder."""
    import datasets
    from huggingface_hub.file_download import repo_folder_name

    if revision is not None and Path(dataset).exists():
        raise DataError(f"{dataset} is a folder here and not on the hub, so it has no revision {revision!r}. Remove it")
    try:
        rows = datasets.load_dataset(dataset, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unusable_dataset(dataset, config, error) from error
    if datasets.config.HF_HUB_OFFLINE and revision is not None:
        # Offline `datasets` takes the newest commit that it prepared, whatever revision is asked for. A branch or tag
        # is the commit that it was when the hub was last asked.
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        name = folder / "refs" / revision
        known = {revision}
        if name.is_file():
            known.add(name.read_text("utf-8").strip())
        if _commit(rows) not in known:
            raise DataError(
                f"{dataset} (revision {revision}): HF_HUB_OFFLINE is set, and the newest revision in the cache of "
                "data sets is another one. Unset HF_HUB_OFFLINE once, or read local files with data.dir or data.train"
            )
    return rows


def _commit(rows: "Dataset") -> str | None:
    """Returns the commit of the hub's data set from the folder of its prepared rows."""
    folders = {Path(file["filename"]).parent.name for file in rows.cache_files}
    commits = [name for name in folders if _COMMIT.fullmatch(name)]
    if not len(commits) == len(folders) == 1:
        return None
    return commits[0]


def _licence(dataset: str, commit: str) -> str | None:
    """Returns the licence in the metadata of the data set's page, if it is cached."""
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    page = try_to_load_from_cache(dataset, "README.md", repo_type="dataset", revision=commit)
    if not isinstance(page, str):  # None, or a mark that the data set has no page
        return None
    try:
        licence: str | list[str] | None = DatasetCard.load(page).data.license
    except (OSError, ValueError, YAMLError):  # a page that cannot be read
        return None
    if isinstance(licence, list):
        return ", ".join(map(str, licence))
    return licence


def _unusable_dataset(dataset: str, config: str | None, error: Exception) -> DataError:
    """Returns the error for a data set that ``datasets`` cannot load, with the reason."""
    cause = error.__cause__  # which says more, because ``datasets`` wraps errors in others
    if cause is None:
        cause = error
    reason = str(cause).strip().rstrip(".")
    name = dataset
    if config is not None:
        name = f"{dataset} (config {config!r})"
    return DataError(
        f"{name}: the data set cannot be loaded. Check its name, config and split, or read local files with data.dir "
        f"or data.train ({reason})"
    )
