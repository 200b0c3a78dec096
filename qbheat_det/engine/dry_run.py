# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run in small, before the long one: everything is built, used once, and measured.

It works in a temporary folder beside ``OUTPUT_DIR``, which tells whether that disk can be
written to, and leaves nothing behind.
"""

import contextlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.data import TrainStream
from qbheat_det.engine.feature_build import CacheEstimate
from qbheat_det.engine.hooks.monitors import MOST_WAITING, describe_waiting

from .dry_run_report import DryRunReport
from .loader_speed import measure_loader
from .memory import resident_with_workers, total_memory
from .setup import filter_detectron2_logs
from .writers import check_wandb

_ENDING = "_dry_run"
_NUM_TEST_IMAGES = 6
_LOADER_SECONDS = 3.0


def dry_run(
    cfg: CfgNode, build_trainer: Callable[[CfgNode], Any], *, num_steps: int = 3
) -> DryRunReport:
    """Makes a few steps, one evaluation of a few images, a checkpoint, and reads that back.

    To be called by all processes of a run.

    Args:
        cfg: of the whole run.
        build_trainer: ``Trainer``, or what returns one from a config.
        num_steps: steps; the first warms up and is not counted.

    Raises:
        UserError: whatever the whole run would end with at its beginning.
        RuntimeError: a tensor does not come back from a checkpoint as it was.
    """
    filter_detectron2_logs()
    if cfg.SOLVER.WANDB_PROJECT:
        check_wandb()
    start = time.perf_counter()
    with _temporary_folder(cfg.OUTPUT_DIR) as folder, _few_test_images(cfg) as few_images:
        few, num_tried, num_images = few_images
        small = cfg.clone()
        small.defrost()
        small.OUTPUT_DIR = str(folder)
        small.DATASETS.TEST = few
        small.TEST.KNN.TRAIN = small.TEST.KNN.VAL = ()  # a score takes as long as ever
        small.SOLVER.WANDB_PROJECT = ""  # a dry run is nobody's experiment
        trainer = build_trainer(small)
        planned, iterations = trainer.cfg, trainer.max_iter
        cached = getattr(trainer, "cached_features", None)
        if cached:
            cached.rehearse(folder, cfg.DATASETS.TEST)
        trainer.resume_or_load(resume=False)
        measured = _Measured(trainer)
        trainer.max_iter = min(iterations, num_steps)
        trainer.train()
        setup_seconds = measured.first_step_end - start
        disk = _try_disk(trainer, folder)
        speeds = _try_loader(trainer, measured, num_workers=cfg.DATALOADER.NUM_WORKERS)
    parameters = list(trainer.model.parameters())
    return DryRunReport(
        iterations=iterations,
        images_per_step=planned.SOLVER.IMS_PER_BATCH,
        num_evaluations=_count_evaluations(planned, iterations) if num_images else 0,
        num_test_images=num_images,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        setup_seconds=setup_seconds,
        step_seconds=tuple(measured.step_seconds),
        evaluation_seconds=measured.predict_evaluation(num_images, num_tried),
        memory_bytes=measured.memory_bytes,
        memory_total_bytes=total_memory(),
        gpu_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        gpu_total_bytes=_gpu_total_bytes(),
        **_count_checkpoints(planned, iterations),
        **disk,
        **speeds,
        **(_describe_cache(cached.estimate) if cached else {}),
    )


def _describe_cache(estimate: CacheEstimate) -> dict[str, Any]:
    return {
        "num_views_to_encode": estimate.num_missing,
        "encoding_seconds": estimate.seconds / comm.get_world_size(),
        "cache_bytes": int(estimate.missing_bytes),
    }


def _try_loader(trainer: Any, measured: "_Measured", *, num_workers: int) -> dict[str, Any]:
    """Lets the loader run alone; returns what the report says of it, of all processes together."""
    stream = trainer.data_loader
    if not isinstance(stream, TrainStream):  # of a trainer with a loader of its own
        return {}
    loader = measure_loader(stream, seconds=_LOADER_SECONDS)
    compute = sum(measured.compute_seconds) / len(measured.compute_seconds)
    step = compute / (1 - loader.share_waited(compute))
    share = max(comm.all_gather(loader.share_waited(compute)))
    return {
        "loader_images_per_second": sum(comm.all_gather(loader.images_per_second)),
        "wanted_images_per_second": trainer.cfg.SOLVER.IMS_PER_BATCH / compute,
        "waiting": describe_waiting(share, step, num_workers) if share > MOST_WAITING else "",
    }


def _try_disk(trainer: Any, folder: Path) -> dict[str, Any]:
    """Saves and reads back; returns what the report says of it, the same on all processes."""
    seconds, path = _save(trainer, folder)
    compared = _compare_with_file(trainer, path) if comm.is_main_process() else 0
    size = path.stat().st_size if comm.is_main_process() else 0
    weights = max((f.stat().st_size for f in folder.glob("*.safetensors")), default=0)
    # What the main process wrote is everyone's.
    compared, size, weights = comm.all_gather((compared, size, weights))[0]
    return {
        "num_tensors_compared": compared,
        "checkpoint_seconds": seconds,
        "checkpoint_bytes": size,
        "weights_bytes": 2 * weights,  # the last and the best
        "free_bytes": shutil.disk_usage(folder).free + _size(folder),  # the folder goes again
    }


def _count_checkpoints(cfg: CfgNode, iterations: int) -> dict[str, Any]:
    written = max(1, math.ceil(iterations / max(1, cfg.SOLVER.CHECKPOINT_PERIOD)))
    periodic, kept = written - 1, cfg.SOLVER.CHECKPOINTS_KEPT
    # The oldest goes when the next is written; the last one is there besides.
    on_disk = 1 + (min(kept + 1, periodic) if kept else periodic)
    return {"num_checkpoints": written, "num_checkpoints_kept": on_disk}


class _Measured(HookBase):
    """Watches a trainer's steps, evaluations and memory from the inside."""

    def __init__(self, trainer: Any) -> None:
        self.memory_bytes = 0
        self._step_ends: list[float] = []
        self._aside = 0.0  # seconds of evaluation and saving since the last step ended
        self._steps: list[float] = []
        self._waits: list[float] = []  # of them, for images
        self._begin = 0.0
        self._evaluation = 0.0
        self._image_starts: list[float] = []  # of each batch, where they come in batches
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # First of all hooks, so that what the others do belongs to the step that follows.
        trainer.register_hooks([self])
        trainer._hooks.insert(0, trainer._hooks.pop())
        for name in ("evaluate", "test", "save"):
            if callable(getattr(trainer, name, None)):
                setattr(trainer, name, self._timed(getattr(trainer, name), name != "save"))
        for model in {trainer.model, getattr(trainer, "evaluated_model", trainer.model)}:
            model.register_forward_pre_hook(self._note_image)

    @property
    def first_step_end(self) -> float:
        """Clock at the end of the first step."""
        return self._step_ends[0]

    @property
    def step_seconds(self) -> list[float]:
        """Of all steps but the first, where there are others."""
        return self._steps[1:] or self._steps

    @property
    def compute_seconds(self) -> list[float]:
        """As ``step_seconds``, without waiting for images."""
        both = list(zip(self._steps, self._waits, strict=True))
        return [step - wait for step, wait in both[1:] or both]

    def predict_evaluation(self, num_images: int, num_tried: int) -> float:
        """Returns the seconds that ``num_images`` take, of all processes together.

        Where those tried came as one batch, the time to begin counts for each of them too.
        """
        starts = self._image_starts
        gaps = sorted(after - before for before, after in itertools.pairwise(starts))
        if not gaps:
            return self._evaluation * num_images / max(1, num_tried)
        each = gaps[len(gaps) // 2]
        once = max(0.0, self._evaluation - each * len(starts))
        return once + each * num_images / comm.get_world_size()

    def before_train(self) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def after_step(self) -> None:
        """Stops it once a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._steps.append(now - self._begin - self._aside)
        self._waits.append(self.trainer.storage.latest()["data_time"][0])
        self._step_ends.append(now)
        self._aside = 0.0
        self._begin = time.perf_counter()
        self.memory_bytes = max(self.memory_bytes, resident_with_workers())

    def _timed(self, call: Callable[..., Any], is_evaluation: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._image_starts = [] if is_evaluation else self._image_starts
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                self._aside += seconds
                self._evaluation = seconds if is_evaluation else self._evaluation
                self.memory_bytes = max(self.memory_bytes, resident_with_workers())

        return timed

    def _note_image(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            self._image_starts.append(time.perf_counter())


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
    """Yields the names of small test sets that exist meanwhile, their size, and the whole ones'."""
    names, tried, total = [], 0, 0
    try:
        for name in cfg.DATASETS.TEST:
            records = DatasetCatalog.get(name)
            total += len(records)
            few = records[:: max(1, len(records) // _NUM_TEST_IMAGES)][:_NUM_TEST_IMAGES]
            tried += len(few)
            small = name + _ENDING
            DatasetCatalog.register(small, lambda few=few: few)
            names.append(small)
            known = MetadataCatalog.get(name).as_dict()
            # Without its json file, Detectron2's evaluator writes one of the images at hand.
            dropped = {"name", "json_file", "drawn_on_first_use"}
            MetadataCatalog.get(small).set(**{k: v for k, v in known.items() if k not in dropped})
        yield tuple(names), tried, total
    finally:
        for name in names:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


def _save(trainer: Any, folder: Path) -> tuple[float, Path]:
    """Saves a checkpoint; returns the seconds it took and its path."""
    begin = time.perf_counter()
    save = getattr(trainer, "save", None) or trainer.checkpointer.save
    save("dry_run")
    return time.perf_counter() - begin, folder / "dry_run.pth"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _compare_with_file(trainer: Any, path: Path) -> int:
    """Reads a checkpoint into a fresh model; returns how many tensors came back bit for bit."""
    fresh = trainer.build_model(trainer.cfg)
    ExactCheckpointer(fresh, class_names=trainer.cfg.MODEL.CLASS_NAMES).load(str(path))
    model = getattr(trainer, "bare_model", trainer.model)
    before, after = model.state_dict(), fresh.state_dict()
    for name, tensor in before.items():
        if not _same_bits(tensor, after[name]):
            raise RuntimeError(f"'{name}' does not come back from a checkpoint as it was")
    return len(before)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    as_bytes = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*as_bytes)  # nan equals nan


def _count_evaluations(cfg: CfgNode, iterations: int) -> int:
    period = cfg.TEST.EVAL_PERIOD
    return max(1, math.ceil(iterations / period)) if period > 0 else 1


def _gpu_total_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
