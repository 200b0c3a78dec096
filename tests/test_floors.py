# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a reader relies on: who imports whom, and no names of machines."""

import ast
import re
import subprocess

import pytest

from .import_graph import (
    PACKAGE,
    ROOT,
    circles,
    file_graph,
    imported_names,
    module_files,
    parse,
    violations,
)

# What is asked of models by name is asked in one file.
CONTRACTS = ROOT / PACKAGE / "modeling" / "contracts.py"
PROBING = re.compile(
    r"\b(?:get|has)attr\(\s*(?:self\.)?_?(?:model|backbone|encoder|network|head)\b"
)


def tracked_files():
    """Returns the files that git tracks; outside a checkout, all that a source archive holds."""
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if run.returncode == 0:
        names = [ROOT / name for name in run.stdout.split("\0") if name]
        return [path for path in names if path.is_file()]
    folders = (PACKAGE, "configs", "tools", "tests", "benchmarks", "docs")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]


def python_files():
    """The tracked Python files."""
    return [path for path in tracked_files() if path.suffix == ".py"]


def test_areas_import_what_the_table_allows():
    assert violations() == []


@pytest.mark.parametrize("package", [PACKAGE, "benchmarks", "tests"])
def test_no_files_import_each_other_in_a_circle(package):
    assert circles(file_graph(package=package)) == []


def test_the_package_never_imports_what_needs_pkg_resources_on_main():
    for path in module_files().values():
        names = imported_names(parse(path), PACKAGE, False)
        bad = [name for name in names if re.match(r"detectron2\.(model_zoo|utils\.testing)", name)]
        assert bad == [], path


def test_models_are_probed_for_attributes_by_their_contracts_alone():
    for path in module_files().values():
        if path != CONTRACTS:
            assert PROBING.findall(path.read_text("utf-8")) == [], path


def test_python_files_begin_with_the_copyright_line_and_a_docstring():
    for path in python_files():
        lines = path.read_text("utf-8").splitlines()
        lines = lines[1:] if lines and lines[0].startswith("#!") else lines
        assert lines[:1] == ["# Copyright (c) qbheat_det contributors. Apache-2.0."], path
        assert path.name == "__init__.py" or ast.get_docstring(parse(path)), path


def test_no_tracked_file_names_a_machine_or_an_index_host():
    # In pieces, so that this file does not name them.
    words = ("/" + "work/", "py" + "pi.org", "python" + "hosted", "/opt/" + "wheels", "/root" + "/")
    for path in tracked_files():
        if path.suffix in (".png", ".jpg", ".jpeg", ".gif", ".pth", ".safetensors", ".npz"):
            continue
        text = path.read_text("utf-8", errors="replace")
        assert [word for word in words if word in text] == [], path
