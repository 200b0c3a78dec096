# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command ``qbheat``, every tool under its name."""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.tool_modules import load_tool

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

    run = _run("train", "--help")
    assert run.returncode == 0
    assert run.stdout.startswith("usage: qbheat train ")
    assert "--data" in run.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--weights w --images x --conf 0.5", "use --threshold for --conf"),
        ("--weights w --source x", "use --images for --source"),
        ("--weights w source=x", "use --images for source"),
    ],
)
def test_flags_of_other_libraries_are_answered_with_ours(
    words: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["qbheat predict", *words.split()])
    with pytest.raises(SystemExit):
        load_tool("predict").parse_args()
    assert named in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["qbheat predict", "--images", "source"])  # a folder
    with pytest.raises(SystemExit):
        load_tool("predict").parse_args()
    assert "use --images" not in capsys.readouterr().err


def test_no_help_waits_for_large_libraries() -> None:
    code = f"""
import runpy, sys
for name in {["--help", *COMMANDS]}:
    sys.argv = ["qbheat", *dict.fromkeys([name, "--help"])]
    try:
        runpy.run_path({str(TOOLS / "qbheat")!r}, run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
    large = {{"torch", "numpy", "detectron2", "matplotlib", "gradio"}}
    found = large & set(sys.modules)
    assert not found, (name, found)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_commands_hide_warnings_of_other_libraries_alone() -> None:
    hide = runpy.run_path(str(TOOLS / "arguments.py"))["hide_foreign_warnings"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        hide()
        for module in ("torch.jit._script", "torch", "onnxscript.ir", "qbheat_det.data", "torchy"):
            warnings.warn_explicit(module, FutureWarning, "file.py", 1, module=module, registry={})
    assert [str(warning.message) for warning in shown] == ["qbheat_det.data", "torchy"]
