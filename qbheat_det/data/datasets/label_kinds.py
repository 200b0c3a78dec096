# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Kinds of label files, and how a file's kind is recognized.

Each format lists its kinds. Only the start and the end of a file are read to recognize it.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .image_suffixes import suffix_of
from .text_files import UnreadableFileError, decode

_LENGTH = 16_384  # bytes at the start and at the end of a file
_NUM_LINES = 20

Matches = Callable[["Ends"], bool]


class LabelKind(NamedTuple):
    """A kind of label file.

    Attributes:
        name: name of the kind, such as "coco".
        suffixes: possible suffixes of the files, in lower case.
        matches: returns whether a file is of this kind, by its start and end.
        has_one_image: whether a file has the labels of only one image.
        names_others: whether a file tells which other label files the data set has.
    """

    name: str
    suffixes: tuple[str, ...]
    matches: Matches
    has_one_image: bool = False
    names_others: bool = False


@dataclass(frozen=True)
class Ends:
    """The text at the start and at the end of a file.

    Attributes:
        start: the first 16 KiB.
        both: the first 16 KiB, followed by the last 16 KiB.
    """

    start: str
    both: str

    @cached_property
    def keys(self) -> str:
        """``both`` without spaces between a JSON key and its colon."""
        return re.sub(r'"\s+:', '":', self.both)

    @cached_property
    def lines(self) -> list[str]:
        """The first lines that are not blank."""
        lines = (line for line in self.start.splitlines() if line.strip())
        return list(itertools.islice(lines, _NUM_LINES))

    def have_keys(self, groups: Sequence[Sequence[str]]) -> bool:
        """Returns whether a JSON file has all keys of at least one group in its start and end."""
        return any(all(f'"{key}":' in self.keys for key in group) for group in groups)

    @classmethod
    def read(cls, path: str) -> "Ends | None":
        """Reads a file. Returns None if it is no text."""
        try:
            with open(path, "rb") as stream:
                head = stream.read(_LENGTH)
                if os.fstat(stream.fileno()).st_size > 2 * _LENGTH:
                    stream.seek(-_LENGTH, os.SEEK_END)
                tail = stream.read()
            start = _decode_start(head)
        except (OSError, UnreadableFileError):
            return None
        return cls(start, start + tail.decode("utf-8", errors="replace"))


def _decode_start(head: bytes) -> str:
    """Decodes the start of a file, which may end in the middle of a character."""
    for cut in range(4):
        with contextlib.suppress(UnicodeDecodeError):
            text = head[: len(head) - cut].decode("utf-8-sig")
            if "\0" not in text:
                return text
    if len(head) == _LENGTH:
        head = head[: len(head) // 4 * 4]  # whole characters of UTF-32
    return decode(head).content


def find_kind(path: str, kinds: Sequence[LabelKind]) -> str:
    """Returns the name of the first kind that matches a file; "" if none does.

    An empty file, or one of blank lines, is of the kind "empty".
    """
    suffix = suffix_of(path)
    possible = [kind for kind in kinds if suffix in kind.suffixes]
    if not possible:
        return ""
    ends = Ends.read(path)
    if ends is None:
        return ""
    if not ends.lines:
        return "empty"
    for kind in possible:
        if kind.matches(ends):
            return kind.name
    return ""


def json_object(*keys: Sequence[str]) -> Matches:
    """Returns a test for a JSON object that has all keys of one of several groups.

    The keys may be at any depth, near the start or the end of the file.
    """

    def matches(ends: Ends) -> bool:
        return ends.start.lstrip().startswith("{") and ends.have_keys(keys)

    return matches


def json_list(*keys: Sequence[str]) -> Matches:
    """Returns a test for a JSON list that has all keys of one of several groups.

    The keys may be at any depth, near the start or the end of the file.
    """

    def matches(ends: Ends) -> bool:
        return ends.start.lstrip().startswith("[") and ends.have_keys(keys)

    return matches


def lines_like(pattern: str, *, header: str = "") -> Matches:
    """Returns a test for a text file of which at least half of the lines match a pattern.

    A file that begins with ``header`` matches too.
    """
    line = re.compile(pattern, re.IGNORECASE)

    def matches(ends: Ends) -> bool:
        if header and ends.lines[0].startswith(header):
            return True
        num_matching = sum(bool(line.match(text)) for text in ends.lines)
        return 2 * num_matching >= len(ends.lines)  # a few lines may be damaged

    return matches


def starts_with(*words: str) -> Matches:
    """Returns a test for a file whose first line that is not blank has all words."""
    return lambda ends: all(word in ends.lines[0] for word in words)
