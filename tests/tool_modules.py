# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The scripts of ``tools/``, which is no package, as modules."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.append(str(TOOLS))  # tools share modules there


def load_tool(name):
    """Runs ``tools/<name>.py`` but for its main, afresh at each call."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def refuse(main, words, capsys):
    """Runs a tool that is to end with exit code 2; returns what it says on stderr."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err
