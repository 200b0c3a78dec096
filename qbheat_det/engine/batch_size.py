# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fits the recipes for GPUs to the machine: images per step by trial, workers by cores.

``SOLVER.LARGEST_BATCH`` switches this on. The real model makes a few steps on the largest batch
that the training images can give. The number of images doubles as long as the steps fit into the
memory of the GPU. Trials run in a process of their own, which returns all memory at its end, and
never waits for the other processes of a run.
"""

import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch.nn import functional

from qbheat_det.config import load_config, with_values
from qbheat_det.core.environment import count_cores
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.fast import optimize
from qbheat_det.modeling.contracts import TILE, BatchedInputs
from qbheat_det.tasks import find_task

from .old_detector import build_old_detector
from .step import StepTrainer, choose_precision
from .trainer import Trainer, choose_form

_NUM_STEPS = 3  # of a trial; the last one is timed
_NUM_IMAGES = 8  # different images in a trial
_USED_SHARE = 0.9  # of the free memory; the rest is for gradients in transfer, and for fragments
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # in errors of CUDA and of its libraries


@dataclass(frozen=True)
class Trial:
    """The steps with one number of images in one process.

    Attributes:
        batch_size: number of images.
        fits: whether the memory was enough.
        memory: peak of the tensors on the GPU in bytes; 0 on a CPU.
        rate: images per second.
    """

    batch_size: int
    fits: bool
    memory: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.batch_size} do not fit"
        return f"{self.batch_size} take {self.memory / 2**30:.1f} GiB ({self.rate:.0f} images/s)"


def fit_to_machine(
    cfg: CfgNode, overrides: Mapping[str, str], *, continues: bool
) -> tuple[dict[str, Any], str]:
    """Returns the config values that depend on the GPU and the cores, and a text about them.

    Without ``SOLVER.LARGEST_BATCH``, there are none. All processes of a run must call this
    function, and agree on the smallest number of images. Values that the user has set stay.

    Args:
        cfg: complete config of a stage, whose data sets are registered.
        overrides: the values that the user has set, by config key.
        continues: the stage continues the run in ``OUTPUT_DIR``, whose number of images it keeps.

    Raises:
        UserError: the model is no detector, or not even one image fits.
    """
    if not cfg.SOLVER.LARGEST_BATCH:
        return {}, ""
    if not find_task(cfg).uses_boxes:
        raise UserError("SOLVER.LARGEST_BATCH is for detectors: set it to 0")
    values: dict[str, Any] = {}
    text = ""
    if "DATALOADER.NUM_WORKERS" not in overrides:
        most = (count_cores() - 1) // comm.get_local_size()
        values["DATALOADER.NUM_WORKERS"] = max(1, min(cfg.DATALOADER.NUM_WORKERS, most))
    saved = Path(cfg.OUTPUT_DIR, "config.yaml")
    if "SOLVER.IMS_PER_BATCH" in overrides:
        return values, text
    if continues and saved.is_file():
        values["SOLVER.IMS_PER_BATCH"] = load_config(saved).SOLVER.IMS_PER_BATCH
    elif cfg.MODEL.DEVICE.startswith("cuda") and not cfg.DATASETS.UNLABELLED:
        batch_size, text = _find_batch_size(cfg)
        values["SOLVER.IMS_PER_BATCH"] = batch_size
    return values, text


def find_largest(fits: Callable[[int], bool], start: int, largest: int) -> int:
    """Returns the largest number of images that fits, among doublings of ``start``.

    If ``start`` does not fit, it is halved until it does. Returns 0 if a single image does not fit.

    Args:
        fits: tries a number of images.
        start: number of images that is tried first.
        largest: limit for larger numbers.
    """
    size = start
    while not fits(size):
        if size == 1:
            return 0
        size //= 2
    if size < start:
        return size
    while 2 * size <= largest and fits(2 * size):
        size *= 2
    return size


def limit_batch(cfg: CfgNode, num_images: int) -> int:
    """Returns the largest useful number of images per step: that of the recipe, or more.

    It is at most ``SOLVER.LARGEST_BATCH``, and leaves ``SOLVER.MIN_ITER`` steps to a run of
    ``SOLVER.EPOCHS``, because few steps learn little, however many images each of them has.
    """
    limit = cfg.SOLVER.LARGEST_BATCH
    if cfg.SOLVER.EPOCHS and cfg.SOLVER.MIN_ITER:
        limit = min(limit, int(cfg.SOLVER.EPOCHS * num_images / cfg.SOLVER.MIN_ITER))
    return max(cfg.SOLVER.IMS_PER_BATCH, limit)


def _find_batch_size(cfg: CfgNode) -> tuple[int, str]:
    """Returns the number of images per step of all processes together, and a text about it."""
    processes = comm.get_world_size()
    images, num_images = draw_largest_images(cfg)
    start = max(1, cfg.SOLVER.IMS_PER_BATCH // processes)
    largest = max(start, limit_batch(cfg, num_images) // processes)
    trials, error = run_trials(cfg, images, start, largest)
    found = max((trial.batch_size for trial in trials if trial.fits), default=0)
    errors = [text for text in comm.all_gather(error) if text]
    if errors:
        size = cfg.SOLVER.IMS_PER_BATCH
        return size, f"The batch stays at {size} images, as its trial failed: {errors[0]}"
    smallest = min(comm.all_gather(found))
    shapes = [tuple(image["image"].shape[1:]) for image in images]
    height, width = max(shapes, key=lambda shape: shape[0] * shape[1])
    if not smallest:
        raise UserError(
            f"the memory of the GPU is too small for one image of {width} x {height} pixels: lower "
            "--image-size, or choose a smaller --size"
        )
    size = smallest * processes
    each = " per process" if processes > 1 else ""
    text = (
        f"Batch by trial with images of up to {width} x {height} pixels{each}: "
        f"{'; '.join(map(str, trials))}. SOLVER.IMS_PER_BATCH is {size}"
    )
    if smallest == largest:
        text += f", the most for {num_images:,} images in this recipe"
    return size, f"{text}; --batch sets another"


def draw_largest_images(cfg: CfgNode) -> tuple[BatchedInputs, int]:
    """Returns inputs of the model that need the most memory, and the number of training images.

    They are the training images with the most objects at the largest training size. The first one
    is padded with zeros to the largest height and width that a batch can have.

    Raises:
        UserError: none of the images can be read.
    """
    node = cfg.INPUT
    records = find_task(cfg).load_training_set(cfg)
    side = max(node.MIN_SIZE_TRAIN)
    values = {
        "INPUT.MIN_SIZE_TRAIN": (side,),
        "INPUT.DETR_CROP_RESIZE": [],
        "INPUT.CROP.ENABLED": False,
    }
    mapper = build_mapper(with_values(cfg, values), is_train=True)
    images: BatchedInputs = []
    for record in sorted(records, key=lambda record: -len(record.get("annotations", ()))):
        image = mapper(record)
        if isinstance(image, dict):
            images.append(image)
        if len(images) == _NUM_IMAGES:
            break
    if not images:
        raise UserError("none of the training images can be read")
    height = width = node.MAX_SIZE_TRAIN  # a crop may have any shape
    crops = node.CROP.ENABLED
    if node.DATASET_MAPPER_NAME == "detr":
        crops = crops or bool(node.DETR_CROP_RESIZE)
    has_sizes = all("height" in record and "width" in record for record in records)
    if has_sizes and not crops:
        shapes = [_find_shape(record, side, node.MAX_SIZE_TRAIN) for record in records]
        loading = cfg.DATALOADER
        grouped = loading.ASPECT_RATIO_GROUPING and not loading.SIZE_GROUPING
        height, width = find_canvas(shapes, grouped=grouped)
    first = images[0]["image"]
    rows = max(0, height - first.shape[1])
    columns = max(0, width - first.shape[2])
    images[0] = {**images[0], "image": functional.pad(first, (0, columns, 0, rows))}
    return images, len(records)


def _find_shape(record: Mapping[str, Any], side: int, longest: int) -> tuple[int, int]:
    """Returns the height and width of a resized image or tile."""
    height, width = record["height"], record["width"]
    if TILE in record:
        _, _, width, height = record[TILE]
    return ResizeShortestEdge.get_output_shape(height, width, side, longest)


def find_canvas(shapes: Sequence[tuple[int, int]], *, grouped: bool) -> tuple[int, int]:
    """Returns the height and width to which the largest batch is padded.

    Args:
        shapes: height and width of each image.
        grouped: whether a batch has only wide or only tall images.
    """
    groups = [list(shapes)]
    if grouped:
        wide = [shape for shape in shapes if shape[1] > shape[0]]
        tall = [shape for shape in shapes if shape[1] <= shape[0]]
        groups = [group for group in (wide, tall) if group]
    canvases = []
    for group in groups:
        heights, widths = zip(*group, strict=True)
        canvases.append((max(heights), max(widths)))
    return max(canvases, key=lambda canvas: canvas[0] * canvas[1])


def run_trials(
    cfg: CfgNode, images: BatchedInputs, start: int, largest: int
) -> tuple[list[Trial], str]:
    """Calls ``try_batches`` in a new process.

    Returns the trials, and "" or the error that ended the process.
    """
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, "task.pickle"), Path(folder, "result.json")
        task.write_bytes(pickle.dumps((cfg, images, start, largest, index)))
        command = [sys.executable, "-m", __name__, str(task), str(result)]
        path = os.pathsep.join(filter(None, sys.path))
        ended = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode or not result.is_file():
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            return [], lines[-1]
        return [Trial(**trial) for trial in json.loads(result.read_text("utf-8"))], ""


def try_batches(cfg: CfgNode, images: BatchedInputs, start: int, largest: int) -> list[Trial]:
    """Makes steps with growing batches in this process, and returns all trials.

    Args:
        cfg: complete config.
        images: inputs of the model, of which a batch repeats as many as it needs.
        start: see ``find_largest``.
        largest: see ``find_largest``.
    """
    # With a learning rate of 0, random weights stay finite.
    cfg = with_values(cfg, {"MODEL.WEIGHTS": "", "SOLVER.BASE_LR": 0.0})
    model = Trainer.build_model(cfg)
    optimize(model, choose_form(cfg))
    model.train()
    optimizer = Trainer.build_optimizer(cfg, model)
    precision = choose_precision(cfg)
    old_detector = build_old_detector(cfg, model, precision=precision)
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        batch = list(itertools.islice(itertools.cycle(images), size))
        trainer = StepTrainer(
            model,
            itertools.repeat(batch),
            optimizer,
            batch_size=size,
            accumulate=min(size, cfg.SOLVER.ACCUMULATE),
            precision=precision,
            old_detector=old_detector,
        )
        trial = Trial(size, fits=False)
        try:
            trial = _measure(trainer, size)
        except RuntimeError as error:
            if not any(words in str(error) for words in _OUT_OF_MEMORY):
                raise
        trials.append(trial)
        del trainer
        optimizer.zero_grad()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return trial.fits

    find_largest(fits, start, largest)
    return trials


def _measure(trainer: StepTrainer, size: int) -> Trial:
    """Makes the steps of a trial."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with EventStorage():
        for step in range(_NUM_STEPS):
            trainer.iter = step
            start = time.perf_counter()
            trainer.run_step()
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() if on_gpu else 0
    return Trial(size, fits=True, memory=memory, rate=size / seconds)


def main(argv: Sequence[str]) -> None:
    """Runs the trials that ``run_trials`` has written to a file."""
    task, result = argv
    cfg, images, start, largest, index = pickle.loads(Path(task).read_bytes())
    if cfg.MODEL.DEVICE.startswith("cuda"):
        torch.cuda.set_device(index)
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(_USED_SHARE * free / total)
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    trials = try_batches(cfg, images, start, largest)
    Path(result).write_text(json.dumps([asdict(trial) for trial in trials]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
