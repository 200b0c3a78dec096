# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Forecasts the time, memory and disk space of a run: tries a few steps with temporary files."""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.termination import Interrupted
from qbheat_det.core.text import format_bytes, format_duration
from qbheat_det.feature_cache.filling import Fill, find_known_views
from qbheat_det.feature_cache.store import VIEWS_PER_FILE, AllViews, Encode, FeatureStore, Stored

from .hooks import EvalHook, PeriodicCheckpointer, TrainingRun
from .logs import describe_model, filter_detectron2_logs
from .run import Stage
from .trainer import Trainer

_SUFFIX = "_dry_run"
_NUM_TEST_IMAGES = 6  # of each test set
_LARGER_IMAGES = "Larger images take more memory and time."
_TOO_SMALL = {
    "Disk": "The disk is too small: lower SOLVER.CHECKPOINTS_KEPT or free some space.",
    "Cache": "The disk of the cache is too small: lower INPUT.FIXED_VIEWS.COUNT, or set "
    "MODEL.CACHE_FEATURES.FOLDER to another disk.",
}


@dataclass(frozen=True)
class DryRunReport:
    """The forecast of a stage.

    Attributes:
        model: name, device and size of the model.
        costs: maps each part of the run, such as "Checkpoint", to seconds per call and number of
            calls.
        memory: maps "Memory" to the peak of this process and its workers in bytes, and "GPU memory"
            to the peak of tensors on the GPU.
        disks: maps "Disk" and "Cache" to the bytes that are needed and available. "Disk" is for
            checkpoints and weights, and "Cache" for features that are not cached yet.
    """

    model: str
    costs: dict[str, tuple[float, int]]
    memory: dict[str, int]
    disks: dict[str, tuple[int, int]]

    @property
    def total_seconds(self) -> float:
        """Duration of the stage."""
        return sum(seconds * times for seconds, times in self.costs.values())

    def sum_costs(self, *names: str) -> float:
        """Returns the seconds of the parts whose names begin with one of ``names``."""
        return sum(
            seconds * times
            for part, (seconds, times) in self.costs.items()
            if part.startswith(names)
        )

    def get_cost(self, name: str) -> float:
        """Returns the seconds per call of the part whose name begins with ``name``; 0 if none."""
        for part, (seconds, _) in self.costs.items():
            if part.startswith(name):
                return seconds
        return 0.0


class BuildTrainer(Protocol):
    """A function that builds a trainer, such as ``Trainer``."""

    def __call__(self, cfg: CfgNode, *, fill: Fill) -> Trainer:
        """Returns a trainer that completes feature caches by ``fill``."""


def print_forecast(stages: Sequence[Stage], build_trainer: BuildTrainer) -> None:
    """Prints the forecast of a run on the main process."""
    reports = [dry_run(stage.cfg, build_trainer) for stage in stages]
    if comm.is_main_process():
        print(format_forecast(reports, [stage.title for stage in stages]))


def format_forecast(reports: Sequence[DryRunReport], titles: Sequence[str]) -> str:
    """Formats the forecasts of the stages of a run as one table, under the sums.

    Args:
        reports: the forecast of each stage.
        titles: the title of each stage, which may be empty.
    """
    seconds = sum(report.total_seconds for report in reports)
    lines = [f"Whole run: {format_duration(seconds)}"]
    for name in reports[-1].memory:
        most = max(report.memory[name] for report in reports)
        lines[0] += f", {format_bytes(most)} of {name[0].lower() + name[1:]} per process"
    shortages = []
    for name in _TOO_SMALL:
        disks = [report.disks[name] for report in reports if name in report.disks]
        if not disks:
            continue
        needed = sum(disk[0] for disk in disks)  # the files of each stage are kept
        available = min(disk[1] for disk in disks)
        lines[0] += f", {format_bytes(needed)} of {name.lower()}"
        lines[0] += f" ({format_bytes(available)} available)"
        if needed >= available:
            shortages.append(_TOO_SMALL[name])
    lines += shortages
    for report, title in zip(reports, titles, strict=True):
        lines += ["", *title.splitlines(), report.model]
        for name, (each, times) in report.costs.items():
            together = format_duration(each * times)
            lines.append(f"  {name:<36}{format_duration(each):>14} x {times:<8,}{together:>14}")
        if len(reports) > 1:
            lines.append(f"  {'Together':<61}{format_duration(report.total_seconds):>14}")
    return "\n".join([*lines, "", f"{_advise(reports)} {_LARGER_IMAGES}"])


