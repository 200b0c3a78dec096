# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scores of probes as rows of a JSON file, from which an interrupted command continues."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically


@dataclass(frozen=True)
class ProbeRow:
    """One probe of one backbone. Shares are in per cent, errors as of binomial counts.

    Attributes:
        backbone: file of its weights, or "random, seed 1".
        digest: of the tensors as loaded, before any change of statistics.
        images_seen: in training; 0 for a random backbone, None if unknown.
        recalibrated: images that BatchNorm was recalibrated on; 0 where it was not.
        probe: "knn", "linear" or "tran-k"; "tran-k:width" where that is not the setting's.
        num_images: how many were classified.
        seconds: of the probe, without the features.
        chosen: settings that were chosen on a part of the training images, and their trials.
    """

    backbone: str
    digest: str
    images_seen: int | None
    recalibrated: int
    probe: str
    top1: float
    top1_standard_error: float
    top5: float
    top5_standard_error: float
    num_images: int
    seconds: float
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, bool, str]:
        """What makes two rows the same."""
        return self.backbone, self.digest, bool(self.recalibrated), self.probe


class ProbeResults:
    """Rows under one setting, written to a file after each.

    Attributes:
        setting: all that the scores depend on but for what stands in the rows.
        rows: in the order in which they came.
        skipped_images: files that could not be read, of both sets.
    """

    def __init__(self, setting: Mapping[str, Any], file: Path | None = None) -> None:
        """
        Args:
            setting: numbers, strings, lists and dicts.
            file: JSON, whose rows are kept.

        Raises:
            UserError: the file holds something else, or scores of another setting.
        """
        self.setting: dict[str, Any] = json.loads(json.dumps(setting))
        self.rows: list[ProbeRow] = []
        self.skipped_images = 0
        self._file = file
        if file is not None and file.exists():
            self._read(file)

    def find(self, key: tuple[str, str, bool, str]) -> ProbeRow | None:
        """Returns the row of a key, if it is there."""
        return next((row for row in self.rows if row.key == key), None)

    def add(self, row: ProbeRow) -> None:
        """Adds a row in place of one of another file of the same name, and writes all of them.

        Raises:
            UserError: the file cannot be written.
        """
        place = row.backbone, bool(row.recalibrated), row.probe
        self.rows = [
            old for old in self.rows if (old.backbone, bool(old.recalibrated), old.probe) != place
        ]
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        if self._file is not None:
            text = json.dumps(self.to_dict(), indent=1).encode()
            write_atomically(self._file, lambda stream: stream.write(text))

    def to_dict(self) -> dict[str, Any]:
        """Returns what the file holds: "setting", "skipped_images" and "rows"."""
        rows = [
            {k: None if v != v else v for k, v in asdict(row).items()}  # JSON has no nan
            for row in self.rows
        ]
        return {"setting": self.setting, "skipped_images": self.skipped_images, "rows": rows}

    def _read(self, file: Path) -> None:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            setting, rows = dict(content["setting"]), content["rows"]
            names = {item.name for item in fields(ProbeRow)}
            self.rows = [ProbeRow(**{k: v for k, v in row.items() if k in names}) for row in rows]
            self.skipped_images = int(content["skipped_images"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"'{file}' holds no scores of probes: name another file") from error
        if setting != self.setting:
            keys = sorted({*setting, *self.setting})
            changed = [key for key in keys if setting.get(key) != self.setting.get(key)]
            raise UserError(
                f"'{file}' holds scores of another setting ({', '.join(changed)}): name another "
                "file, or remove it"
            )
