# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The house rules that a reader relies on: imports point down, files stay short, names stay out."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "qbheat_det"

# Folders of the package by floor. One imports from floors below its own, never from its own.
FLOORS = {
    "model_zoo": 9,
    "export": 8,
    "engine": 7,
    "analysis": 8,
    "probing": 6,
    "modeling.dense": 4,
    "deployment": 6,
    "modeling.pretrain": 4,
    "modeling.detr": 4,
    "modeling.classification": 4,
    "modeling.image_model": 3,
    "modeling.contracts": 1,
    "modeling.backbone": 3,
    "data": 3,
    "solver": 3,
    "checkpoint": 3,
    "evaluation": 3,
    "config": 2,
    "layers": 1,
    "core": 0,
}
# These collect what is below them, for registration, and belong to no floor.
EXEMPT = ("__init__.py", "api.py", "modeling/__init__.py")
# While modules move between these, they import each other.
MOVING = ("engine", "probing", "export")
MAX_LINES = 350
TABLES = ("qbheat_det/config/defaults.py",)  # every key with its comment, in one place
MAX_FUNCTION_LINES = 60


def unit_of(module: str) -> str | None:
    """Returns the row of ``FLOORS`` that a dotted module of the package belongs to."""
    parts = module.split(".")
    for length in (3, 2):
        unit = ".".join(parts[1:length])
        if unit in FLOORS:
            return unit
    return None


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yields every module that a parsed file names in an import, absolute, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") + (["__init__"] if is_package else [])
                base = ".".join([*parts[: -node.level], *([base] if base else [])])
            # ``from package import name``: the name may be a module.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def floor_violations(root: Path) -> list[str]:
    """Returns one line for every import below ``root/qbheat_det`` that does not point down."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root / PACKAGE).as_posix()
        if relative in EXEMPT or "__pycache__" in relative:
            continue
        is_package = path.name == "__init__.py"
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        unit = unit_of(module)
        if unit is None:
            found.append(f"{relative} stands on no floor")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in imported_modules(tree, module, is_package):
            if name.split(".")[0] != PACKAGE:
                continue
            target = unit_of(name)
            if target is None:
                found.append(f"{relative} imports {name}, which stands on no floor")
            elif (
                target != unit
                and FLOORS[target] >= FLOORS[unit]
                and not {target, unit} <= set(MOVING)
            ):
                found.append(f"{relative} imports {name}")
    return found


def tracked_files() -> list[Path]:
    """Returns the files that git tracks; outside a checkout, all that a source archive holds."""
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if run.returncode == 0:
        names = [ROOT / name for name in run.stdout.split("\0") if name]
        return [path for path in names if path.is_file()]
    folders = (PACKAGE, "configs", "tools", "tests", "benchmarks", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]


def python_files() -> list[Path]:
    """The tracked Python files."""
    return [path for path in tracked_files() if path.suffix == ".py"]


def test_imports_inside_the_package_point_down() -> None:
    assert floor_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("layers/a.py", "from qbheat_det.modeling.backbone import x", "modeling.backbone.x"),
        ("layers/a.py", "from ..config import x", "config.x"),
        ("layers/__init__.py", "from ..config import x", "config.x"),
        ("modeling/backbone/a.py", "import qbheat_det.data", "data"),
        ("modeling/backbone/a.py", "from ..detr.matcher import x", "modeling.detr.matcher.x"),
        ("modeling/backbone/a.py", "from .. import detr", "modeling.detr"),
        ("data/a.py", "def f():\n    from qbheat_det.solver import x", "solver.x"),
        ("core/errors.py", "from ..layers import x", "layers.x"),
        ("config/a.py", "from qbheat_det import get_cfg", "get_cfg, which stands on no floor"),
    ],
)
def test_an_import_up_or_sideways_is_seen(
    tmp_path: Path, file: str, line: str, expected: str
) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert floor_violations(tmp_path) == [f"{file} imports qbheat_det.{expected}"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("layers/a.py", "from .b import x\nfrom . import c"),
        ("modeling/detr/a.py", "from qbheat_det.layers import x\nfrom ..backbone import y"),
        ("modeling/pretrain/a.py", "from qbheat_det.core.errors import UserError\nimport torch"),
        ("engine/__init__.py", "from .trainer import Trainer"),
    ],
)
def test_an_import_down_or_inside_a_folder_is_fine(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert floor_violations(tmp_path) == []


def test_a_folder_that_the_table_does_not_know_is_seen(tmp_path: Path) -> None:
    path = tmp_path / PACKAGE / "helpers" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert floor_violations(tmp_path) == ["helpers/a.py stands on no floor"]


def test_the_package_never_imports_what_needs_pkg_resources_on_main() -> None:
    for path in (ROOT / PACKAGE).rglob("*.py"):
        names = imported_modules(ast.parse(path.read_text("utf-8")), PACKAGE, False)
        bad = [name for name in names if re.match(r"detectron2\.(model_zoo|utils\.testing)", name)]
        assert bad == [], path


def test_files_and_functions_stay_short() -> None:
    for path in python_files():
        text = path.read_text("utf-8")
        is_table = path.relative_to(ROOT).as_posix() in TABLES
        assert is_table or len(text.splitlines()) <= MAX_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                length -= len((ast.get_docstring(node, clean=False) or "").splitlines())
                assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


def test_python_files_begin_with_the_copyright_line_and_a_docstring() -> None:
    for path in python_files():
        lines = path.read_text("utf-8").splitlines()
        lines = lines[1:] if lines and lines[0].startswith("#!") else lines
        assert lines[:1] == ["# Copyright (c) qbheat_det contributors. Apache-2.0."], path
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse("\n".join(lines))), f"{path} has no docstring"


def test_no_tracked_file_names_a_machine_or_an_index_host() -> None:
    # In pieces, so that this file does not name them.
    words = ("/" + "work/", "py" + "pi.org", "python" + "hosted", "/opt/" + "wheels", "/root" + "/")
    for path in tracked_files():
        if path.suffix in (".png", ".jpg", ".jpeg", ".gif", ".pth", ".safetensors", ".npz"):
            continue
        text = path.read_text("utf-8", errors="replace")
        assert [word for word in words if word in text] == [], path
