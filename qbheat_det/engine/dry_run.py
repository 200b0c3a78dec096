# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Forecasts the time, memory and disk space of a run: tries a few steps with temporary files."""

import contextlib
import itertools
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
from qbheat_det.core.errors import Interrupted, UserError
from qbheat_det.core.text import format_bytes, format_duration
from qbheat_det.feature_cache.filling import Fill, find_known_views
from qbheat_det.feature_cache.store import VIEWS_PER_FILE, AllViews, Encode, FeatureStore, Stored

from .hooks import EvalHook, PeriodicCheckpointer, TrainingRun
from .logs import describe_model, filter_detectron2_logs
from .run import Stage
from .trainer import Trainer

_SUFFIX = "_dry_run"
_NUM_TEST_IMAGES = 6
_ADVICE = "A lower SOLVER.EPOCHS at the end of the command makes the run shorter."
_TOO_SMALL = {
    "Disk": "The disk is too small: lower SOLVER.CHECKPOINTS_KEPT or free some space.",
    "Cache": "The disk of the cache is too small: lower INPUT.FIXED_VIEWS.COUNT, or set "
    "MODEL.CACHE_FEATURES.FOLDER to another disk.",
}


@dataclass(frozen=True)
class DryRunReport:
    """The forecast of a run; ``str`` formats it as a table.

    Attributes:
        model: name, device and size of the model.
        costs: maps each part of the run to seconds per call and number of calls.
        memory: peak of this process and its workers in bytes, and the peak of tensors on the GPU.
        disks: maps "Disk" (all checkpoints and weights that exist at the same time) and "Cache"
            (features that are not cached yet) to the bytes that are needed and available.
    """

    model: str
    costs: dict[str, tuple[float, int]]
    memory: dict[str, int]
    disks: dict[str, tuple[int, int]]

    @property
    def total_seconds(self) -> float:
        """Duration of the whole run."""
        return sum(seconds * times for seconds, times in self.costs.values())

    def __str__(self) -> str:
        lines = [self.model, "", f"{'Forecast':<32}{'each':>18}{'times':>10}{'together':>16}"]
        for name, (seconds, times) in self.costs.items():
            each = format_duration(seconds)
            together = format_duration(seconds * times)
            lines.append(f"{name:<32}{each:>18}{times:>10,}{together:>16}")
        lines += [f"{'Whole run':<60}{format_duration(self.total_seconds):>16}", ""]
        for name, needed in self.memory.items():
            lines.append(f"{name + ':':<12}{format_bytes(needed)} per process")
        for name, (needed, available) in self.disks.items():
            sizes = f"{format_bytes(needed)}, {format_bytes(available)} available"
            lines.append(f"{name + ':':<12}{sizes}")
        full = [name for name, (needed, available) in self.disks.items() if needed >= available]
        lines += [_TOO_SMALL[name] for name in full]
        return "\n".join([*lines, "Larger images take more memory and time."])


class BuildTrainer(Protocol):
    """A function that builds a trainer, such as ``Trainer``."""

    def __call__(self, cfg: CfgNode, *, fill: Fill) -> Trainer:
        """Returns a trainer that completes feature caches by ``fill``."""


def print_forecasts(stages: Sequence[Stage], build_trainer: BuildTrainer) -> None:
    """Prints the forecast of each stage of a run on the main process."""
    texts = []
    for stage in stages:
        report = dry_run(stage.cfg, build_trainer)
        texts += [stage.title, str(report)]
    if comm.is_main_process():
        print("\n\n".join(text for text in [*texts, _ADVICE] if text))


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
            "MODEL.SEMI.BURN_IN": 0.0,
        }
        cache = _Rehearsal(folder, test_scale=num_images / max(1, num_tried))
        trainer = build_trainer(with_values(cfg, values), fill=cache.encode)
        planned = trainer.cfg
        iterations = trainer.max_iter
        trainer.resume_or_load(resume=False)
        timer = _Timer(trainer)
        trainer.max_iter = min(iterations, num_steps)
        trainer.train()
        begin = time.perf_counter()
        trainer.save("dry_run")
        checkpoint_seconds = time.perf_counter() - begin
        times, disk = _forecast_disk(planned, iterations, folder)
    unlabelled = trainer.data_loader.unlabelled
    also = ""
    if unlabelled:
        also = f", {unlabelled.batch_size} unlabelled"
    has_cache = trainer.cached_features or trainer.targets
    costs = {"Set-up": (timer.first_step_end - start - cache.spent, 1)}
    if has_cache:
        costs[f"Encoding of {cache.num_views:,} views"] = cache.seconds, 1
    step = f"Step of {planned.SOLVER.IMS_PER_BATCH} images{also}"
    costs[step] = timer.step_seconds, iterations
    if num_images:
        period = planned.TEST.EVAL_PERIOD or iterations
        seconds = timer.forecast_evaluation(num_images, num_tried)
        costs[f"Evaluation of {num_images:,} images"] = seconds, math.ceil(iterations / period)
    costs["Checkpoint"] = checkpoint_seconds, times
    disks = {"Disk": disk}
    if has_cache:
        disks["Cache"] = cache.disk
    model = describe_model(cfg, trainer.bare_model)
    return DryRunReport(model=model, costs=costs, memory=timer.get_memory(), disks=disks)


