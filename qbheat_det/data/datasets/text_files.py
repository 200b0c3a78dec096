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
_MAX_CELL_LENGTH = 100_000_000  # characters
_MAX_XML_SIZE = 100_000_000  # bytes
_NON_ASCII = re.compile(rb"[\x80-\xff]+")
# Encodings to try, the most usual ones first.
_EUROPEAN = ("cp1252", "cp1250", "cp1254", "cp1257")
_OTHERS = (
    *("gb18030", "cp932", "cp949", "big5", "euc_jp", "cp1251", "koi8_r", "cp1253", "cp1255"),
    *("cp1256", "cp874", "cp1252"),
)
# A language that is detected with a larger coherence (from 0 to 1) decides the encoding.
_MIN_COHERENCE = 0.5
_SAMPLE_SIZE = 1_000_000  # bytes at the start of a file, used to detect its encoding
_DECLARATION = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["'][^>]*\?>""")


class UnreadableFileError(ValueError):
    """The content of a file cannot be read. The message has no file name."""


class Text(NamedTuple):
    """The text of a file. ``encoding`` is "" for Unicode, else the encoding that was detected."""

    content: str
    encoding: str = ""


def decode(content: bytes) -> Text:
    """Decodes the bytes of a text file, whose encoding is detected if it is not Unicode.

    Raises an ``UnreadableFileError`` if they are not text in any known encoding.
    """
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
    encoding = _detect_encoding(content[:_SAMPLE_SIZE])
    try:
        return Text(content.decode(encoding), encoding)
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"it is damaged: {one_line(error)}") from error


def _detect_encoding(content: bytes) -> str:
    """Returns the most probable encoding of a text that is not UTF-8.

    ``charset_normalizer`` cannot tell all encodings apart in a text as short as a label file, so it
    gets only European encodings or only others. The text is probably European if most bytes above
    127 are single, as accented letters between plain letters are.
    """
    if b"\0" in content:  # UTF-16, in which Latin letters have a zero byte
        is_little_endian = content[1::2].count(0) > content[::2].count(0)
        return "utf_16_le" if is_little_endian else "utf_16_be"
    runs = _NON_ASCII.findall(content)
    is_accented = sum(len(run) == 1 for run in runs) > len(runs) / 2
    if is_accented:
        matches = list(charset_normalizer.from_bytes(content, cp_isolation=list(_EUROPEAN)))
        if matches:
            return _choose_european(matches)
    matches = list(charset_normalizer.from_bytes(content, cp_isolation=list(_OTHERS)))
    if not matches:
        raise UnreadableFileError("it is not text in any known encoding")
    best = min(matches, key=lambda match: (match.chaos, _OTHERS.index(match.encoding)))
    return best.encoding


def _choose_european(matches: Sequence[charset_normalizer.CharsetMatch]) -> str:
    """Returns cp1252, unless the text cannot be cp1252 or another encoding is clearly likelier."""
    best = max(matches, key=lambda match: match.coherence)
    usual = _EUROPEAN[0]
    is_possible = any(usual in match.could_be_from_charset for match in matches)
    if is_possible and best.coherence <= _MIN_COHERENCE:
        return usual
    return best.encoding


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
    except UnreadableFileError:
        raise
    except Exception as error:
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
    previous_limit = csv.field_size_limit(_MAX_CELL_LENGTH)  # masks in a cell can be long
    try:
        return [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise UnreadableFileError(f"it cannot be read as a table: {one_line(error)}") from error
    finally:
        csv.field_size_limit(previous_limit)


def read_table(file: str | Path) -> list[dict[str, str]]:
    """Returns a dict for each row of a table with a header. Its keys are the names of the columns.

    Raises an ``UnreadableFileError`` if the file cannot be read.
    """
    rows = [row for _, row in read_rows(file)]
    if not rows:
        return []
    header, *body = rows
    return [dict(zip(header, row, strict=False)) for row in body if any(row)]


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
        if path.stat().st_size > _MAX_XML_SIZE:
            raise UnreadableFileError("it is too large for a file of labels")
        content = path.read_bytes()
        if not _is_utf8_xml(content):
            content = _decode_xml(content).encode()
        if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
            raise UnreadableFileError("it has a DOCTYPE, which may expand without limit")
        return ElementTree.fromstring(content)
    except UnreadableFileError:
        raise
    except Exception as error:
        raise UnreadableFileError(f"it cannot be read as XML: {one_line(error)}") from error


def _is_utf8_xml(content: bytes) -> bool:
    """Whether XML is in UTF-8, and declares no other encoding."""
    declared = _DECLARATION.match(content)
    if declared and declared[1].lower() not in (b"utf-8", b"utf8", b"ascii"):
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _decode_xml(content: bytes) -> str:
    """Decodes XML, and removes its declaration.

    The declared encoding is used if it is valid. Otherwise, the encoding is detected.
    """
    declared = _DECLARATION.match(content)
    if declared and not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            encoding = declared[1].decode().lower()
            # Files often have characters that their declared encoding lacks. GB18030 extends both.
            if encoding in ("gb2312", "gbk"):
                encoding = "gb18030"
            return content[declared.end() :].decode(encoding)
        except (LookupError, UnicodeDecodeError):
            content = content[declared.end() :]
    text = decode(content).content.lstrip("\ufeff")
    return re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
