# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The scripts of ``tools/``, which is no package, as modules."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.append(str(TOOLS))  # tools share modules there


def load_tool(name: str) -> ModuleType:
    """Runs ``tools/<name>.py`` but for its main, afresh at each call."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def refuse(
    main: Callable[[Sequence[str]], object],
    words: Sequence[str],
    capsys: pytest.CaptureFixture[Any],
) -> str:
    """Runs a tool that is to end with exit code 2; returns what it says on stderr."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err: str = capsys.readouterr().err
    return err
