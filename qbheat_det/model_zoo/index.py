# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The index of the model zoo: what each name stands for, measured and by whom to be checked.

The index is a file in the package, ``index.json``: a list of entries. Weights are not in it; they
are found by the file's name and its SHA-256 (see ``places``).
"""

import dataclasses
import datetime
import difflib
import fnmatch
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .strict_json import from_plain, parse_json, to_plain

INDEX_FILE = Path(__file__).with_name("index.json")
PREFIX = "qbheat://"  # of addresses
TASKS = ("pretraining", "detection", "classification")
# Letters that mean the same on every file system, in an address, and in a repository of the hub.
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*(/[A-Za-z0-9][A-Za-z0-9_.]*)+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBERS = re.compile(r"\[\n([-+.0-9eE,\s]+)\n\s*\]")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_CONFIG = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*\.yaml", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        metric: what was measured, such as "AP" or "kNN top-1".
        value: the number.
        unit: "%", "ms", …; empty for a plain number.
        data: the data and its split, such as "Aquarium test".
        spread: over what and how far it varies, such as "±0.4 over 3 seeds"; empty if not known.
        note: what a reader must know beside it.
    """

    metric: str
    value: float
    unit: str
    data: str
    spread: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class OutputPrint:
    """What one output of the model is on the synthetic images.

    Attributes:
        name: which output of which image.
        shape: of the whole output.
        mean: over all its values.
        std: over all its values.
        values: a strided sample of them.
        tolerance: the largest difference from these numbers that counts as the same.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    values: tuple[float, ...]
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The outputs on a fixed synthetic batch: weights, pre-processing and code in numbers.

    Attributes:
        version: of the synthetic images and of how they are sampled.
        outputs: by name, in the model's order.
    """

    version: int
    outputs: tuple[OutputPrint, ...]


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One file of weights and how it came to be.

    Attributes:
        name: task and variant, then the data, such as "retinanet/285M_aquarium".
        task: one of ``TASKS``.
        summary: one line.
        config: the recipe that it was trained by, a path below ``configs/``.
        file: name of the file, which is the name with "-" for "/".
        sha256: of the file, in lower-case hexadecimal digits.
        size: of the file, in bytes.
        num_params: parameters of the model.
        madds: multiply-adds of one image of ``madds_input``.
        madds_input: (H, W) in pixels.
        data: what it was trained on.
        data_licence: of that data.
        licence: of the weights.
        command: what trained it.
        commit: the revision of this package that trained it.
        date: on which the file was made, YYYY-MM-DD.
        figures: measured from the file.
        fingerprint: what ``verify`` compares with; None where there is none.
    """

    name: str
    task: str
    summary: str
    config: str
    file: str
    sha256: str
    size: int
    num_params: int
    madds: int
    madds_input: tuple[int, int]
    data: str
    data_licence: str
    licence: str
    command: str
    commit: str
    date: str
    figures: tuple[Figure, ...] = ()
    fingerprint: Fingerprint | None = None


def file_of(name: str) -> str:
    """Returns the file name that belongs to the name of an entry.

    Raises:
        UserError: that can be no name of an entry.
    """
    if not _NAME.fullmatch(name) or len(name) > 200:
        raise UserError(
            f"'{name}' can be no name in the model zoo: a task in small letters, '/', a variant "
            "of letters, digits, '_' and '.', such as retinanet/285M_aquarium"
        )
    return name.replace("/", "-") + ".safetensors"


def load_index(path: str | os.PathLike[str] | None = None) -> tuple[ZooEntry, ...]:
    """Reads an index, strictly.

    Args:
        path: the file; None takes the package's own.

    Raises:
        UserError: the file cannot be read, or something in it is not sound; names the field.
    """
    path = INDEX_FILE if path is None else Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"the index '{path}' cannot be read: {error}") from error
    content = parse_json(text, f"the index '{path}'")
    if not isinstance(content, list):
        raise UserError(f"the index '{path}' is no list of entries")
    entries = []
    for number, value in enumerate(content):
        name = value.get("name") if isinstance(value, dict) else None
        where = f"'{path}', entry {name if isinstance(name, str) else number}"
        entry = from_plain(ZooEntry, value, where)
        check_entry(entry, where)
        entries.append(entry)
    _check_apart(entries, path)
    return tuple(entries)


def save_index(entries: Iterable[ZooEntry], path: str | os.PathLike[str] | None = None) -> None:
    """Writes an index in the order of the names, whole or not at all.

    Args:
        entries: what it is to hold.
        path: the file; None takes the package's own.

    Raises:
        UserError: an entry is not sound, two have one name, or the file cannot be written.
    """
    path = INDEX_FILE if path is None else Path(path)
    content = render_index(entries, path)
    write_atomically(path, lambda stream: stream.write(content))


def render_index(entries: Iterable[ZooEntry], path: Path) -> bytes:
    """Returns what ``save_index`` writes; the path is for the sentence of an error.

    Raises:
        UserError: an entry is not sound, or two have one name.
    """
    entries = sorted(entries, key=lambda entry: entry.name)
    for entry in entries:
        check_entry(entry, f"entry {entry.name}")
    _check_apart(entries, path)
    plain = [to_plain(entry) for entry in entries]
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Hundreds of numbers of a fingerprint: a list of them is one line.
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text).encode()


def check_entry(entry: ZooEntry, where: str) -> None:
    """Checks what the kinds of the fields do not say.

    Raises:
        UserError: names the field.
    """
    try:
        file = file_of(entry.name)
        datetime.date.fromisoformat(entry.date)
    except (UserError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
    tests = {
        "task": (entry.task in TASKS, f"one of {', '.join(TASKS)}"),
        "summary": (_is_line(entry.summary), "one line"),
        "config": (_CONFIG.fullmatch(entry.config), "the path of a YAML below configs/"),
        "file": (entry.file == file, f"'{file}', as the name says"),
        "sha256": (_SHA256.fullmatch(entry.sha256), "64 small hexadecimal digits"),
        "size": (entry.size > 0, "a number of bytes"),
        "num_params": (entry.num_params > 0, "a number of parameters"),
        "madds": (entry.madds >= 0, "a number of multiply-adds"),
        "madds_input": (min(entry.madds_input) > 0, "height and width in pixels"),
        "data": (_is_line(entry.data), "one line"),
        "data_licence": (_is_line(entry.data_licence), "one line"),
        "licence": (_is_line(entry.licence), "one line"),
        "command": (all(map(_is_line, entry.command.split("\n"))), "lines of a shell"),
        "commit": (_COMMIT.fullmatch(entry.commit), "7 to 64 small hexadecimal digits"),
        "date": (_DATE.fullmatch(entry.date), "YYYY-MM-DD"),
    }
    for field, (is_sound, expected) in tests.items():
        if not is_sound:
            value = getattr(entry, field)
            raise UserError(f"{where}: '{field}' is {value!r}, where {expected} is expected")
    for number, figure in enumerate(entry.figures):
        _check_figure(figure, f"{where}: 'figures'[{number}]")
    if entry.fingerprint is not None:
        _check_fingerprint(entry.fingerprint, f"{where}: 'fingerprint'")


def _is_line(text: str) -> bool:
    """Whether a text says something, and nothing that moves a terminal's cursor."""
    return bool(text.strip()) and text.isprintable()


