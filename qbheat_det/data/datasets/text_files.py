# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads label files as text, JSON, XML or lines, whatever their encoding.

UTF-8, and UTF-16 or UTF-32 with a byte-order mark, are decoded as such. XML is decoded as its first
line declares. For all other files, ``charset_normalizer`` detects the encoding.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import charset_normalizer

from qbheat_det.core.text import one_line

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LARGEST_CELL = 100_000_000  # characters
_LARGEST_XML = 100_000_000  # bytes
_HIGH = re.compile(rb"[\x80-\xff]+")
# Encodings to compare, the most usual ones first.
_EUROPEAN = ("cp1252", "cp1250", "cp1254", "cp1257")
_OTHERS = (
    *("gb18030", "cp932", "cp949", "big5", "euc_jp", "cp1251", "koi8_r", "cp1253", "cp1255"),
    *("cp1256", "cp874", "cp1252"),
)
_CERTAIN = 0.5  # smallest coherence at which a detected language decides
_SAMPLE = 1_000_000  # bytes from which an encoding is detected
_DECLARATION = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["'][^>]*\?>""")


class UnreadableFileError(ValueError):
    """The content of a file cannot be read. The message has no file name."""


class Text(NamedTuple):
    """The text of a file. ``encoding`` is "" for Unicode, else the encoding that was detected."""

    content: str
    encoding: str = ""


def decode(content: bytes) -> Text:
    """Decodes text. Raises an ``UnreadableFileError`` if it is not text."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            try:
                return Text(content.decode(encoding))
            except UnicodeDecodeError as error:
                raise UnreadableFileError(f"it is damaged: {one_line(error)}") from error
    try:
        text = content.decode()
        if "\0" not in text:
            return Text(text)
    except UnicodeDecodeError:
        pass
    encoding = _detect(content[:_SAMPLE])
    try:
        return Text(content.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"it is damaged: {one_line(error)}") from error


def _detect(content: bytes) -> str:
    """Returns the most probable encoding.

    ``charset_normalizer`` compares encodings, but label files are too short to compare all of them.
    Accented letters between plain ones show a Western or Central European encoding.
    """
    if b"\0" in content:  # of Latin letters in UTF-16
        is_little = content[1::2].count(0) > content[::2].count(0)
        return "utf_16_le" if is_little else "utf_16_be"
    runs = _HIGH.findall(content)
    is_accented = sum(len(run) == 1 for run in runs) > len(runs) / 2
    if is_accented and (matches := _compare(content, _EUROPEAN)):
        coherent = max(matches, key=lambda one: one.coherence)
        is_usual = any(_EUROPEAN[0] in one.could_be_from_charset for one in matches)
        return coherent.encoding if coherent.coherence > _CERTAIN or not is_usual else _EUROPEAN[0]
    matches = _compare(content, _OTHERS)
    if not matches:
        raise UnreadableFileError("it is not text in any known encoding")
    return min(matches, key=lambda one: (one.chaos, _OTHERS.index(one.encoding))).encoding


def _compare(content: bytes, encodings: Sequence[str]) -> list[charset_normalizer.CharsetMatch]:
    return list(charset_normalizer.from_bytes(content, cp_isolation=list(encodings)))


def read_text(file: str | Path) -> Text:
    """Returns the text of a file. Raises an ``UnreadableFileError`` if it cannot be read."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UnreadableFileError(f"it cannot be read: {error.strerror}") from error
    return decode(content)


def read_json(file: str | Path) -> Any:
    """Returns the content of a JSON file. Raises an ``UnreadableFileError`` if it is invalid."""
    try:
        return json.loads(read_text(file).content)
    except (RecursionError, json.JSONDecodeError) as error:
        raise UnreadableFileError(f"it cannot be read as JSON: {one_line(error)}") from error


def read_lines(file: str | Path) -> list[tuple[int, str]]:
    """Returns (number, text) of each line that is not blank. The first line has the number 1.

    Raises an ``UnreadableFileError`` if the file cannot be read.
    """
    return number_lines(read_text(file).content)


def read_rows(file: str | Path, delimiter: str = ",") -> list[tuple[int, list[str]]]:
    """Returns (line number, cells) of each row of a table. The first line has the number 1.

    Raises an ``UnreadableFileError`` if the file cannot be read.
    """
    stream = io.StringIO(read_text(file).content, newline="")
    rows = csv.reader(stream, delimiter=delimiter)
    before = csv.field_size_limit(_LARGEST_CELL)  # masks in a cell can be long
    try:
        return [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise UnreadableFileError(f"it cannot be read as a table: {one_line(error)}") from error
    finally:
        csv.field_size_limit(before)


def read_table(file: str | Path) -> list[dict[str, str]]:
    """Returns the rows of a table with a header by the names of the columns.

    Raises an ``UnreadableFileError`` if the file cannot be read.
    """
    rows = [row for _, row in read_rows(file)]
    header = rows[0] if rows else []
    return [dict(zip(header, row, strict=False)) for row in rows[1:] if any(row)]


def number_lines(text: str) -> list[tuple[int, str]]:
    """Returns (number, text) of each line that is not blank. The first line has the number 1."""
    lines = enumerate(text.split("\n"), start=1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def parse_xml(file: str | Path) -> ElementTree.Element:
    """Returns the root of an XML file. Raises an ``UnreadableFileError`` if it is invalid.

    Files that declare entities are refused, because entities can expand without limit.
    """
    try:
        path = Path(file)
        if path.stat().st_size > _LARGEST_XML:
            raise UnreadableFileError("it is too large for a file of labels")
        content = path.read_bytes()
        declared = _DECLARATION.match(content)
        is_utf8 = not declared or declared[1].lower() in (b"utf-8", b"utf8", b"ascii")
        text = content if is_utf8 and _is_utf8(content) else _decode_xml(content).encode()
        if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
            raise UnreadableFileError("it has a DOCTYPE, which may expand without limit")
        return ElementTree.fromstring(text)
    except (OSError, ElementTree.ParseError, LookupError, UnicodeDecodeError) as error:
        raise UnreadableFileError(f"it cannot be read as XML: {one_line(error)}") from error


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _decode_xml(content: bytes) -> str:
    """Decodes XML as it declares. A declaration that is wrong, or missing, is replaced."""
    declared = _DECLARATION.match(content)
    if declared and not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            # GBK contains GB2312, and GB18030 contains GBK. Files often have characters of these.
            name = declared[1].decode().lower()
            encoding = "gb18030" if name in ("gb2312", "gbk") else name
            return content[declared.end() :].decode(encoding)
        except (LookupError, UnicodeDecodeError):
            content = content[declared.end() :]
    text = decode(content).content.lstrip("\ufeff")
    return re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
