# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the README shows is run, and what it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:configs|tools|docs)/[\w./-]+\.\w+", README)))
)
def test_a_file_that_the_readme_names_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make (\w+)", README)) - {"it"}))
def test_a_make_target_that_the_readme_names_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
