# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The scripts of ``tools/``, which is no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
