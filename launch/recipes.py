"""Recipes: YAML files of settings that ship with the package, and YAML files of your own."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError

FOLDER = Path(__file__).with_name("recipes")


@dataclass(frozen=True)
class Recipe:
    """A YAML file of settings.

    Attributes:
      name: its file's name without the ending.
      path: the file.
      description: the comment it opens with, as one paragraph.
      tree: its settings, not yet validated.
    """

    name: str
    path: Path
    description: str
    tree: Mapping[str, Any]


def shipped() -> list[Recipe]:
    """Every recipe of the package, by name."""
    return [load(path) for path in sorted(FOLDER.glob("*.yaml"))]


def find(name: str) -> Recipe:
    """The shipped recipe of that name.

    Raises:
      ConfigError: there is none; the message lists those there are.
    """
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    if name in names:
        return load(FOLDER / f"{name}.yaml")
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    if Path(name).is_file():
        hint = f" It is a file: limbeck run --config {name}"
    raise ConfigError(
        f"there is no recipe {name!r}.{hint}\nrecipes: {', '.join(names)}; a file of your own: --config FILE"
    )


def load(path: str | Path) -> Recipe:
    """Read a YAML file of settings. A relative `task.prompts` in it is looked for beside the file first.

    Raises:
      ConfigError: the file cannot be read, is no YAML, or its top level is no mapping.
    """
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, _loader())
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        raise ConfigError(f"{line}: {error.problem or 'not YAML'}") from error
    if not isinstance(tree, dict):
        kind = "empty" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"the config {path} is {kind}; its top level must be sections such as run: and task:")
    return Recipe(path.stem, path, _description(text), _beside(tree, path.parent))


def _description(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).strip()


def _beside(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    task = tree.get("task")
    prompts = task.get("prompts") if isinstance(task, dict) else None
    if isinstance(prompts, str) and not Path(prompts).is_absolute() and (folder / prompts).is_file():
        return {**tree, "task": {**tree["task"], "prompts": str((folder / prompts).resolve())}}
    return tree


def _loader() -> type:
    """YAML's safe loader, less its habit of keeping the last of two equal keys in silence."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    return Loader