def _check_figure(figure: Figure, where: str) -> None:
    if not math.isfinite(figure.value):
        raise UserError(f"{where}: 'value' is {figure.value}, where a number is expected")
    for field in ("metric", "data", "unit", "spread", "note"):
        text = getattr(figure, field)
        is_sound = _is_line(text) if field in ("metric", "data") else text.isprintable()
        if not is_sound:
            raise UserError(f"{where}: '{field}' is {text!r}, where one line is expected")


def _check_fingerprint(found: Fingerprint, where: str) -> None:
    names = [output.name for output in found.outputs]
    if not names or len(set(names)) < len(names):
        raise UserError(f"{where} needs outputs, each of another name")
    for output in found.outputs:
        tests = {
            "name": _is_line(output.name),
            "shape": min(output.shape, default=1) > 0,
            "std": output.std >= 0,
            "values": bool(output.values),
            "tolerance": output.tolerance > 0,
        }
        for field, is_sound in tests.items():
            if not is_sound:
                value = getattr(output, field)
                raise UserError(f"{where}, output {output.name!r}: '{field}' cannot be {value!r}")


def zoo_folders() -> tuple[Path, ...]:
    """Returns the folders that ``$QBHEAT_ZOO`` names, in its order.

    Raises:
        UserError: one of them is no folder.
    """
    names = os.environ.get("QBHEAT_ZOO", "").split(os.pathsep)
    folders = tuple(Path(name).expanduser() for name in names if name.strip())
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"$QBHEAT_ZOO names '{folder}', which is no folder")
    return folders


def list_entries(pattern: str = "*") -> tuple[ZooEntry, ...]:
    """Returns the entries whose name matches a shell pattern, by name.

    They are those of the package, and those of each ``index.json`` in a folder of ``$QBHEAT_ZOO``.

    Raises:
        UserError: an index is not sound, or two mean different things by one name.
    """
    entries: dict[str, tuple[ZooEntry, Path]] = {}
    own = [folder / INDEX_FILE.name for folder in zoo_folders()]
    for path in (INDEX_FILE, *(path for path in own if path.is_file())):
        for entry in load_index(path):
            known, where = entries.setdefault(entry.file.lower(), (entry, path))
            if known != entry:
                raise UserError(
                    f"'{path}' and '{where}' both name '{entry.name}', and not the same: give one "
                    "of them another name"
                )
    found = sorted((entry for entry, _ in entries.values()), key=lambda entry: entry.name)
    return tuple(entry for entry in found if fnmatch.fnmatchcase(entry.name, pattern))


def find_entry(name: str) -> ZooEntry:
    """Returns the entry of a name.

    Args:
        name: of the entry; the address ``qbheat://NAME`` is taken, too.

    Raises:
        UserError: there is none; names the nearest.
    """
    name = name.removeprefix(PREFIX)
    entries = {entry.name: entry for entry in list_entries()}
    if name in entries:
        return entries[name]
    nearest = difflib.get_close_matches(name, entries, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see tools/zoo.py list"
    raise UserError(f"the model zoo has no '{name}': {hint}")


def _check_apart(entries: Iterable[ZooEntry], path: Path) -> None:
    """Names and files, which differ less than names do, must each stand once."""
    seen: dict[str, str] = {}
    for entry in entries:
        file = entry.file.lower()  # some file systems know no capitals
        if file in seen:
            raise UserError(f"the index '{path}': {seen[file]} and {entry.name} have one file name")
        seen[file] = entry.name