def _advise(reports: Sequence[DryRunReport]) -> str:
    """Returns how to make a run shorter."""
    if len(reports) == 1:
        return "Shorter: --minutes N, --epochs N, or --freeze."
    *earlier, last = (report.total_seconds for report in reports)
    if sum(earlier) < last:
        return (
            "Shorter: --minutes N, --epochs N (of the second stage), or --freeze (only the first)."
        )
    return (
        "Shorter: --minutes N, or --freeze (only the first stage). --epochs N would shorten the "
        "second stage alone."
    )


@contextlib.contextmanager
def _without_results() -> Iterator[None]:
    """Context without warnings about the results of a model that is hardly trained."""
    logger = logging.getLogger("detectron2.evaluation.coco_evaluation")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def dry_run(cfg: CfgNode, build_trainer: BuildTrainer, *, num_steps: int = 3) -> DryRunReport:
    """Forecasts a run: trains a few steps, evaluates a few images and writes a checkpoint.

    All processes of a run must call this function.

    Args:
        cfg: config of the whole run.
        build_trainer: builds a trainer, such as ``Trainer``.
        num_steps: number of steps; the first half is a warm-up.

    Raises:
        UserError: the whole run would fail at its start.
        Interrupted: a process received a signal.
    """
    filter_detectron2_logs()
    start = time.perf_counter()
    with _temporary_folder(cfg.OUTPUT_DIR) as folder, _few_test_images(cfg) as test_sets:
        names, num_tried, num_images = test_sets
        values = {
            "OUTPUT_DIR": str(folder),
            "DATASETS.TEST": names,
            "MODEL.SEMI.BURN_IN": 0.0,  # the few steps also use unlabelled images
        }
        cache = _Rehearsal(folder, test_scale=num_images / max(1, num_tried))
        trainer = build_trainer(with_values(cfg, values), fill=cache.encode)
        run_cfg = trainer.cfg  # with the whole schedule in iterations
        num_iterations = trainer.max_iter
        trainer.resume_or_load(resume=False)
        timer = _Timer(trainer)
        trainer.max_iter = min(num_iterations, num_steps)
        with _without_results():
            trainer.train()
        begin = time.perf_counter()
        trainer.save("dry_run")
        checkpoint_seconds = time.perf_counter() - begin
        num_checkpoints, disk = _forecast_disk(run_cfg, num_iterations, folder)
    has_cache = trainer.cached_features or trainer.targets
    costs = {"Set-up": (timer.first_step_end - start - cache.spent, 1)}
    if has_cache:
        costs[f"Encoding of {cache.num_views:,} views"] = (cache.seconds, 1)
    step_title = f"Step of {run_cfg.SOLVER.IMS_PER_BATCH} images"
    unlabelled = trainer.data_loader.unlabelled
    if unlabelled:
        step_title += f", {unlabelled.batch_size} unlabelled"
    costs[step_title] = (timer.step_seconds, num_iterations)
    if num_images:
        period = run_cfg.TEST.EVAL_PERIOD or num_iterations
        seconds = timer.forecast_evaluation(num_images, num_tried)
        num_evaluations = math.ceil(num_iterations / period)
        costs[f"Evaluation of {num_images:,} images"] = (seconds, num_evaluations)
    costs["Checkpoint"] = (checkpoint_seconds, num_checkpoints)
    disks = {"Disk": disk}
    if has_cache:
        disks["Cache"] = cache.disk
    model = describe_model(cfg, trainer.bare_model)
    return DryRunReport(model=model, costs=costs, memory=timer.get_memory(), disks=disks)


class _FewViews(FeatureStore):
    """A store of a few views, which stands for the whole store of a data set."""

    def read(self, view_index: int) -> Stored:
        """Returns one of the few views for each index of the whole store."""
        return super().read(view_index % self.num_views)


