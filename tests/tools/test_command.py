# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command ``qbheat``: every tool under its name, in the time of the tool."""

import runpy
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
COMMANDS = runpy.run_path(str(TOOLS / "qbheat"))["COMMANDS"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "qbheat"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_every_command_and_each_has_its_tool() -> None:
    run = _run("--help")
    assert run.returncode == 0
    assert all(f"  {name} " in run.stdout for name in COMMANDS)
    assert all((TOOLS / f"{tool}.py").is_file() for tool, _, _ in COMMANDS.values())


def test_a_command_is_its_tool() -> None:
    run = _run("train", "--help")
    assert run.returncode == 0
    assert run.stdout.startswith("usage: qbheat train ")
    assert "--data" in run.stdout
