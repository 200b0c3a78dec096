# Copyright (c) qbheat_det contributors. Apache-2.0.
"""docs/visualize.md explains every figure; its commands are in test_docs_commands.py."""

from pathlib import Path

import pytest

from .tool_modules import load_tool

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "visualize.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", load_tool("figure_flags").FIGURES)
def test_a_figure_is_explained_and_listed(name: str) -> None:
    assert f"\n### {name}\n" in DOCS
    assert f"| [`{name}`](#{name}) |" in DOCS
