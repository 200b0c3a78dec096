# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs and checkpoints, which are loaded on first use, and functions that iterate over runs."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import nn

from qbheat_det.checkpoint import load_run_config, local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data import (
    SPLIT_FILE,
    Mapper,
    Source,
    build_mapper,
    load_image_folders,
    read_split,
    register_source,
)
from qbheat_det.engine.run_record import RUN_FILE, name_last_checkpoint, read_run_record
from qbheat_det.inference.predict import build_predictor
from qbheat_det.tasks import Task, find_task

from .figures import Figure, Image, NotApplicable, Table

logger = logging.getLogger(__name__)
Split = Literal["test", "train"]
Found = TypeVar("Found")
Entries = list[dict[str, Any]]

_FINAL = ("model_final.safetensors", "model_final.pth")
_MAX_TRIED = 10  # consecutive unreadable images before a position is skipped
_RUN_FILES = ("config.yaml", "metrics.json", "last_checkpoint", *_FINAL)


@dataclass
class Run:
    """A run's folder or a checkpoint. See ``open``."""

    label: str
    path: Path
    folder: Path | None = None
    checkpoint: Path | None = None
    device: str | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, label: str | None = None, device: str | None = None
    ) -> "Run":
        """Locates the files of a run without reading them.

        Args:
            path: an ``OUTPUT_DIR`` (its checkpoint is ``model_final``, or else the last one), a
                checkpoint, or ``qbheat://NAME``.
            label: the name in legends. None uses the names of folder and file.
            device: "cpu" or "cuda". None uses a GPU if there is one.

        Raises:
            UserError: the path is not a run, or a download fails.
        """
        if "://" in str(path):
            address = str(path)
            path, label = local_weights(address), label or address.partition("://")[2]
        given = Path(path)
        if not given.exists():
            raise UserError(f"'{given}' does not exist: name an OUTPUT_DIR or a checkpoint")
        if given.is_dir():
            name, folder, checkpoint = given.resolve().name, given, _find_checkpoint(given)
        elif given.suffix in (".safetensors", ".pth"):
            name, folder, checkpoint = f"{given.resolve().parent.name}/{given.stem}", None, given
        else:
            raise UserError(f"'{given}' is neither a run's folder nor a checkpoint")
        return cls(label or name, given, folder, checkpoint, device)

    @property
    def weights(self) -> Path:
        """The checkpoint. Raises ``NotApplicable`` if there is none."""
        if self.checkpoint is None:
            raise NotApplicable(f"'{self.label}' has no checkpoint yet")
        return self.checkpoint

    @cached_property
    def cfg(self) -> CfgNode:
        """The config. ``MODEL.WEIGHTS`` and ``OUTPUT_DIR`` are set to the current paths."""
        weights, file = str(self.checkpoint or ""), (self.folder or Path()) / "config.yaml"
        config_file = str(file) if self.folder and file.is_file() else None
        if not (weights or config_file):
            raise UserError(f"'{self.folder}' has neither a config.yaml nor a checkpoint")
        cfg = load_run_config(weights, config_file, device=self.device)
        if self.folder is not None:
            cfg.OUTPUT_DIR = str(self.folder)
        return cfg

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.json``. Empty for a checkpoint, or if the file is missing."""
        path = self.folder / "metrics.json" if self.folder is not None else None
        return read_metrics(path) if path is not None and path.is_file() else []

    @cached_property
    def model(self) -> nn.Module:
        """The model with the weights, frozen and in evaluation mode, on ``MODEL.DEVICE``."""
        _ = self.weights
        model: nn.Module = build_predictor(self.cfg).model
        return model.eval().requires_grad_(False)

    @property
    def task(self) -> Task:
        """The task of the model. Raises the errors of ``cfg``."""
        return find_task(self.cfg)

    def require_task(self, task: Task) -> None:
        """Raises ``NotApplicable`` if the run is for another task."""
        if self.task is not task:
            raise NotApplicable(f"'{self.label}' is a {self.task.name} run, not a {task.name} run")

    def find_set(self, split: Split) -> str:
        """Registers the run's first dataset of a split (see ``run.json``), and returns its name.

        Raises ``NotApplicable`` if the run has no such dataset, or the dataset cannot be read.
        """
        names = self.cfg.DATASETS.TEST if split == "test" else self.cfg.DATASETS.TRAIN
        if not names:
            raise NotApplicable(f"'{self.label}' has no {split} set: use --images")
        name = str(names[0])
        folder = self.folder or self.weights.parent
        try:
            starts = read_run_record(folder / RUN_FILE)
            if content := starts[-1].get("data", {}).get(name) if starts else None:
                source = Source.from_json(content, f"'{folder / RUN_FILE}': data of '{name}'")
                name = f"{name} of {folder.resolve()}"  # see ``find_detections``
                keep = None
                if part := source.split_part:  # beside run.json, whose folder may have moved
                    keep = frozenset(read_split(folder / SPLIT_FILE)[part])
                if name not in DatasetCatalog:
                    register_source(name, source, keep=keep)
            if name not in DatasetCatalog:
                raise UserError(f"'{name}' is not registered")
            DatasetCatalog.get(name)  # raises if files are missing
        except (UserError, OSError) as error:
            text = f"the {split} set of '{self.label}' cannot be read ({error}): use --images"
            raise NotApplicable(text) from error
        return name

    def find_detections(self, name: str) -> Path | None:
        """Returns the file with the detections of the last evaluation on the dataset ``name``.

        Returns None if there is no file, or if weights other than the final ones may have made it.
        """
        if self.folder is None or self.checkpoint is None:
            return None
        name = name.removesuffix(f" of {self.folder.resolve()}")
        path = self.folder / "inference" / name / "coco_instances_results.json"
        is_last = self.checkpoint.name in _FINAL and path.is_file()
        # Runs evaluate before they save, so newer detections may belong to other weights.
        is_own = is_last and path.stat().st_mtime <= self.checkpoint.stat().st_mtime
        return path if is_own else None

    def load_images(self, number: int, images: Path | None = None) -> tuple[Entries, list[str]]:
        """Calls ``read_spread`` on the folder ``images`` or the run's dataset.

        Without ``images``, uses the run's test set, or else its training set. Raises
        ``NotApplicable`` if there is no dataset, and a ``UserError`` if no image can be read.
        """
        if images is not None:
            records, source = load_image_folders([images])[0], f"'{images}'"
        else:
            try:
                name = self.find_set("test")
            except NotApplicable:
                name = self.find_set("train")
            records, source = DatasetCatalog.get(name), f"the dataset '{name}'"
        found = read_spread(records, build_mapper(self.cfg, is_train=False), number)
        if not found[0]:
            raise UserError(f"{source} has no readable image")
        return found


def read_spread(
    records: Sequence[Mapping[str, Any]], mapper: Mapper, number: int
) -> tuple[Entries, list[str]]:
    """Returns up to ``number`` mapped records, spaced evenly over all records.

    Records that the mapper cannot read are replaced by the next one that it can read. Their file
    names are the second result.
    """
    number, end = min(number, len(records)), 0
    entries, unreadable = [], []
    for index in range(number):
        start = max(end, index * len(records) // number)
        for end in range(start + 1, min(start + _MAX_TRIED, len(records)) + 1):
            try:
                entry = mapper(dict(records[end - 1]))
            except UserError:
                entry = None
            if isinstance(entry, dict):
                entries.append(entry)
                break
            unreadable.append(str(records[end - 1]["file_name"]))
    return entries, unreadable


def open_runs(paths: Sequence[str], *, device: str | None = None) -> list[Run]:
    """Opens runs with unique labels, see ``Run.open``. ``LABEL=PATH`` sets a label."""
    runs, unnamed = [], []
    for path in paths:
        label, equals, behind = path.partition("=")
        if not equals or Path(path).exists():
            label, behind = "", path
        runs.append(Run.open(behind, label=label, device=device))
        unnamed += [] if label else runs[-1:]
    names = [run.label for run in unnamed]
    for run in unnamed:
        if names.count(run.label) > 1:
            run.label = str(run.path)
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        raise UserError(f"two runs have one label: use LABEL=PATH, not {', '.join(labels)}")
    return runs


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of ``metrics.json``, one per line. Skips records without an iteration."""
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError, TypeError, LookupError):  # broken
            record = json.loads(line)
            if math.isfinite(record["iteration"]):
                records.append(record)
    return records


