# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What docs/ say of tests and config keys exists, and no objective is left out."""

import json
import re
import runpy
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qbheat_det.config import defaults, get_cfg

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TEXT = (TESTS.parent / "docs" / "training.md").read_text(encoding="utf-8")
OBJECTIVES = (TESTS.parent / "docs" / "objectives.md").read_text(encoding="utf-8")
FAST = (TESTS.parent / "docs" / "fast_mf_detr.md").read_text(encoding="utf-8")
PROBING = (TESTS.parent / "docs" / "probing.md").read_text(encoding="utf-8")
CACHING = (TESTS.parent / "docs" / "caching.md").read_text(encoding="utf-8")
EXPORTING = "".join(
    (TESTS.parent / "docs" / name).read_text(encoding="utf-8") for name in ("export.md", "fast.md")
)
TEXTS = TEXT + OBJECTIVES + FAST + PROBING + CACHING + EXPORTING
NAMED_TESTS = sorted(set(re.findall(r"`((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`", TEXTS)))
NAMED_KEYS = sorted(set(re.findall(r"`((?:[A-Z]\w+\.)+[A-Z]\w+)`", TEXTS)))


@pytest.mark.parametrize(("file", "name"), NAMED_TESTS)
def test_a_test_that_holds_a_feature_exists(file: str, name: str) -> None:
    assert f"def {name}" in (TESTS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("key", NAMED_KEYS)
def test_a_key_of_a_feature_exists(key: str) -> None:
    reduce(lambda node, part: node[part], key.split("."), get_cfg())


def test_the_tables_name_many_of_both() -> None:
    assert len(NAMED_TESTS) > 20
    assert len(NAMED_KEYS) > 20


def test_every_objective_has_its_row() -> None:
    files = (TESTS.parent / "configs" / "objectives").glob("*.yaml")
    names = {path.name for path in files if not path.name.startswith("Base-")}
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", OBJECTIVES, flags=re.MULTILINE)
    assert names <= {name for row in rows for name in re.findall(r"`(\w+\.yaml)`", row)}


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")), ids=str)
def test_a_tutorial_runs_and_is_committed_without_outputs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    monkeypatch.chdir(tmp_path)
    exec(compile("\n\n".join(code), path.name, "exec"), {"__name__": "tutorial"})


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("tutorials/*.ipynb")],
    ids=lambda path: path.name,
)
def test_links_lead_to_files_of_the_repository(path: Path) -> None:
    """So they work on a clone; of those to no page, ``docs/site.py`` makes links to pages."""
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8"))
    local = {link for link in links if ":" not in link}
    assert {link for link in local if not (path.parent / link).exists()} == set()


def test_links_to_files_without_a_page_lead_to_the_pages_of_the_site() -> None:
    turn = runpy.run_path(str(ROOT / "docs" / "site.py"))["on_page_markdown"]
    text = "[a](../MODEL_ZOO.md#b) [c](../qbheat_det/config/defaults.py) [d](../tools/zoo.py)"
    for uri, up in (("train.md", ""), ("tutorials/predict.md", "../")):
        page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        assert turn(text, page) == f"[a]({up}model_zoo.md#b) [c]({up}config.md) `d`"


def test_the_config_reference_has_every_key_with_its_default() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    page = site["describe_config"](site["DEFAULTS"].read_text("utf-8"))
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", page, flags=re.MULTILINE))
    keys = {f"{path}.{key}" for path, node in defaults._KEYS.items() for key in node}
    assert keys == set(rows)
    assert rows["SOLVER.EMA.DECAY"] == "0.9998"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "qbheat_det" in (tmp_path / "api.html").read_text("utf-8")
