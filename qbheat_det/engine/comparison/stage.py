# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One step of a comparison: a command of its own process, and the result that it leaves."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from ..run_record import list_versions

# Where and how a run computes and what it tells, not what comes out.
_FREE = (
    "CUDNN_BENCHMARK",
    "DATALOADER.NUM_WORKERS",
    "DATASETS.*",
    "VIS.*",
    "MODEL.DEVICE",
    "MODEL.WEIGHTS",
    "OUTPUT_DIR",
    "SEED",
    "SOLVER.CHECKPOINT*",
    "SOLVER.LOG_PERIOD",
    "SOLVER.WANDB_PROJECT",
    "VIS_PERIOD",
)
Key = tuple[str, int, str]


@dataclass(frozen=True)
class Stage:
    """What is run for one objective and seed, and what it needs.

    Attributes:
        objective: name of the row.
        seed: of the row.
        name: of the stage, such as "pretraining".
        folder: of the row and seed; holds ``<name>.json`` (the result) and ``<name>.log``.
        command: gives the command line when it is about to start.
        read: gives the figures that it left, after it ended well.
        settings: what decides the figures; a result of other settings is not taken over.
        needs: names of stages of the same row and seed that come before.
        progress: file of lines of JSON with "iteration" and "eta_seconds", where it writes one.
        wanted: figures that a result must have to count; it may have more.
        steps: of training, all together; 0 where nothing is trained by steps.
    """

    objective: str
    seed: int
    name: str
    folder: Path
    command: Callable[[], list[str]]
    read: Callable[[], dict[str, Any]]
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    progress: Path | None = None
    wanted: tuple[str, ...] = ()
    steps: int = 0

    @property
    def key(self) -> Key:
        """Tells the stage from all others."""
        return self.objective, self.seed, self.name

    @property
    def title(self) -> str:
        """What a person reads."""
        return f"{self.objective} seed {self.seed} {self.name}"

    @property
    def result_file(self) -> Path:
        """Holds the result."""
        return self.folder / f"{self.name}.json"

    @property
    def log_file(self) -> Path:
        """Holds what the command wrote, of all its starts."""
        return self.folder / f"{self.name}.log"

    def load(self) -> dict[str, Any] | None:
        """Returns the result that stands in the folder, or None where it lacks what is wanted.

        Raises:
            UserError: it is of other settings, or no result at all.
        """
        if not self.result_file.is_file():
            return None
        try:
            content = json.loads(self.result_file.read_text(encoding="utf-8"))
            changes = list_changes(content["settings"], self.settings)
            missing = set(self.wanted) - set(content["figures"])
            float(content["seconds"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"'{self.result_file}' is no result of a comparison: move it away"
            ) from None
        if changes:
            raise UserError(
                f"'{self.result_file}' was made with other settings: {'; '.join(changes)}. Undo "
                f"that, name another --output-dir, or remove the file and '{self.name}' beside it "
                "to make it again"
            )
        return None if missing else dict(content)

    def save(
        self, *, command: list[str], seconds: float, threads: int, made_from: Mapping[str, str]
    ) -> dict[str, Any]:
        """Reads the figures and writes the result, whole or not at all; returns it."""
        content = {
            "objective": self.objective,
            "seed": self.seed,
            "stage": self.name,
            "figures": self.read(),
            "seconds": seconds,
            "threads": threads,
            "command": command,
            "made_from": dict(made_from),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": list_versions(),
            "settings": dict(self.settings),
        }
        text = json.dumps(content, indent=1).encode()
        write_atomically(self.result_file, lambda stream: stream.write(text))
        return content


def flat_config(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys of a config that decide what comes out, dotted, with plain values."""
    leaves = _leaves(yaml.safe_load(cfg.dump()))
    return {k: v for k, v in leaves.items() if not any(fnmatch(k, free) for free in _FREE)}


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns "key old -> new" for settings that both know and that differ.

    What only one knows came with another version of the package and has its default.
    """
    old, new = _leaves(before), _leaves(json.loads(json.dumps(now)))
    return [
        f"{key} {old[key]} -> {value}"
        for key, value in new.items()
        if key in old and old[key] != value
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
