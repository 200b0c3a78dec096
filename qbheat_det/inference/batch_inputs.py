# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Lists the images in folders, shards and Parquet tables, and divides them into chunks."""

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

from .images import find_inputs

_COLUMNS = ("image", "bytes", "path", "file", "file_name")
# Arrow's names of column types. Data sets of Hugging Face store images as such a struct.
_OF_FILES = re.compile(r"(dictionary<values=)?\w*binary|struct<.*\bbytes: \w*binary")
_OF_PATHS = re.compile(r"(dictionary<values=)?\w*string")
_ROWS = 64  # rows of a table that are read at a time


class Item(NamedTuple):
    """An image called ``file`` in ``source``, which is a folder, an address of shards or a table.

    Detectron2's path manager opens ``path``. For an image stored inside a table, ``path`` is empty
    and ``file`` is the row number.
    """

    source: str
    file: str
    path: str
    column: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """``source`` and ``file`` as written to the results, with non-UTF-8 bytes escaped."""
        return _escape(self.source), _escape(self.file)


def _escape(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class Chunk(NamedTuple):
    """The images of one Parquet file of results. ``name`` is the file name."""

    name: str
    items: list[Item]


def import_parquet() -> Any:
    """Returns ``pyarrow.parquet``, or raises a ``UserError`` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'qbheat_det[ray]'") from error
    return pyarrow.parquet


def list_items(images: Sequence[str], column: str = "", exclude: Path | None = None) -> list[Item]:
    """Lists all images without duplicates.

    Args:
        images: files, folders (searched recursively), folders and addresses of shards, Parquet
            files, and folders of Parquet files.
        column: table column with either the paths of the images, relative to the table's folder,
            or the contents of the image files. By default the first one found of ``_COLUMNS``.
        exclude: a folder to ignore.

    Raises:
        UserError: an input does not exist, there are no images, or a table has no such column.
    """
    items: dict[Item, None] = {}  # an ordered set
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
    except (OSError, ValueError) as error:  # pyarrow raises both
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
            f"'{path}' has no column {' or '.join(wanted)} of paths or files, only "
            f"{', '.join(schema.names)}: choose one with --column"
        )


def cut_chunks(items: Sequence[Item], size: int, done: Collection[tuple[str, str]]) -> list[Chunk]:
    """Divides images into chunks of ``size``, and then leaves out the images in ``done``.

    The chunk boundaries therefore do not depend on ``done``, the (source, file) pairs of finished
    images.
    """
    chunks = []
    for number, start in enumerate(range(0, len(items), size)):
        part = [item for item in items[start : start + size] if item.names not in done]
        if part:
            digest = hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]
            chunks.append(Chunk(f"part-{number:08d}-{digest}.parquet", part))
    return chunks


@contextlib.contextmanager
def open_items(items: Sequence[Item]) -> Iterator[list[str]]:
    """Yields a path for each image. Images inside tables are copied to temporary files."""
    paths = [item.path for item in items]
    tables: dict[tuple[str, str], dict[int, int]] = {}  # maps rows to indices in items
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
    """Yields (row, content) of the images in some rows. The content of an empty cell is empty."""
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
        raise UserError(f"'{path}' could be listed but not read: {error}") from error
