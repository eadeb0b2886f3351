"""The doctor: one finding a line, and no run on a machine that cannot bear one."""

import io
import subprocess

from rich.console import Console

from launch import doctor
from launch.doctor import Finding, examine, findings


def test_every_part_of_a_healthy_machine_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = {finding.name: finding for finding in findings()}
    assert list(found) == ["Python", "packages", "JAX", "Ray", "memory", "cores"]
    assert [finding for finding in found.values() if finding.state == "problem"] == []
    assert "cpu" in found["JAX"].text
    assert "auth mode" in found["Ray"].text and "/dev/shm" in found["memory"].text


def test_a_shadowed_package_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "pipeline.py").touch()
    monkeypatch.chdir(tmp_path)
    (problem,) = [finding for finding in doctor._packages() if finding.state == "problem"]
    assert "would import 'pipeline'" in problem.text


def test_devices_that_do_not_answer_are_a_problem_and_no_traceback(monkeypatch):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    finding = doctor._devices()
    assert (finding.name, finding.state) == ("JAX", "problem")
    assert f"did not answer within {doctor.DEVICE_SECONDS} s" in finding.text


def test_nothing_is_run_where_there_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "findings", lambda: iter([Finding("Python", "problem", "too old")]))
    console = Console(file=io.StringIO())
    assert examine(console, "inline", None) == 1
    assert "mend what is marked ✗" in console.file.getvalue()
