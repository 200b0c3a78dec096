# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A dry run: a few steps, one small evaluation and one checkpoint, and a forecast of the rest.

It uses a temporary folder beside ``OUTPUT_DIR``, on the same disk, which it removes.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes, format_duration
from qbheat_det.engine.hooks import EvalHook, PeriodicCheckpointer, TrainingRun

from .console import filter_detectron2_logs
from .trainer import Trainer
from .writers import check_wandb

_SUFFIX = "_dry_run"
_NUM_TEST_IMAGES = 6
_GROUP = Path("/proc/self/cgroup")
_GROUPS_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DryRunReport:
    """Measured on a few steps and images; ``str`` gives the table.

    Memory is the peak of this process and its workers, GPU memory that of tensors (0 without a
    GPU).
    """

    costs: dict[str, tuple[float, int]]  # seconds each time, and the number of times
    num_parameters: int
    num_trainable: int
    num_checkpoints_kept: int  # most that lie on the disk at a time
    checkpoint_bytes: int  # of one
    weights_bytes: int  # of the best and the final weights together
    free_bytes: int  # on the disk of OUTPUT_DIR
    memory_bytes: int
    memory_total_bytes: int
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0
    cache_bytes: int = 0  # of a teacher's features that are yet to be cached
    cache_free_bytes: int = 0  # on the disk of the caches
    is_cached: bool = False  # whether the run trains from cached features, which is not forecast

    @property
    def total_seconds(self) -> float:
        """Of the whole run."""
        return sum(seconds * times for seconds, times in self.costs.values())

    @property
    def disk_bytes(self) -> int:
        """Of all files of weights that lie on the disk at a time."""
        return self.num_checkpoints_kept * self.checkpoint_bytes + self.weights_bytes

    def __str__(self) -> str:
        lines = [
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trained.",
            "",
            f"{'Forecast':<32}{'each':>18}{'times':>10}{'together':>16}",
        ]
        for name, (seconds, times) in self.costs.items():
            each, together = format_duration(seconds), format_duration(seconds * times)
            lines.append(f"{name:<32}{each:>18}{times:>10,}{together:>16}")
        lines += [f"{'Whole run':<60}{format_duration(self.total_seconds):>16}", ""]
        resources = {
            "GPU memory": (self.gpu_bytes, self.gpu_total_bytes),
            "Memory": (self.memory_bytes, self.memory_total_bytes),
            "Disk": (self.disk_bytes, self.free_bytes),
            "Cache": (self.cache_bytes, self.cache_free_bytes),
        }
        for name, (needed, available) in resources.items():
            if available:
                of = "" if name in ("Disk", "Cache") else " per process"
                line = f"{format_bytes(needed)}{of}, {format_bytes(available)} available"
                lines.append(f"{name + ':':<12}{line}")
        if self.disk_bytes >= self.free_bytes:
            lines.append("The disk is too small: lower SOLVER.CHECKPOINTS_KEPT or free some space.")
        if self.cache_bytes >= self.cache_free_bytes > 0:
            lines.append(
                "The disk of the cache is too small: lower INPUT.FIXED_VIEWS.COUNT, or set "
                "MODEL.CACHE_FEATURES.FOLDER to another disk."
            )
        if self.is_cached:
            lines.append(
                "MODEL.CACHE_FEATURES.ENABLED is left out of this forecast: the run encodes each "
                "view once, onto the disk, and its steps are shorter."
            )
        lines.append("Larger images take more memory and time.")
        return "\n".join(
            [*lines, "A lower SOLVER.EPOCHS at the end of the command makes it shorter."]
        )


def dry_run(
    cfg: CfgNode, build_trainer: Callable[[CfgNode], Trainer], *, num_steps: int = 3
) -> DryRunReport:
    """Makes a few steps, evaluates a few images and writes a checkpoint.

    To be called by all processes of a run, with the config of the whole run. The first of
    ``num_steps`` warms up and is not counted if there are others. Raises any ``UserError`` with
    which the whole run would end at its beginning.
    """
    filter_detectron2_logs()
    if cfg.SOLVER.WANDB_PROJECT:
        check_wandb()
    start = time.perf_counter()
    with _temporary_folder(cfg.OUTPUT_DIR) as folder, _few_test_images(cfg) as test_sets:
        names, num_tried, num_images = test_sets
        values = {
            "OUTPUT_DIR": str(folder),
            "SOLVER.WANDB_PROJECT": "",
            "DATASETS.TEST": names,
            "TEST.KNN.TRAIN": (),
            "TEST.KNN.VAL": (),  # the score takes as long as in the run
            "MODEL.CACHE_FEATURES.ENABLED": False,  # the forecast is of training without a cache
            "MODEL.CACHE_FEATURES.FOLDER": str(folder),  # of the few views that a teacher encodes
        }
        trainer = build_trainer(with_values(cfg, values))
        planned, iterations = trainer.cfg, trainer.max_iter
        trainer.resume_or_load(resume=False)
        begin = time.perf_counter()
        cache = trainer.teacher and trainer.teacher.rehearse(trainer.data_loader, cfg)
        start += time.perf_counter() - begin
        timer = _Timer(trainer)
        trainer.max_iter = min(iterations, num_steps)
        trainer.train()
        begin = time.perf_counter()
        trainer.save("dry_run")
        checkpoint_seconds = time.perf_counter() - begin
        disk = _measure_disk(folder)
    num_checkpoints, num_kept = _count_checkpoints(planned, iterations)
    step = f"Step of {planned.SOLVER.IMS_PER_BATCH} images"
    costs = {"Set-up": (timer.first_step_end - start, 1)}
    if cache:
        costs[f"Teacher on {cache.num_views:,} views"] = cache.seconds, 1
    costs[step] = timer.step_seconds, iterations
    if num_images:
        period = planned.TEST.EVAL_PERIOD
        times = max(1, math.ceil(iterations / period)) if period > 0 else 1
        seconds = timer.forecast_evaluation(num_images, num_tried)
        costs[f"Evaluation of {num_images:,} images"] = seconds, times
    costs["Checkpoint"] = checkpoint_seconds, num_checkpoints
    parameters = list(trainer.bare_model.parameters())
    return DryRunReport(
        costs=costs,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_checkpoints_kept=num_kept,
        **timer.get_memory(),
        **disk,
        cache_bytes=cache.num_bytes if cache else 0,
        cache_free_bytes=cache.free_bytes if cache else 0,
        is_cached=cfg.MODEL.CACHE_FEATURES.ENABLED,
    )


