# Copyright (c) qbheat_det contributors. Apache-2.0.
"""docs/visualize.md and README.md: commands are understood, and every figure is explained."""

import re
import shlex
from pathlib import Path

import pytest

from .tool_modules import load_tool

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "visualize.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
HELP = "".join((ROOT / "tools" / f"{name}.py").read_text(encoding="utf-8").replace("\\\\", "\\")
               for name in ("visualize", "report"))  # fmt: skip
COMMANDS = sorted(
    set(
        re.findall(
            r"^ *python (tools/(?:visualize|report)\.py(?:[^\n]*\\\n)*[^\n]*)",
            f"{DOCS}\n{README}\n{HELP}",
            flags=re.MULTILINE,
        )
    )
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str) -> None:
    tool, *words = shlex.split(command.replace("\\\n", " "), comments=True)
    if "--help" in words:
        with pytest.raises(SystemExit, match=r"^0$"):
            load_tool(Path(tool).stem).parse_args(words)
    else:
        assert load_tool(Path(tool).stem).parse_args(words)


def test_there_are_commands_of_both_tools() -> None:
    assert len(COMMANDS) >= 8
    assert {command.split(".py")[0] for command in COMMANDS} == {"tools/visualize", "tools/report"}


@pytest.mark.parametrize("name", load_tool("figure_flags").FIGURES)
def test_a_figure_is_explained_and_listed(name: str) -> None:
    assert f"\n### {name}\n" in DOCS
    assert f"| [`{name}`](#{name}) |" in DOCS
