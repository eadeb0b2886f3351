"""Dotted overrides: `--training.steps 20` changes one setting of a recipe."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from contracts.errors import ConfigError

_DOTTED = re.compile(r"--([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)+)(?:=(.*))?", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take the dotted overrides out of a command line.

    Args:
      arguments: what follows `limbeck`; an override is `--a.b value` or `--a.b=value`.

    Returns:
      The other arguments, and path → text in the order given. Dashes of a path read as underscores.

    Raises:
      ConfigError: an override without a value, or two values for one setting.
    """
    others: list[str] = []
    overrides: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        match = _DOTTED.fullmatch(argument)
        if match is None:
            others.append(argument)
            continue
        path = match[1].replace("-", "_")
        if match[2] is None and (not remaining or _DOTTED.fullmatch(remaining[0])):
            raise ConfigError(f"--{path} needs a value: --{path} VALUE")
        value = remaining.pop(0) if match[2] is None else match[2]
        if path in overrides:
            raise ConfigError(f"--{path} is given twice, as {overrides[path]} and as {value}; give it once")
        overrides[path] = value
    return others, overrides


def apply_overrides(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with the settings at dotted paths replaced.

    A text becomes what YAML says it is (`20` a number, `true` a boolean, `null` none), unless the setting at that path
    holds texts. A path that no setting has is put in as it is: validation names it together with every other problem.

    Raises:
      ConfigError: a path that leads through a setting that is no section.
    """
    result = _copied(tree)
    for path, value in overrides.items():
        *sections, name = path.split(".")
        place = result
        for depth, section in enumerate(sections):
            if place.get(section) is None:
                # A section that is left out, or stands for its default.
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise ConfigError(
                    f"--{path}: {'.'.join(sections[: depth + 1])} is a setting ({place!r}), not a section"
                )
        place[name] = _typed(path, value) if isinstance(value, str) else value
    return result


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _typed(path: str, text: str) -> Any:
    import yaml
    from pydantic import TypeAdapter, ValidationError

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    annotation = _annotation(path)
    for candidate in (value, text):
        try:
            TypeAdapter(annotation).validate_python(candidate)
        except ValidationError:
            continue
        return candidate
    return value


def _annotation(path: str) -> Any:
    """The declared type of the setting at a dotted path; `Any` where there is none."""
    from pydantic import BaseModel

    from pipeline.config import RunConfig

    annotation: Any = RunConfig
    for part in path.split("."):
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return Any
        if part not in annotation.model_fields:
            return Any
        annotation = annotation.model_fields[part].annotation
        sections = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections and part != path.split(".")[-1]:
            (annotation,) = sections
    return annotation