class _Timer(HookBase):
    """Measures a trainer's steps, evaluations and memory, after all other hooks of each step."""

    trainer: TrainingRun

    def __init__(self, trainer: Trainer) -> None:
        self._memory_bytes = 0
        self.first_step_end = 0.0
        self._evaluator = trainer.find_hook(EvalHook)
        self._checkpointer = trainer.find_hook(PeriodicCheckpointer)
        self._steps: list[float] = []  # seconds
        self._begin = 0.0
        self._evaluation = 0.0
        self._image_starts: list[float] = []  # of each batch, where there are batches
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.register_hooks([self])
        trainer.evaluated_model.register_forward_pre_hook(self._note_image)

    @property
    def step_seconds(self) -> float:
        """Mean, not median: a long run has images of all sizes, the slow ones too."""
        return statistics.fmean(self._steps[1:] or self._steps)

    def get_memory(self) -> dict[str, int]:
        """Returns fields of the report."""
        found = {"memory_bytes": self._memory_bytes, "memory_total_bytes": total_memory()}
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            found["gpu_bytes"] = int(torch.cuda.max_memory_allocated())
            found["gpu_total_bytes"] = int(properties.total_memory)
        return found

    def forecast_evaluation(self, num_images: int, num_tried: int) -> float:
        """Returns the seconds that ``num_images`` take, of all processes together."""
        starts = self._image_starts
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        if not gaps:  # one batch: its start-up time cannot be told apart
            return self._evaluation * num_images / max(1, num_tried)
        each = statistics.median_high(gaps)
        once = max(0.0, self._evaluation - each * len(starts))
        return once + each * num_images / comm.get_world_size()

    def before_train(self) -> None:
        self._begin = time.perf_counter()

    def before_step(self) -> None:
        self._image_starts = []  # of the evaluation that follows this step

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


def _measure_disk(folder: Path) -> dict[str, int]:
    """Returns fields of the report on files, which the main process alone writes."""
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    checkpoint = sizes.get(folder / "dry_run.pth", 0)
    # Those in subfolders are features.
    weights = max((sizes.get(file, 0) for file in folder.glob("*.safetensors")), default=0)
    checkpoint, weights = comm.all_gather((checkpoint, weights))[0]
    return {
        "checkpoint_bytes": checkpoint,
        "weights_bytes": 2 * weights,  # the last and the best
        # The folder will be removed.
        "free_bytes": shutil.disk_usage(folder).free + sum(sizes.values()),
    }


def _count_checkpoints(cfg: CfgNode, iterations: int) -> tuple[int, int]:
    """Returns how many checkpoints are written, and the most that lie on the disk at a time."""
    written = max(1, math.ceil(iterations / max(1, cfg.SOLVER.CHECKPOINT_PERIOD)))
    periodic, kept = written - 1, cfg.SOLVER.CHECKPOINTS_KEPT
    # The oldest is removed after the next is written; the last one is kept besides.
    return written, 1 + (min(kept + 1, periodic) if kept else periodic)


@contextlib.contextmanager
def _temporary_folder(output_dir: str) -> Iterator[Path]:
    """Yields one folder to all processes, on the disk that the run will write to."""
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
    os.makedirs(made, exist_ok=True)  # on machines that do not share the disk
    try:
        yield Path(made)
        comm.synchronize()
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _few_test_images(cfg: CfgNode) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Registers small test sets; yields their names, number of images, and that of the whole."""
    names: list[str] = []
    num_tried = num_images = 0
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
            # Without its json file, Detectron2's evaluator writes one for the images at hand.
            dropped = {"name", "json_file", "drawn_on_first_use"}
            MetadataCatalog.get(small).set(**{k: v for k, v in known.items() if k not in dropped})
        yield tuple(names), num_tried, num_images
    finally:
        for small in names:
            DatasetCatalog.remove(small)
            MetadataCatalog.remove(small)


def total_memory() -> int:
    """Returns the bytes of the machine, or of the container if it is limited to less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        # A container may see its own control group at the root, under the name it has outside.
        group = Path(_GROUP.read_text(encoding="utf-8").splitlines()[-1].split(":", 2)[2][1:])
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((_GROUPS_ROOT / folder / "memory.max").read_text()))
    return min(limits)


def resident_peak() -> int:
    """Returns the peak bytes of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_with_workers() -> int:
    """Returns the peak bytes of this process plus what its workers use now, where Linux says so."""
    total = resident_peak()
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # a worker may have ended
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="ascii")
            # "Pss" counts memory that workers share with this process by parts, in KiB.
            total += sum(1024 * int(x.split()[1]) for x in lines.splitlines() if x[:4] == "Pss:")
    return total