def _find_checkpoint(folder: Path) -> Path | None:
    if not any((folder / name).exists() for name in _RUN_FILES):
        raise UserError(f"'{folder}' is not a run's folder: it has no config.yaml or checkpoint")
    names = filter(None, (*_FINAL, Path(name_last_checkpoint(folder)).name))
    return next((folder / name for name in names if (folder / name).is_file()), None)


@dataclass(frozen=True)
class FigureOptions:
    """The folder of the images in a figure (None: a run's dataset), and the number of images."""

    images: Path | None = None
    num_images: int = 6


@dataclass(frozen=True)
class RunResults(Generic[Found]):
    """Results of several runs, and what was left out."""

    found: dict[str, Found]  # by label of the run
    left_out: list[str]  # why other runs have no result
    files: Sequence[str] = ()  # the images of all runs
    unreadable: Sequence[str] = ()  # images that were replaced by others

    def draw(
        self,
        name: str,
        title: str,
        explanation: Sequence[str],
        images: Mapping[str, Image],
        table: Table | None = None,
        /,
        **data: Any,
    ) -> Figure:
        """Returns a figure. Its explanation also lists the runs and images that are left out."""
        text = list(explanation)
        if self.unreadable:
            names = join_first(Path(name).name for name in self.unreadable)
            text.append(f"Unreadable and replaced by the next image: {names}.")
        text += [f"Left out: {'; '.join(self.left_out)}."] if self.left_out else []
        data = {"images": self.files, **data, "left_out": self.left_out}
        return Figure(name, title, text, images, data, table)


