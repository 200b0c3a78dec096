# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What one look at a model comes to: pictures, and the numbers behind them as strict JSON."""

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qbheat_det.core.files import write_atomically

from .html_report import Picture, Table

_SUFFIXES = {
    "image/svg+xml": ".svg",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Exhibit:
    """One thing to look at, of one model or of several side by side.

    Attributes:
        name: of its files; letters, digits, hyphens and underscores, as are the pictures' names.
        title: one line.
        explanation: paragraphs of plain text: what is shown, and how to read it.
        pictures: by name, in the order in which they are shown.
        figures: the numbers behind the pictures, as ``to_json`` takes them.
        table: the few numbers that are to be compared by eye, if any.

    Raises:
        ValueError: a name is none for a file, or a picture is of an unknown kind.
    """

    name: str
    title: str
    explanation: Sequence[str] = ()
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.pictures):
            if not _NAME.fullmatch(name):
                raise ValueError(f"'{name}' is no name for a file: letters, digits, - and _")
        for name, picture in self.pictures.items():
            if picture.media_type not in _SUFFIXES:
                raise ValueError(f"picture '{name}' is of unknown kind '{picture.media_type}'")


def write_exhibit(exhibit: Exhibit, folder: Path) -> list[Path]:
    """Writes ``<name>.json`` and, of each picture, ``<name>_<picture>.<svg, jpg or png>``.

    A picture's dark variant ends in ``_dark``. Each file is whole, or what it was before. Of an
    earlier exhibit of that name in the folder, what is not written again is removed.

    Returns:
        The paths, JSON first.

    Raises:
        UserError: a file cannot be written.
    """
    files: dict[str, bytes] = {}
    for name, picture in exhibit.pictures.items():
        suffix = _SUFFIXES[picture.media_type]
        files[f"{exhibit.name}_{name}{suffix}"] = picture.content
        if picture.dark is not None:
            files[f"{exhibit.name}_{name}_dark{suffix}"] = picture.dark
    content = {
        "name": exhibit.name,
        "title": exhibit.title,
        "explanation": list(exhibit.explanation),
        "figures": to_json(exhibit.figures),
        "files": list(files),
    }
    if exhibit.table is not None:
        content["table"] = {
            "header": list(exhibit.table.header),
            "rows": [list(row) for row in exhibit.table.rows],
        }
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    about = folder / f"{exhibit.name}.json"
    earlier = _list_pictures(exhibit.name, folder) or []
    write_atomically(about, methodcaller("write", f"{text}\n".encode()))
    _remove(folder, [file_name for file_name in earlier if file_name not in files])
    for file_name, data in files.items():
        write_atomically(folder / file_name, methodcaller("write", data))
    return [about, *(folder / file_name for file_name in files)]


def remove_exhibit(name: str, folder: Path) -> None:
    """Removes what ``write_exhibit`` wrote under a name, and nothing that its JSON does not name.

    Args:
        name: of the exhibit; of one that is not there, nothing is removed.
        folder: where it was written.
    """
    pictures = _list_pictures(name, folder)
    if pictures is not None:
        _remove(folder, [*pictures, f"{name}.json"])


def _list_pictures(name: str, folder: Path) -> list[str] | None:
    """Returns the files that an exhibit's JSON names; None if there is none that we wrote."""
    if not _NAME.fullmatch(name):
        return None
    try:
        content = json.loads((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    named = content.get("files") if isinstance(content, dict) else None
    if not isinstance(named, list) or content.get("name") != name:
        return None
    # Whoever wrote it, no other file than pictures of that name is touched.
    own = re.compile(rf"{re.escape(name)}_[\w-]+({'|'.join(map(re.escape, _SUFFIXES.values()))})")
    return [entry for entry in named if isinstance(entry, str) and own.fullmatch(entry)]


def _remove(folder: Path, file_names: Sequence[str]) -> None:
    for file_name in file_names:
        with contextlib.suppress(OSError):  # gone, or not ours to remove
            (folder / file_name).unlink()


def to_json(value: Any) -> Any:
    """Copies nested figures as what strict JSON knows.

    Tensors and arrays become lists, complex numbers pairs of real and imaginary part, and what is
    not finite, null: JSON has no word for it, and browsers refuse Python's.

    Raises:
        TypeError: something is neither a number, a string, an array nor a container of such.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, complex):
        return [to_json(value.real), to_json(value.imag)]
    if isinstance(value, Tensor):
        return to_json(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): to_json(element) for key, element in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_json(element) for element in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in figures: {value!r}")