class _FewViews(FeatureStore):
    """A store of a few views, which are returned for all indices."""

    def read(self, view_index: int) -> Stored:
        return super().read(view_index % self.num_views)


class _Rehearsal:
    """Caches only a few views of each data set, and adds up the forecast cost of all views.

    Attributes:
        num_views: number of views of the run that are not cached yet.
        seconds: time to encode these views with all processes.
        disk: size of these views in bytes, and free bytes on the disk of the cache.
        spent: seconds that the rehearsal itself took.
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
        self.disk = 0, 0

    def encode(
        self, store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
    ) -> FeatureStore:
        """Returns a store with a few of the views. The arguments are those of ``fill``."""
        begin = time.perf_counter()
        number = min(VIEWS_PER_FILE, len(views))
        encode([views[0]])  # warm-up
        start = time.perf_counter()
        entries = [views[i * len(views) // number] for i in range(number)]
        loading = time.perf_counter() - start
        encoded = encode(entries)
        encoding = time.perf_counter() - start - loading
        few = _FewViews(self._folder / store.folder.name, number, dtype=store.dtype)
        few.write(0, encoded)
        known = find_known_views(store)
        scale = self._test_scale
        if (store.key or {})["is_train"]:
            scale = 1.0
        indices = [index for file in store.missing() for index in store.views_of(file)]
        missing = round(scale * sum(index not in known for index in indices))
        seconds = loading + encoding
        if num_workers:  # they load while the network encodes
            seconds = max(loading / num_workers, encoding)
        self.num_views += missing
        self.seconds += seconds * missing / number / comm.get_world_size()
        disk = next(folder for folder in store.folder.absolute().parents if folder.is_dir())
        num_bytes = round(few.path_of(0).stat().st_size * scale * len(indices) / number)
        self.disk = self.disk[0] + num_bytes, shutil.disk_usage(disk).free
        self.spent += time.perf_counter() - begin
        return few


class _Timer(HookBase):
    """Measures a trainer's steps, evaluations and memory; must be the last hook."""

    trainer: TrainingRun

    def __init__(self, trainer: Trainer) -> None:
        self._memory_bytes = 0
        self.first_step_end = 0.0
        self._evaluator = trainer.find_hook(EvalHook)
        self._checkpointer = trainer.find_hook(PeriodicCheckpointer)
        self._steps: list[float] = []  # seconds
        self._begin = 0.0
        self._evaluation = 0.0
        self._image_starts: list[float] = []  # start time of each batch
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.register_hooks([self])
        for model in {trainer.evaluated_model, trainer.bare_model}:
            model.register_forward_pre_hook(self._note_image)

    @property
    def step_seconds(self) -> float:
        """Mean duration of the second half of the steps.

        The first steps with images of a new size are slow. The median would ignore the few steps
        with large images.
        """
        return statistics.fmean(self._steps[len(self._steps) // 2 :])

    def get_memory(self) -> dict[str, int]:
        """Returns the peak bytes of main memory and, if present, of GPU memory."""
        found = {"Memory": self._memory_bytes}
        if torch.cuda.is_available():
            found["GPU memory"] = torch.cuda.max_memory_allocated()
        return found

    def forecast_evaluation(self, num_images: int, num_tried: int) -> float:
        """Forecasts the seconds for ``num_images`` images from those for ``num_tried`` images."""
        starts = self._image_starts
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        if not gaps:  # one batch: includes its start-up time
            return self._evaluation * num_images / max(1, num_tried)
        each = statistics.median_high(gaps)  # a teacher and a student are both timed
        once = max(0.0, self._evaluation - each * len(starts))
        return once + each * num_images * len(starts) / max(1, num_tried)

    def before_train(self) -> None:
        self._begin = time.perf_counter()

    def before_step(self) -> None:
        self._image_starts = []  # keeps only the evaluation after this step

    def after_step(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        evaluation = self._evaluator.seconds if self._evaluator else 0.0
        saving = self._checkpointer.seconds if self._checkpointer else 0.0
        self._steps.append(now - self._begin - evaluation - saving)
        self._evaluation = evaluation or self._evaluation
        self.first_step_end = self.first_step_end or now
        self._memory_bytes = max(self._memory_bytes, resident_with_workers())
        self._begin = time.perf_counter()

    def _note_image(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            self._image_starts.append(time.perf_counter())


def _forecast_disk(cfg: CfgNode, iterations: int, folder: Path) -> tuple[int, tuple[int, int]]:
    """Returns the number of checkpoints, and the bytes of disk space needed and available."""
    written = math.ceil(iterations / cfg.SOLVER.CHECKPOINT_PERIOD)
    # The oldest checkpoint is removed after the next one is written. model_final.pth is kept too.
    most = written
    if cfg.SOLVER.CHECKPOINTS_KEPT:
        most = cfg.SOLVER.CHECKPOINTS_KEPT + 1
    kept = 1 + min(most, written - 1)
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    checkpoint = sizes.get(folder / "dry_run.pth", 0)  # only the main process writes it
    # Files in subfolders are features.
    weights = max((sizes.get(file, 0) for file in folder.glob("*.safetensors")), default=0)
    needed = comm.all_gather(kept * checkpoint + 2 * weights)[0]  # weights: best and last
    # The folder will be removed, so its size counts as available.
    return written, (needed, shutil.disk_usage(folder).free + sum(sizes.values()))


@contextlib.contextmanager
def _temporary_folder(output_dir: str) -> Iterator[Path]:
    """Yields a temporary folder, the same for all processes, on the disk of ``output_dir``."""
    parent = Path(output_dir).resolve()
    while not parent.is_dir():
        parent = parent.parent
    made = ""
    if comm.is_main_process():
        with contextlib.suppress(OSError):
            made = tempfile.mkdtemp(prefix=".qbheat_dry_run_", dir=parent)
    made = comm.all_gather(made)[0]
    if not made:
        raise UserError(f"OUTPUT_DIR '{output_dir}' cannot be written to")
    os.makedirs(made, exist_ok=True)  # needed on machines without a shared disk
    try:
        yield Path(made)
        comm.synchronize()
    except Interrupted as stop:  # the message names the temporary folder
        name = signal.Signals(stop.number).name
        raise Interrupted(
            stop.number, f"{name} stopped the dry run, which writes no files"
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _few_test_images(cfg: CfgNode) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Registers small test sets; yields their names, and the sizes of the small and full sets."""
    names: list[str] = []
    num_tried = 0
    num_images = 0
    try:
        for name in cfg.DATASETS.TEST:
            records = DatasetCatalog.get(name)
            few = records[:: max(1, len(records) // _NUM_TEST_IMAGES)][:_NUM_TEST_IMAGES]
            small = name + _SUFFIX
            DatasetCatalog.register(small, lambda few=few: few)
            names.append(small)
            num_images += len(records)
            num_tried += len(few)
            known = MetadataCatalog.get(name).as_dict()
            # Without a json file, Detectron2's evaluator writes one for these images.
            dropped = {"name", "json_file"}
            MetadataCatalog.get(small).set(**{k: v for k, v in known.items() if k not in dropped})
        yield tuple(names), num_tried, num_images
    finally:
        for small in names:
            DatasetCatalog.remove(small)
            MetadataCatalog.remove(small)


def resident_with_workers() -> int:
    """Returns the peak memory of this process plus the current memory of its workers (Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024
    total = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # a worker may have ended
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="ascii")
            # "Pss", in KiB, divides shared pages between the processes that share them.
            total += sum(1024 * int(x.split()[1]) for x in lines.splitlines() if x[:4] == "Pss:")
    return total
