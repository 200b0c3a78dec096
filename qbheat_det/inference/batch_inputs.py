# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Many images by name, in chunks: of files and folders, of shards, and of Parquet tables."""

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.data import absolute, are_shards, list_shard_images

from .predict import find_inputs

_COLUMNS = ("image", "bytes", "path", "file", "file_name")
# Arrow's names of types; the struct is that of data sets of Hugging Face.
_OF_FILES = re.compile(r"(dictionary<values=)?\w*binary|struct<.*\bbytes: \w*binary")
_OF_PATHS = re.compile(r"(dictionary<values=)?\w*string")
_ROWS = 64  # of a table that are in memory at a time


class Item(NamedTuple):
    """An image: ``file`` in ``source``, a folder, an address of shards or a table (by row).

    ``path`` is what Detectron2's path manager opens; empty for a file inside a table's column.
    """

    source: str
    file: str
    path: str
    column: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """Source and file as results have them: bytes of a file's name that are no text escaped."""
        return escape(self.source), escape(self.file)


class Chunk(NamedTuple):
    """What a worker gets at a time, and what one file of results, ``name``, holds."""

    name: str
    items: list[Item]


def import_parquet() -> Any:
    """Returns ``pyarrow.parquet``; a ``UserError`` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'qbheat_det[ray]'") from error
    return pyarrow.parquet


def list_items(images: Sequence[str], column: str = "", exclude: Path | None = None) -> list[Item]:
    """Lists images, each once.

    Args:
        images: files, folders (searched recursively), folders and addresses of shards, Parquet
            files, and folders with such files, of which nothing else is read.
        column: of tables, with paths below the table's folder, or with the files themselves; by
            default the first of ``_COLUMNS``.
        exclude: a folder to leave out.

    Raises:
        UserError: an input does not exist, there are no images, or a table has no such column.
    """
    items: dict[Item, None] = {}  # in order, each once
    plain = []
    for name in images:
        path = Path(name)
        if are_shards(name):
            source = absolute(name)
            found = [Item(source, file, place) for file, place in list_shard_images(source)]
            items.update(dict.fromkeys(found))
        elif tables := [path] if path.suffix == ".parquet" else sorted(path.glob("*.parquet")):
            for table in tables:
                items.update(dict.fromkeys(_list_table(table, column)))
        else:
            plain.append(name)
    for file in find_inputs(plain, exclude) if plain else ():
        place = absolute(file.path)
        items[Item(place.removesuffix(file.name).rstrip("/"), file.name, place)] = None
    if not items:
        raise UserError(f"no images in {', '.join(images)}")
    return list(items)


def _list_table(path: Path, column: str) -> Iterator[Item]:
    try:
        table = import_parquet().ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise UserError(f"'{path}' cannot be read as Parquet: {error}") from error
    schema = table.schema_arrow
    wanted = (column,) if column else _COLUMNS
    chosen = next((name for name in wanted if name in schema.names), "")
    kind = str(schema.field(chosen).type) if chosen else ""
    if _OF_FILES.match(kind):
        for row in range(table.metadata.num_rows):
            yield Item(absolute(path), str(row), "", chosen)
    elif _OF_PATHS.match(kind):
        folder = absolute(path.parent)
        for batch in table.iter_batches(columns=[chosen]):
            for value in map(str, batch.column(0).to_pylist()):
                yield Item(folder, value, str(Path(folder, value)))
    else:
        raise UserError(
            f"'{path}' has no column {' or '.join(wanted)} of paths or files, but "
            f"{', '.join(schema.names)}: name one by --column"
        )


def cut_chunks(items: Sequence[Item], size: int, done: Collection[tuple[str, str]]) -> list[Chunk]:
    """Cuts images into chunks of a size, at the same places whatever is done.

    The name of a chunk is a function of its place and its images. ``done`` are source and file of
    images to leave out.
    """
    chunks = []
    for number, start in enumerate(range(0, len(items), size)):
        part = [item for item in items[start : start + size] if item.names not in done]
        if part:
            digest = hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]
            chunks.append(Chunk(f"part-{number:08d}-{digest}.parquet", part))
    return chunks


def escape(text: str) -> str:
    """Returns a text without what UTF-8 cannot write, such as bytes of a name that are no text."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def open_items(items: Sequence[Item]) -> Iterator[list[str]]:
    """Yields what the path manager opens for each image; those in tables are unpacked.

    Raises:
        UserError: a table is not there any more.
    """
    paths = [item.path for item in items]
    tables: dict[tuple[str, str], dict[int, int]] = {}  # by row, the place in items
    for place, item in enumerate(items):
        if not item.path:
            tables.setdefault((item.source, item.column), {})[int(item.file)] = place
    with tempfile.TemporaryDirectory(prefix="qbheat_") as folder:
        for (table, column), places in tables.items():
            for row, content in _read_cells(table, column, places):
                path = Path(folder, str(places[row]))
                path.write_bytes(content)
                paths[places[row]] = str(path)
        yield paths


def _read_cells(path: str, column: str, rows: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Yields the files in rows of a table, empty where there is none."""
    try:
        table = import_parquet().ParquetFile(path)
        row = 0
        for group in range(table.num_row_groups):
            end = row + table.metadata.row_group(group).num_rows
            if any(row <= wanted < end for wanted in rows):
                for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    for offset in [n for n in range(len(batch)) if row + n in rows]:
                        value = batch.column(0)[offset].as_py()
                        value = value["bytes"] if isinstance(value, dict) else value
                        yield row + offset, value or b""
                    row += len(batch)
            row = end
    except OSError as error:
        raise UserError(f"'{path}' cannot be read any more: {error}") from error
