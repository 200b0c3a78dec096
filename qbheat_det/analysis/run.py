# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained runs, whose files are read on first use, and functions that iterate over several runs."""

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

from qbheat_det.checkpoint import (
    BEST_WEIGHTS,
    LAST_WEIGHTS,
    find_run_weights,
    load_run_config,
    local_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import RUN_FILE
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
from qbheat_det.engine.run_record import BEST_RESULTS_FOLDER, read_run_record
from qbheat_det.inference.predict import build_predictor
from qbheat_det.tasks import Task, find_task

from .figures import Figure, Image, NotApplicable, Table

logger = logging.getLogger(__name__)
Split = Literal["test", "train"]
Result = TypeVar("Result")
Entries = list[dict[str, Any]]

# Folders with the results of a run's evaluations, by the weights that were evaluated.
_RESULTS_FOLDERS = {
    BEST_WEIGHTS: BEST_RESULTS_FOLDER,
    LAST_WEIGHTS: "inference",
    "model_final.pth": "inference",
}
_MAX_ATTEMPTS = 10  # number of records that are tried for one image
_RUN_FILES = ("config.yaml", "metrics.json", "last_checkpoint", *_RESULTS_FOLDERS)


@dataclass
class Run:
    """A trained run. ``open`` finds its files.

    Attributes:
        label: the name of the run in figures.
        path: the path that the user named: the run's folder or a checkpoint.
        folder: the run's folder; None if ``path`` is a checkpoint.
        checkpoint: the weights file; None if the run has not written one.
        device: "cpu" or "cuda". None uses a GPU if there is one.
    """

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
            path: the folder of a run (``OUTPUT_DIR``), a checkpoint, or ``qbheat://NAME``. The
                weights of a folder are those that ``find_run_weights`` finds.
            label: the name in figures. None uses the names of folder and file.
            device: "cpu" or "cuda". None uses a GPU if there is one.

        Raises:
            UserError: the path is not a run, or a download fails.
        """
        if "://" in str(path):
            address = str(path)
            path = local_weights(address)
            if not label:
                label = address.partition("://")[2]
        path = Path(path)
        if not path.exists():
            raise UserError(f"'{path}' does not exist: name an OUTPUT_DIR or a checkpoint")
        if path.is_dir():
            name = path.resolve().name
            return cls(label or name, path, path, _find_checkpoint(path), device)
        if path.suffix in (".safetensors", ".pth"):
            name = f"{path.resolve().parent.name}/{path.stem}"
            return cls(label or name, path, None, path, device)
        raise UserError(f"'{path}' is neither a run's folder nor a checkpoint")

    @property
    def weights(self) -> Path:
        """The checkpoint. Raises ``NotApplicable`` if there is none."""
        if self.checkpoint is None:
            raise NotApplicable(f"'{self.label}' has no checkpoint yet")
        return self.checkpoint

    @cached_property
    def cfg(self) -> CfgNode:
        """The config, in which ``MODEL.WEIGHTS`` and ``OUTPUT_DIR`` are the current paths."""
        weights = str(self.checkpoint or "")
        config_file = None
        if self.folder is not None and (self.folder / "config.yaml").is_file():
            config_file = str(self.folder / "config.yaml")
        if not weights and config_file is None:
            raise UserError(f"'{self.folder}' has neither a config.yaml nor a checkpoint")
        cfg = load_run_config(weights, config_file, device=self.device)
        if self.folder is not None:
            cfg.OUTPUT_DIR = str(self.folder)
        return cfg

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.json``; empty for a checkpoint, or if there is no file."""
        if self.folder is None:
            return []
        path = self.folder / "metrics.json"
        if not path.is_file():
            return []
        return read_metrics(path)

    @cached_property
    def model(self) -> nn.Module:
        """The model with the weights, frozen and in evaluation mode, on ``MODEL.DEVICE``."""
        _ = self.weights  # raises if there is no checkpoint
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
        """Registers the run's first test or training dataset, and returns its registered name.

        Raises ``NotApplicable`` if the run has no such dataset, or the dataset cannot be read.
        """
        names = self.cfg.DATASETS.TEST if split == "test" else self.cfg.DATASETS.TRAIN
        if not names:
            raise NotApplicable(f"'{self.label}' has no {split} set: use --images")
        try:
            name = self._register_set(str(names[0]))
            DatasetCatalog.get(name)  # raises if files are missing
        except (UserError, OSError) as error:
            raise NotApplicable(
                f"the {split} set of '{self.label}' cannot be read ({error}): use --images"
            ) from error
        return name

    def _register_set(self, name: str) -> str:
        """Registers a dataset with the files that ``run.json`` lists for it.

        Returns the registered name, which also has the run's folder, because datasets of several
        runs have the same name. If ``run.json`` does not list the dataset, it must be registered
        already.
        """
        folder = self.folder or self.weights.parent
        starts = read_run_record(folder / RUN_FILE)  # one record for each start of the run
        content = None
        if starts:
            content = starts[-1].get("data", {}).get(name)
        if content:
            source = Source.from_json(content, f"'{folder / RUN_FILE}': data of '{name}'")
            name = f"{name} of {folder.resolve()}"
            kept_images = None
            if source.split_part:
                # The split file is beside run.json, whose folder may have been moved.
                kept_images = frozenset(read_split(folder / SPLIT_FILE)[source.split_part])
            if name not in DatasetCatalog:
                register_source(name, source, keep=kept_images)
        if name not in DatasetCatalog:
            raise UserError(f"'{name}' is not registered")
        return name

    def find_detections(self, name: str) -> Path | None:
        """Returns the file with the detections of ``weights`` on the dataset ``name``.

        ``name`` is a result of ``find_set``. Returns None if there is no file, or if other weights
        may have made it.
        """
        if self.folder is None or self.checkpoint is None:
            return None
        name = name.removesuffix(f" of {self.folder.resolve()}")  # added by ``find_set``
        results_folder = _RESULTS_FOLDERS.get(self.checkpoint.name)
        if results_folder is None:
            return None
        path = self.folder / results_folder / name / "coco_instances_results.json"
        if not path.is_file():
            return None
        # Runs evaluate before they save, so newer detections may belong to other weights.
        if path.stat().st_mtime > self.checkpoint.stat().st_mtime:
            return None
        return path

    def load_images(self, number: int, images: Path | None = None) -> tuple[Entries, list[str]]:
        """Loads up to ``number`` images, spaced evenly, from a folder or the run's dataset.

        Without the folder ``images``, uses the run's test set, or else its training set.

        Returns:
            The results of the run's evaluation mapper, and the file names of unreadable images.

        Raises:
            NotApplicable: the run has no dataset.
            UserError: no image can be read.
        """
        if images is not None:
            records = load_image_folders([images])[0]
            source = f"'{images}'"
        else:
            try:
                name = self.find_set("test")
            except NotApplicable:
                name = self.find_set("train")
            records = DatasetCatalog.get(name)
            source = f"the dataset '{name}'"
        mapper = build_mapper(self.cfg, is_train=False)
        entries, unreadable = read_spread(records, mapper, number)
        if not entries:
            raise UserError(f"{source} has no readable image")
        return entries, unreadable


def read_spread(
    records: Sequence[Mapping[str, Any]], mapper: Mapper, number: int
) -> tuple[Entries, list[str]]:
    """Maps up to ``number`` records, spaced evenly over all records.

    If the mapper cannot read a record, the first readable one of the next nine replaces it.

    Returns:
        The mapped records, and the file names of the unreadable ones.
    """
    number = min(number, len(records))
    entries: Entries = []
    unreadable: list[str] = []
    next_index = 0  # all records before this index have been tried or passed
    for position in range(number):
        evenly_spaced = position * len(records) // number
        start = max(next_index, evenly_spaced)
        stop = min(start + _MAX_ATTEMPTS, len(records))
        for index in range(start, stop):
            next_index = index + 1
            try:
                entry = mapper(dict(records[index]))
            except UserError:
                entry = None
            if isinstance(entry, dict):
                entries.append(entry)
                break
            unreadable.append(str(records[index]["file_name"]))
    return entries, unreadable


def open_runs(paths: Sequence[str], *, device: str | None = None) -> list[Run]:
    """Opens runs, each named by PATH or LABEL=PATH.

    Without LABEL, the label is made of the names of folder and file, or is the whole path if two
    runs would have the same label. Raises a ``UserError`` if a path is not a run, or if two runs
    have the same label.
    """
    runs = []
    unlabelled = []  # the runs without LABEL
    for argument in paths:
        label, equals, path = argument.partition("=")
        is_path = not equals or Path(argument).exists()  # a path may contain "="
        if is_path:
            label = ""
            path = argument
        run = Run.open(path, label=label, device=device)
        runs.append(run)
        if not label:
            unlabelled.append(run)
    names = [run.label for run in unlabelled]
    for run in unlabelled:
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
        # A line may be broken, or its iteration may be missing or not a number.
        with contextlib.suppress(ValueError, RecursionError, TypeError, LookupError):
            record = json.loads(line)
            if math.isfinite(record["iteration"]):
                records.append(record)
    return records


def _find_checkpoint(folder: Path) -> Path | None:
    """Returns the weights of a run's folder, or None.

    Raises a ``UserError`` if the folder has no file of a run.
    """
    if not any((folder / name).exists() for name in _RUN_FILES):
        raise UserError(f"'{folder}' is not a run's folder: it has no config.yaml or checkpoint")
    return find_run_weights(folder)


@dataclass(frozen=True)
class FigureOptions:
    """Which images a figure shows: their folder (None for a run's dataset) and their number."""

    images: Path | None = None
    num_images: int = 6


@dataclass(frozen=True)
class RunResults(Generic[Result]):
    """Results of several runs, and the runs and images that were left out.

    Attributes:
        by_label: the result of each run by its label.
        left_out: for each run without a result, the reason.
        files: paths of the images, which are the same for all runs.
        unreadable: paths of unreadable images, which were replaced by others.
    """

    by_label: dict[str, Result]
    left_out: list[str]
    files: Sequence[str] = ()
    unreadable: Sequence[str] = ()

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
        """Returns a ``Figure`` whose explanation also lists the runs and images left out.

        ``data`` are the numbers that the figure shows.
        """
        paragraphs = list(explanation)
        if self.unreadable:
            names = join_first(Path(file).name for file in self.unreadable)
            paragraphs.append(f"Unreadable and replaced by the next image: {names}.")
        if self.left_out:
            paragraphs.append(f"Left out: {'; '.join(self.left_out)}.")
        data = {"images": self.files, **data, "left_out": self.left_out}
        return Figure(name, title, paragraphs, images, data, table)


def run_each(
    runs: Sequence[Run], compute: Callable[[Run], Result], *, nothing: str
) -> RunResults[Result]:
    """Calls a function for each run, and leaves out runs for which it fails.

    ``nothing`` is the beginning of the message if all runs fail, such as "no reconstructions".

    Raises:
        UserError: all runs failed, and at least one of them with a ``UserError``.
        NotApplicable: all runs failed with ``NotApplicable``.
    """
    by_label: dict[str, Result] = {}
    left_out = []
    errors = []  # the reasons in ``left_out`` that come from a ``UserError``
    for run in runs:
        try:
            by_label[run.label] = compute(run)
        except (NotApplicable, UserError) as error:
            reason = str(error)
            if f"'{run.label}'" not in reason:
                reason = f"'{run.label}': {reason}"
            left_out.append(reason)
            if isinstance(error, UserError):
                errors.append(reason)
    if not by_label:
        message = f"{nothing}: {'; '.join(left_out)}"
        if errors:
            raise UserError(message)
        raise NotApplicable(message)
    for reason in errors:
        logger.warning("left out: %s", reason)
    return RunResults(by_label, left_out)


def run_on_images(
    runs: Sequence[Run],
    compute: Callable[[Run, list[str]], Result],
    options: FigureOptions,
    *,
    nothing: str,
) -> RunResults[Result]:
    """Calls a function for each run with the same images, and leaves out runs for which it fails.

    ``compute`` gets the run and the paths of the images. Raises the errors of ``run_each`` and
    ``choose_images``.
    """
    entries, unreadable = choose_images(runs, options.num_images, options.images)
    files = [str(entry["file_name"]) for entry in entries]

    def compute_on_files(run: Run) -> Result:
        return compute(run, files)

    results = run_each(runs, compute_on_files, nothing=nothing)
    return replace(results, files=files, unreadable=unreadable)


def choose_images(
    runs: Sequence[Run], number: int, folder: Path | None
) -> tuple[Entries, list[str]]:
    """Loads images from a folder, or from the dataset of the first run that has one.

    Each run is tried in turn. The result is that of ``Run.load_images``.

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
    message = "; ".join(dict.fromkeys(reasons))  # each reason once
    if folder is not None:
        raise UserError(message)
    raise NotApplicable(message)
