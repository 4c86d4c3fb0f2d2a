"""The settings of a task and of its output as one flat list, which users, recipes and config.json see.

Owns the one place where settings choose an output and are given to the task and to this output (``TaskSettings.of``).
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Self, get_args, get_origin

from bert_tasks.outputs.base import Output
from bert_tasks.outputs.hf_config import label_places
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.outputs.settings import Setting, Settings


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings, ABC, Generic[PredictionT]):
    """The settings of a task, which are its own fields and those of its output.

    A task and its output are two objects, but users see one flat list of settings, in a recipe, in ``config.json`` and
    in ``of``. This class divides the list, and joins it again.

    Attributes:
        output: What the logits mean, with the labels.
        name: The name of the task in recipes and in ``config.json``.
        outputs: The classes of output that the task may have, the default first. A setting that several of them have is
            the same setting, and no setting of an output has the name of one of the task.
    """

    name: ClassVar[str]
    outputs: ClassVar[tuple[type[Output[Any]], ...]]
    output: Output[PredictionT]

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Returns a task with these settings, which are those of the task and of its output together.

        Args:
            settings: Settings as a recipe has them, and ``labels``. A setting of another output than the chosen one may
                have its default only.

        Raises:
            ValueError: A setting is unknown or impossible, or belongs to another output.

        Examples:
            >>> PairClassification.of(problem_type="regression", max_length=64).output
            Ranking(labels=(), problem_type='regression', ranking_loss='none')
        """
        output_class = cls.output_class(settings)
        of_task = _field_names(cls) - {"output"}
        of_output = _field_names(output_class)
        known = cls.settings_by_name()
        task_settings: dict[str, Any] = {}
        output_settings: dict[str, Any] = {}
        for name, value in settings.items():
            if name in of_task:
                task_settings[name] = value
            elif name in of_output:
                output_settings[name] = value
            elif name not in known:
                raise ValueError(f"{cls.name} has no setting {name!r}")
            elif value != known[name].default:
                raise ValueError(f"{name} does not apply to {cls.choice_of(output_class)}, only to {cls._owners(name)}")
        return cls(output=output_class(**output_settings), **task_settings)

    @classmethod
    def output_class(cls, settings: Mapping[str, Any]) -> type[Output[Any]]:
        """Returns the class of output that these settings choose. Default: the first of ``outputs``.

        A task with several outputs overrides it, for example to choose by ``problem_type``, and ``choice_of`` with it.

        Args:
            settings: Settings of the task and of its output, as in ``of``.

        Raises:
            ValueError: There is no such output.
        """
        return cls.outputs[0]

    @classmethod
    def _stored_output(cls, stored: Mapping[str, Any]) -> type[Output[Any]] | None:
        """Returns the output of a saved model, or None for a choice that does not exist, which a caller may replace."""
        try:
            return cls.output_class(stored)
        except ValueError:  # a setting of another version, for example
            return None

    @classmethod
    def choice_of(cls, output: type[Output[Any]]) -> str:
        """Returns how users choose an output, for messages. Default: the name of the output."""
        return output.name

    @classmethod
    def _owners(cls, name: str) -> str:
        """Returns how users choose the outputs that have a setting."""
        owners = [output for output in cls.outputs if name in _field_names(output)]
        return " and ".join(cls.choice_of(output) for output in owners)

    @classmethod
    @cache
    def settings_by_name(cls) -> Mapping[str, Setting]:
        """Returns all settings of the task and of its outputs by their names, ``labels`` first.

        Raises:
            ValueError: The task and one of its outputs have a setting of the same name.
        """
        of_task = dict(cls.own_settings())
        del of_task["output"]
        known = {"labels": cls.outputs[0].own_settings()["labels"], **of_task}  # where users look for them
        for output in cls.outputs:
            for name, setting in output.own_settings().items():
                if name in of_task:
                    raise ValueError(f"{cls.__name__} and {output.__name__} both have the setting {name!r}. Rename one")
                if name in known:  # several outputs have it, so that its values are those of any of them
                    setting = replace(known[name], hint=_joined_hint(known[name].hint, setting.hint))
                known[name] = setting
        return MappingProxyType(known)

    @classmethod
    def stated_settings(cls) -> dict[str, Setting]:
        """Returns the settings that a user may set, ``labels`` first."""
        stated = dict(cls.settings_by_name())
        for name in cls.fitted_names():
            del stated[name]
        return stated

    @classmethod
    def fitted_names(cls) -> tuple[str, ...]:
        """Returns the names of the settings that are fitted to data."""
        return tuple(name for name, setting in cls.settings_by_name().items() if setting.is_fitted)

    def values(self) -> dict[str, Any]:
        """Returns the value of each setting, with the defaults of the settings of other outputs, if they have one."""
        values: dict[str, Any] = {}
        for name, setting in self.settings_by_name().items():
            if setting.default is not MISSING:
                values[name] = setting.default
        for owner in (self, self.output):
            for each in fields(owner):  # not asdict, which would copy the output into a dict
                values[each.name] = getattr(owner, each.name)
        del values["output"]
        return values

    def settings(self) -> dict[str, Any]:
        """Returns the settings that a user sets, without ``labels``, as config.json and run.json hold them."""
        values = self.values()
        stated = [name for name in self.stated_settings() if name != "labels"]
        return {name: values[name] for name in stated if name in values}

    def fitted_values(self) -> dict[str, Any]:
        """Returns the settings that are fitted to data."""
        values = self.values()
        return {name: values[name] for name in self.fitted_names()}

    def with_settings(self, **changes: Any) -> Self:
        """Returns the task with other values of some settings.

        Args:
            changes: Settings of the task and of its output, as in ``of``. All others stay, fitted values included.

        Raises:
            ValueError: As in ``of``.
        """
        return self.of(**{**self.values(), **changes})

    def without_fitted_values(self) -> Self:
        """Returns the task with its labels and settings only."""
        return self.of(labels=self.output.labels, **self.settings())

    @classmethod
    def compatible_settings(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the stored settings that remain valid beside given ones.

        A given setting changes no other one, except those that cannot be combined with it: weights that were fitted for
        another setting, values for each label if the labels are others, and settings of another output.

        Args:
            stored: Settings of a saved model, with ``labels`` and fitted values.
            given: The settings of the caller.
        """
        known = cls.settings_by_name()
        compatible = {name: value for name, value in stored.items() if name not in given}
        if given.get("class_weights", "balanced") != "balanced":
            compatible.pop("balanced_weights", None)  # they were computed for another setting
        if "thresholds" in given:
            compatible.pop("promise", None)  # it is kept by the stored thresholds
        output = cls.output_class({**compatible, **given})
        if output is not cls._stored_output(stored):
            compatible = cls._kept_for(output, compatible)
        stored_labels = stored.get("labels", ())
        labels = given.get("labels", stored_labels)
        if labels == stored_labels:
            return compatible
        places = label_places(stored_labels, labels)
        if places is None:
            compatible.pop("promise", None)  # the thresholds are not kept either
        for name, value in compatible.items():
            if not known[name].is_per_label or not isinstance(value, tuple) or not value:
                continue
            if places is None:  # other labels, for which nobody knows the values
                compatible[name] = known[name].default
            else:
                compatible[name] = tuple(value[index] for index in places)
        return compatible

    @classmethod
    def _kept_for(cls, output: type[Output[Any]], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the stored settings that remain valid if another output is chosen."""
        known, of_output, of_task = cls.settings_by_name(), output.own_settings(), _field_names(cls)
        kept: dict[str, Any] = {}
        for name, value in stored.items():
            # What was fitted, was fitted to the other output.
            is_valid = name in of_task or (name in of_output and not known[name].is_fitted)
            if is_valid and (name != "labels" or output.has_labels):
                kept[name] = value
        return kept


def required_settings(task_class: type[TaskSettings[Any]]) -> list[str]:
    """Returns the names of the settings without a default, which the task or all of its outputs have."""
    of_task = task_class.own_settings()
    of_outputs = [output.own_settings() for output in task_class.outputs]
    required = []
    for name, setting in task_class.stated_settings().items():
        # A setting of some outputs only is not needed if another output is chosen.
        is_always_read = name in of_task or all(name in settings for settings in of_outputs)
        if setting.default is MISSING and is_always_read:
            required.append(name)
    return required


def _field_names(owner: type[Settings]) -> set[str]:
    return {field.name for field in fields(owner)}


def _joined_hint(first: Any, second: Any) -> Any:
    """Returns the type of a setting that two outputs have, whose choices are those of both."""
    if get_origin(first) is Literal and get_origin(second) is Literal:
        choices = dict.fromkeys([*get_args(first), *get_args(second)])
        return Literal[tuple(choices)]
    return first