class _Rehearsal:
    """Caches only a few views of each data set, and forecasts the cost of caching all views.

    Attributes:
        num_views: number of views of the run that are not cached yet.
        seconds: forecast time to encode these views with all processes.
        disk: forecast size of these views in bytes, and free bytes on the disk of the cache.
        spent: seconds that the few views took, which are no part of the run.
    """

    def __init__(self, folder: Path, *, test_scale: float) -> None:
        """
        Args:
            folder: temporary folder for the few views.
            test_scale: number of test images of the whole run per test image of the dry run.
        """
        self._folder = folder / f"few_{comm.get_rank()}"
        self._test_scale = test_scale
        self.num_views = 0
        self.seconds = 0.0
        self.spent = 0.0
        self.disk = (0, 0)

    def encode(
        self, store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
    ) -> FeatureStore:
        """Returns a store with a few of the views. The arguments are those of ``fill``."""
        begin = time.perf_counter()
        num_tried = min(VIEWS_PER_FILE, len(views))
        encode([views[0]])  # warm-up
        start = time.perf_counter()
        entries = [views[i * len(views) // num_tried] for i in range(num_tried)]
        loaded = time.perf_counter()
        encoded = encode(entries)
        loading_seconds = loaded - start
        encoding_seconds = time.perf_counter() - loaded
        few = _FewViews(self._folder / store.folder.name, num_tried, dtype=store.dtype)
        few.write(0, encoded)

        # The test sets of the dry run are smaller than those of the run.
        assert store.key is not None
        scale = 1.0 if store.key["is_train"] else self._test_scale
        missing: list[int] = []  # indices of views in missing files
        for file in store.missing():
            missing += store.views_of(file)
        known = find_known_views(store)  # copied from other stores, which takes hardly any time
        num_new = round(scale * sum(index not in known for index in missing))
        seconds = loading_seconds + encoding_seconds
        if num_workers:  # they load while the network encodes
            seconds = max(loading_seconds / num_workers, encoding_seconds)
        self.num_views += num_new
        self.seconds += seconds * num_new / num_tried / comm.get_world_size()
        file_size = few.path_of(0).stat().st_size
        num_bytes = round(file_size * scale * len(missing) / num_tried)
        parents = store.folder.absolute().parents
        existing_parent = next(folder for folder in parents if folder.is_dir())
        self.disk = (self.disk[0] + num_bytes, shutil.disk_usage(existing_parent).free)
        self.spent += time.perf_counter() - begin
        return few


class _Timer(HookBase):
    """Measures a trainer's steps, evaluations and memory; must be the last hook."""

    trainer: TrainingRun

    def __init__(self, trainer: Trainer) -> None:
        self._memory_bytes = 0  # peak
        self.first_step_end = 0.0  # on the clock of ``time.perf_counter``
        self._eval_hook = trainer.find_hook(EvalHook)
        self._checkpointer = trainer.find_hook(PeriodicCheckpointer)
        self._step_durations: list[float] = []  # in seconds, without evaluations and checkpoints
        self._step_start = 0.0
        self._evaluation_seconds = 0.0  # of the last evaluation
        self._batch_starts: list[float] = []  # when each batch of the last evaluation began
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.register_hooks([self])
        for model in {trainer.evaluated_model, trainer.bare_model}:
            model.register_forward_pre_hook(self._note_batch)

    @property
    def step_seconds(self) -> float:
        """Mean duration of the second half of the steps.

        The first half is left out, because the first steps with images of a new size are slow. The
        median would ignore the few steps with large images.
        """
        num_warmup = len(self._step_durations) // 2
        return statistics.fmean(self._step_durations[num_warmup:])

    def get_memory(self) -> dict[str, int]:
        """Returns the peak bytes of main memory and, if present, of GPU memory."""
        memory = {"Memory": self._memory_bytes}
        if torch.cuda.is_available():
            memory["GPU memory"] = torch.cuda.max_memory_allocated()
        return memory

    def forecast_evaluation(self, num_images: int, num_tried: int) -> float:
        """Forecasts the seconds of an evaluation of ``num_images`` images.

        ``num_tried`` is the number of images in the last evaluation, whose time was measured.
        """
        scale = num_images / max(1, num_tried)
        num_batches = len(self._batch_starts)
        if num_batches < 2:  # the time of a batch cannot be distinguished from the start-up time
            return self._evaluation_seconds * scale
        durations = [end - start for start, end in itertools.pairwise(self._batch_starts)]
        # If a teacher and a student evaluate each batch, both are timed.
        batch_seconds = statistics.median_high(durations)
        startup_seconds = max(0.0, self._evaluation_seconds - batch_seconds * num_batches)
        return startup_seconds + batch_seconds * num_batches * scale

    def before_train(self) -> None:
        self._step_start = time.perf_counter()

    def before_step(self) -> None:
        self._batch_starts = []  # forgets the evaluation after the previous step

    def after_step(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        evaluation_seconds = self._eval_hook.seconds if self._eval_hook else 0.0
        saving_seconds = self._checkpointer.seconds if self._checkpointer else 0.0
        step_seconds = now - self._step_start - evaluation_seconds - saving_seconds
        self._step_durations.append(step_seconds)
        if evaluation_seconds:
            self._evaluation_seconds = evaluation_seconds
        if not self.first_step_end:
            self.first_step_end = now
        self._memory_bytes = max(self._memory_bytes, resident_with_workers())
        self._step_start = time.perf_counter()

    def _note_batch(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            self._batch_starts.append(time.perf_counter())


def _forecast_disk(cfg: CfgNode, iterations: int, folder: Path) -> tuple[int, tuple[int, int]]:
    """Forecasts the checkpoints of a run from the files of the dry run in ``folder``.

    Returns the number of checkpoints that are written, and the bytes of disk space needed and
    available.
    """
    num_checkpoints = math.ceil(iterations / cfg.SOLVER.CHECKPOINT_PERIOD)
    num_periodic = num_checkpoints - 1  # without model_final.pth, which is always kept
    if cfg.SOLVER.CHECKPOINTS_KEPT:
        # The oldest checkpoint is removed after the next one is written.
        num_periodic = min(num_periodic, cfg.SOLVER.CHECKPOINTS_KEPT + 1)
    num_on_disk = num_periodic + 1
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    checkpoint_size = sizes.get(folder / "dry_run.pth", 0)  # only the main process writes it
    weights_sizes = [sizes.get(file, 0) for file in folder.glob("*.safetensors")]
    weights_size = max(weights_sizes, default=0)
    needed_here = num_on_disk * checkpoint_size + 2 * weights_size  # the best and the last weights
    needed = comm.all_gather(needed_here)[0]  # of the main process
    # The folder will be removed, so its files count as available space.
    available = shutil.disk_usage(folder).free + sum(sizes.values())
    return num_checkpoints, (needed, available)


@contextlib.contextmanager
def _temporary_folder(output_dir: str) -> Iterator[Path]:
    """Yields a temporary folder, the same for all processes, on the disk of ``output_dir``."""
    parent = Path(output_dir).resolve()
    while not parent.is_dir():
        parent = parent.parent
    created = ""
    if comm.is_main_process():
        with contextlib.suppress(OSError):
            created = tempfile.mkdtemp(prefix=".qbheat_dry_run_", dir=parent)
    folder = comm.all_gather(created)[0]  # the path on the main process
    if not folder:
        raise UserError(f"OUTPUT_DIR '{output_dir}' cannot be written to")
    os.makedirs(folder, exist_ok=True)  # needed on machines without a shared disk
    try:
        yield Path(folder)
        comm.synchronize()
    except Interrupted as stop:  # its message would name the temporary folder
        name = signal.Signals(stop.number).name
        raise Interrupted(
            stop.number, f"{name} stopped the dry run, which writes no files"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _few_test_images(cfg: CfgNode) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Context in which a small test set is registered for each test set of a run.

    Yields the names of the small sets, their number of images, and that of the whole sets.
    """
    small_names: list[str] = []
    num_tried = 0
    num_images = 0
    try:
        for name in cfg.DATASETS.TEST:
            records = DatasetCatalog.get(name)
            step = max(1, len(records) // _NUM_TEST_IMAGES)
            few_records = records[::step][:_NUM_TEST_IMAGES]
            small_name = name + _SUFFIX
            DatasetCatalog.register(small_name, lambda few_records=few_records: few_records)
            small_names.append(small_name)
            num_images += len(records)
            num_tried += len(few_records)
            metadata = MetadataCatalog.get(name).as_dict()
            del metadata["name"]
            # Without "json_file", Detectron2's evaluator writes one for the few images.
            metadata.pop("json_file", None)
            MetadataCatalog.get(small_name).set(**metadata)
        yield tuple(small_names), num_tried, num_images
    finally:
        for small_name in small_names:
            DatasetCatalog.remove(small_name)
            MetadataCatalog.remove(small_name)


def resident_with_workers() -> int:
    """Returns the peak memory of this process plus the current memory of its workers (Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    total = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # a worker may have ended
            text = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="ascii")
            for line in text.splitlines():
                # "Pss", in KiB, divides shared pages between the processes that share them.
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total
