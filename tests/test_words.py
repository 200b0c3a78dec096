# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Plain English: the rules of styles/ hold for pages, docstrings and comments."""

import io
import re
import tokenize
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for name in ("qbheat_det", "tools") for path in sorted((ROOT / name).rglob("*.py"))]


def read_rule(name):
    """Returns a rule of ``styles/qbheat``, which Vale reads too."""
    return yaml.safe_load((ROOT / f"styles/qbheat/{name}.yml").read_text("utf-8"))


WORDS = re.compile("|".join(rf"\b(?:{key})\b" for key in read_rule("Words")["swap"]), re.I)
OPENINGS = re.compile("|".join(read_rule("Openings")["tokens"]))
LENGTH = read_rule("SentenceLength")


def split_page(text):
    """Yields the sentences of a Markdown page, without code, tables, comments and addresses."""
    text = re.sub(
        r"(?s)^---\n.*?^---\n|^ *```.*?^ *```|<!--.*?-->|<[^>]+>|`[^`\n]*`", "X", text, flags=re.M
    )
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in re.split(r"\n\s*\n|^#+ .*$|^\s*(?:[-*]|\d+\.) |^\|.*$", text, flags=re.M):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


def split_code(text):
    """Yields the comments and strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield " ".join(token.string.split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_in_plain_sentences(path):
    for sentence in split_page(path.read_text("utf-8")):
        words = len(re.findall(LENGTH["token"], sentence))
        assert words <= LENGTH["max"], f"{words} words: {sentence}"
        assert not OPENINGS.search(sentence), sentence
        assert not WORDS.search(sentence), sentence


def test_code_uses_plain_words():
    found = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path in CODE
        for text in split_code(path.read_text("utf-8"))
        if WORDS.search(text)
    ]
    assert found == []
