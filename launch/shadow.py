"""Another package of the name `contracts` or `pipeline`, found before anything is imported from the wrong place.

Limbeck's four floors are top-level packages. PyContracts installs a `contracts` of its own, and a folder of one of these
names beside the program would be imported instead of ours: by this process, or by Ray's workers, which also look in the
folder that the driver was started from.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("contracts", "pipeline", "actors", "launch")
DISTRIBUTION = "limbeck"
HOME = Path(__file__).resolve().parent.parent


def shadowed_here(home: Path = HOME) -> list[str]:
    """What this process would import in place of Limbeck's packages; one sentence each. Cheap, and imports nothing."""
    return [
        _sentence(name, "this process imports", origin, home) for name in PACKAGES if (origin := _foreign(name, home))
    ]


def shadowed_in_workers(folder: str | Path, home: Path = HOME) -> list[str]:
    """What Ray's workers would import instead when the driver is started in ``folder``; one sentence each."""
    problems = []
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(Path(folder).resolve())])
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is not None and origin != home / name / "__init__.py":
            problems.append(_sentence(name, f"started in {folder}, Ray's workers would import", origin, home))
    return problems


def installed_twice(distributions: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Distributions that install a package of the same name; one sentence each.

    Args:
      distributions: top-level package → names of the distributions that install it; by default, of this environment.
    """
    installed = packages_distributions() if distributions is None else distributions
    return [
        f"the distribution {other} also installs a package {name!r}: it and limbeck cannot share an environment. "
        f"Run `pip uninstall {other}` and install limbeck again, or give limbeck an environment of its own."
        for name in PACKAGES
        for other in sorted(set(installed.get(name, ())))
        if other.lower() != DISTRIBUTION
    ]


def _foreign(name: str, home: Path) -> Path | None:
    """The file that `import name` reads or has read, if it is not Limbeck's."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    spec = None if loaded else find_spec(name)
    origin = loaded or (spec.origin if spec is not None else None)
    if origin is None or Path(origin).resolve() == home / name / "__init__.py":
        return None
    return Path(origin).resolve()


def _sentence(name: str, who: str, origin: Path, home: Path) -> str:
    culprit = origin.parent if origin.name == "__init__.py" else origin
    return (
        f"{who} {name!r} from {origin}, which is not limbeck's {home / name}. "
        f"Start limbeck from another folder, or rename {culprit}."
    )