def run_each(
    runs: Sequence[Run], compute: Callable[[Run], Found], *, nothing: str
) -> RunResults[Found]:
    """Calls a function for each run, and leaves out runs for which it fails.

    Raises:
        UserError: all runs failed, and at least one of them with a ``UserError``. The message
            begins with ``nothing``, such as "no reconstructions".
        NotApplicable: all runs failed with ``NotApplicable``.
    """
    found: dict[str, Found] = {}
    left_out, errors = [], []
    for run in runs:
        try:
            found[run.label] = compute(run)
        except (NotApplicable, UserError) as reason:
            text, label = str(reason), f"'{run.label}'"
            left_out.append(text if label in text else f"{label}: {text}")
            errors += [left_out[-1]] if isinstance(reason, UserError) else []
    if not found:
        message = f"{nothing}: {'; '.join(left_out)}"
        raise UserError(message) if errors else NotApplicable(message)
    for error_text in errors:
        logger.warning("left out: %s", error_text)
    return RunResults(found, left_out)


def run_on_images(
    runs: Sequence[Run],
    compute: Callable[[Run, list[str]], Found],
    options: FigureOptions,
    *,
    nothing: str,
) -> RunResults[Found]:
    """Like ``run_each``, but ``compute`` also gets the paths of images, the same for all runs."""
    entries, unreadable = choose_images(runs, options.num_images, options.images)
    files = [str(entry["file_name"]) for entry in entries]
    results = run_each(runs, lambda run: compute(run, files), nothing=nothing)
    return replace(results, files=files, unreadable=unreadable)


def choose_images(
    runs: Sequence[Run], number: int, folder: Path | None
) -> tuple[Entries, list[str]]:
    """Calls ``Run.load_images`` of one run after the other until one succeeds.

    Raises:
        NotApplicable: no run has data on this machine.
        UserError: no image of the folder can be read.
    """
    reasons: list[str] = []
    for run in runs:
        try:
            return run.load_images(number, folder)
        except (NotApplicable, UserError) as reason:
            reasons.append(str(reason))
    message = "; ".join(dict.fromkeys(reasons))
    raise UserError(message) if folder else NotApplicable(message)
