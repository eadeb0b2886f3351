"""`limbeck recipes`: what ships with the package, and every setting of one."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from launch.folder import dump
from launch.overrides import apply_overrides
from launch.recipes import find, shipped


def print_recipes(console: Console) -> None:
    """One line a recipe."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("recipe", style="cyan", no_wrap=True)
    table.add_column("what it does")
    for recipe in shipped():
        table.add_row(recipe.name, recipe.description)
    console.print(table, highlight=False)
    console.print("Run one: limbeck run NAME. See its settings: limbeck recipes NAME", highlight=False)


def print_recipe(console: Console, name: str, overrides: Mapping[str, str]) -> None:
    """A recipe with every default written out; as YAML that `--config` reads back.

    Raises:
      ConfigError: there is no such recipe, or the overrides do not fit it.
    """
    from pipeline.config import parse_config

    recipe = find(name)
    text = f"# {recipe.description}\n{dump(parse_config(apply_overrides(recipe.tree, overrides)))}"
    if console.is_terminal:
        console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
