"""Packages of the same name as ours are found before they are imported."""

import pytest

from launch.shadow import PACKAGES, installed_twice, shadowed_here, shadowed_in_workers


def test_nothing_is_shadowed_where_the_packages_are_ours(tmp_path):
    assert shadowed_here() == []
    assert shadowed_in_workers(tmp_path) == []


def test_a_package_found_elsewhere_is_named_with_both_places(tmp_path):
    problems = shadowed_here(home=tmp_path)
    assert len(problems) == len(PACKAGES)
    assert f"which is not limbeck's {tmp_path / 'contracts'}" in problems[0]


@pytest.mark.parametrize("code", ["contracts/__init__.py", "contracts.py"])
def test_code_in_the_folder_that_workers_look_in_is_named(tmp_path, code):
    (tmp_path / code).parent.mkdir(exist_ok=True)
    (tmp_path / code).touch()
    (problem,) = shadowed_in_workers(tmp_path)
    assert str(tmp_path / code) in problem


def test_a_folder_without_code_shadows_nothing(tmp_path):
    (tmp_path / "contracts").mkdir()
    (tmp_path / "contracts/lease.pdf").touch()
    assert shadowed_in_workers(tmp_path) == []


def test_a_distribution_that_installs_the_same_package_is_named():
    (problem,) = installed_twice({"contracts": ["limbeck", "PyContracts"], "numpy": ["numpy"]})
    assert "the distribution PyContracts also installs a package 'contracts'" in problem
    assert installed_twice({"contracts": ["limbeck"], "pipeline": ["Limbeck"]}) == []
