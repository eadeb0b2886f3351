"""What the documents say is run here: code, links, commands, docstring examples."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

import contracts
import pipeline
from launch.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readmes_python_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].train_steps == 2


def limbeck_commands():
    blocks = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.split(" > ")[0] for line in lines if line.startswith("limbeck ")]


@pytest.mark.parametrize("command", limbeck_commands())
def test_every_limbeck_command_of_the_readme_is_understood(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text((ROOT / "launch" / "recipes" / "split.yaml").read_text())
    arguments = shlex.split(command)[1:]
    if arguments[0] == "run":
        if "--resume" in arguments:
            arguments.remove("--resume")
        arguments = [argument.replace("RECIPE", "split") for argument in arguments]
        main(
            [*arguments, "--dry-run", "--runner", "inline"]
            if "--runner" not in arguments
            else [*arguments, "--dry-run"]
        )
    elif arguments[0] == "recipes":
        main(arguments)
    else:
        with pytest.raises(SystemExit) as end:
            main([arguments[0], "--help"])
        assert end.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_every_room_named_in_the_documents_exists(document):
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    rooms = re.findall(r"`((?:contracts|pipeline|actors|launch|benchmarks|tests)/[\w./]*)`", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [room for room in rooms if not (ROOT / room).exists()]
    assert not missing


@pytest.mark.parametrize("package", [contracts, pipeline], ids=["contracts", "pipeline"])
def test_every_public_name_can_be_imported_from_its_package(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_the_examples_in_docstrings_hold():
    sources = [path for floor in ("contracts", "pipeline", "actors", "launch") for path in (ROOT / floor).rglob("*.py")]
    with_examples = [path for path in sources if ">>> " in path.read_text()]
    assert with_examples
    for path in with_examples:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert doctest.testmod(module).failed == 0
