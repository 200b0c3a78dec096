# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/doctor.py: what it recognises, what it advises, and its exit code."""

import importlib
import subprocess
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tool_modules import TOOLS, load_tool

doctor = load_tool("doctor")


class Imports:
    """Stands in for ``importlib.import_module``; errors are raised, the rest is imported."""

    def __init__(self, **replaced: object) -> None:
        self.replaced = {name.replace("__", "."): value for name, value in replaced.items()}

    def __call__(self, name: str) -> object:
        found = self.replaced.get(name) or importlib.import_module(name)
        if isinstance(found, Exception):
            raise found
        return found


def test_a_bare_python_gets_the_commands_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run = subprocess.run([python, TOOLS / "doctor.py"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    for words in ("! torch ", f"{python} -m pip install", "install_detectron2.py"):
        assert words in run.stdout


def test_this_environment_has_all_that_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"torch                   {torch.__version__}\n" in printed
    assert "compiled ops" in printed
    findings = [doctor.Finding("b", "gone", "get b"), doctor.check_python((3, 9, 1))]
    assert doctor.report(findings[:1]) == 0
    assert doctor.report(findings) == 1


def test_a_cpu_build_of_torch_beside_torchvision_is_recognised() -> None:
    cpu = SimpleNamespace(
        __version__="2.13.0+cpu",
        get_num_threads=lambda: 2,
        cuda=SimpleNamespace(device_count=lambda: 0),
    )
    error = RuntimeError("operator torchvision::nms does not exist")
    findings = {one.name: one for one in doctor.check_torch(Imports(torch=cpu, torchvision=error))}
    assert findings["torchvision"].required
    # Installing alone would find torch already there.
    uninstall, install = findings["torchvision"].command.split(" && ")
    assert uninstall.endswith("pip uninstall -y torch torchvision")
    assert install.endswith("torch torchvision")


@pytest.mark.parametrize(
    ("module", "error", "command"),
    [
        ("detectron2", ModuleNotFoundError(name="detectron2"), "tools/install_detectron2.py"),
        ("detectron2__layers", ModuleNotFoundError(name="fvcore"), " fvcore"),
        ("detectron2__layers", ImportError("undefined symbol"), "uninstall -y detectron2 &&"),
    ],
)
def test_detectron2_gets_the_command_that_mends_it(
    module: str, error: ImportError, command: str
) -> None:
    (finding,) = doctor.check_detectron2(Imports(**{module: error}))
    assert finding.required
    assert command in finding.command
