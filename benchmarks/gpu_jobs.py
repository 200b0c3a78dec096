# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measurements of `make gpu`: speed, memory, the data path, and exported files.

``python -m benchmarks.gpu_jobs JOB ... --rows FILE [--rehearse]`` runs some of ``JOBS``. With
``--rehearse``, it runs on the CPU with tiny images, to check that everything runs.

Models have random weights. Training is measured on one batch that is read again and again, in
bfloat16 by autocast. "of matmul" is the rate of the operations of the model (three times those of
the matrix products, convolutions and attentions of a forward pass) relative to the rate of a large
bfloat16 matrix product on the same card.
"""

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import data
from benchmarks.cached_cases import Case, make_config, shrunk
from benchmarks.detectors import DETECTORS, HEIGHT, WIDTH, random_images
from benchmarks.forms import DEPLOYED, EAGER, build
from benchmarks.gpu import run_in_bfloat16
from benchmarks.gpu_rows import MISSING, Row, Rows, Value
from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, prepare
from benchmarks.pretraining_figures import count, matrix_product, synchronised_clock
from benchmarks.timing import ROOT
from benchmarks.trainer_steps import Steps

IMAGE = ROOT / "docs" / "cells.jpg"
_BFLOAT16 = ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"]
_PRETRAINING = ("285m", "1.0g", "3.7g", "mae_vit_s")
_DISTILLATION = Case(
    "distillation of cached features, 285M",
    "ImageNet-distill/distill_285M_100ep.yaml",
    size=(128, 128),
    batch=256,
    file_size=(240, 320),
)
# Batch and size of the paper, on one card.
_PAPER: dict[str, Any] = {
    "size": (HEIGHT, WIDTH),
    "batch": 16,
    "file_size": (480, 800),
    "opts": {
        "INPUT.MIN_SIZE_TRAIN": (HEIGHT,),
        "INPUT.MAX_SIZE_TRAIN": WIDTH,
        "INPUT.DETR_CROP_RESIZE": [],
    },
}
_OURS = (
    Case("MF-285M + MF-Dec-211", "coco/mf_detr_211_285M_finetune.yaml", **_PAPER),
    Case("MF-3.7G + MF-Dec-522", "coco/mf_detr_522_3.7G_finetune.yaml", **_PAPER),
    Case("MF-285M + RetinaNet", "coco/retinanet_285M_finetune.yaml", **_PAPER),
)
_SIDE = 640  # of the images of real-time detectors
_OURS_640 = replace(
    _OURS[0],
    size=(_SIDE, _SIDE),
    file_size=(_SIDE, _SIDE),
    opts={**_PAPER["opts"], "INPUT.MIN_SIZE_TRAIN": (_SIDE,), "INPUT.MAX_SIZE_TRAIN": _SIDE},
)


@dataclass
class Bench:
    """Measures calls on a device, and adds rows.

    Attributes:
        rows: where results go.
        device: a CUDA device, or the CPU in a rehearsal.
        rehearsal: whether images are tiny, and each call is timed once.
        folder: a temporary folder, for drawn images.
    """

    rows: Rows
    device: torch.device
    rehearsal: bool
    folder: Path
    _made: int = field(default=0)

    @cached_property
    def matmul_rate(self) -> float:
        """Operations per second of a large matrix product."""
        product, operations = matrix_product(self.device)
        return operations / self.time(product)

    def time(self, call: Callable[[], object], *, seconds: float = 2.0) -> float:
        """Returns the median duration of calls in seconds, after a warm-up."""
        if self.rehearsal:
            seconds = 0.0
        clock = partial(synchronised_clock, self.device)
        for _ in range(1 if self.rehearsal else 3):
            call()
        taken: list[float] = []
        while not taken or sum(taken) < seconds:
            start = clock()
            call()
            taken.append(clock() - start)
        return statistics.median(taken)

    def free(self) -> None:
        """Frees the memory of the last model."""
        build.cache_clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def add_speed(
        self, name: str, make: Callable[[int], tuple[Callable[[], object], float]], batch: int
    ) -> None:
        """Adds the images per second and the memory of a call.

        Args:
            name: name of the row.
            make: takes a number of images; returns the call, and its number of operations.
            batch: number of images, which is halved until they fit.
        """
        with self.rows.attempt(name):
            while True:
                self.free()
                try:
                    call, operations = make(batch)
                    seconds = self.time(call)
                    break
                except torch.cuda.OutOfMemoryError:
                    if batch == 1:
                        raise
                    batch //= 2
            values: dict[str, Value] = {
                "images/s": batch / seconds,
                "ms": 1000 * seconds,
                "batch": str(batch),
            }
            if self.device.type == "cuda":
                values["GiB"] = torch.cuda.max_memory_allocated() / 2**30
            rate = operations / seconds
            values |= {"TFLOP/s": rate / 1e12, "of matmul": f"{rate / self.matmul_rate:.1%}"}
            self.rows.add(Row(name, values=values))

    def make_trainer_config(self, case: Case, batch: int, *, num_images: int) -> CfgNode:
        """Draws images, and returns the recipe of a case for them, in bfloat16."""
        self._made += 1
        case = replace(case, batch=batch)
        cfg = make_config(case, self.folder / str(self._made), num_images=num_images)
        cfg.MODEL.DEVICE = self.device.type
        cfg.MODEL.TEACHER.WEIGHTS = ""
        cfg.MODEL.CACHE_FEATURES.FOLDER = str(self.folder / f"cache_{self._made}")
        cfg.merge_from_list(_BFLOAT16)
        return cfg


def count_operations(model: nn.Module, images: Any) -> float:
    """Returns the floating-point operations of matrix products, convolutions and attentions."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)  # else the counter asks for graphs
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copied(images)
    return float(counter.get_total_flops())


def describe_machine(bench: Bench) -> None:
    """Adds the card, the versions, and the rate of a matrix product."""
    values: dict[str, Value] = {"PyTorch": torch.__version__, "cores": str(os.cpu_count())}
    name = "CPU"
    if bench.device.type == "cuda":
        card = torch.cuda.get_device_properties(bench.device)
        name = card.name
        values |= {
            "cards": str(torch.cuda.device_count()),
            "GiB": card.total_memory / 2**30,
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    values["matmul TFLOP/s"] = bench.matmul_rate / 1e12
    bench.rows.add(Row(name, values=values))


def measure_pretraining(bench: Bench) -> None:
    """Measures steps of QB-Heat, of an MAE with ViT-S/16, and of distillation."""
    setting = SETTINGS["256"]
    batch = setting.cuda_batch
    names: Sequence[str] = _PRETRAINING
    case = _DISTILLATION
    if bench.rehearsal:
        setting = setting.at(size=64)
        batch = 2
        names = ("285m", "mae_vit_s")
        case = shrunk(case)
    for name in names:

        def make(batch: int, name: str = name) -> tuple[Callable[[], object], float]:
            calls = prepare(CONTENDERS[name], setting, batch=batch, device=bench.device)
            return calls.step, 3 * 2.0 * count(name, setting)[1] * batch

        bench.add_speed(f"{CONTENDERS[name].title}, {setting.size} px", make, batch)
    bench.add_speed(
        f"{case.title}, {case.size[0]} px", partial(make_steps, bench, case), case.batch
    )


def make_steps(bench: Bench, case: Case, batch: int) -> tuple[Callable[[], object], float]:
    """Returns a step of the trainer of a recipe on one batch, and its number of operations."""
    cfg = bench.make_trainer_config(case, batch, num_images=batch)
    steps = Steps(cfg, time.perf_counter, repeat=True)
    operations = 3 * count_operations(steps.trainer.model, next(steps.batches))
    return steps, operations


def measure_detector_training(bench: Bench) -> None:
    """Measures training steps of our detectors and of their peers, at the same sizes."""
    cases = [*_OURS, _OURS_640]
    peers = [("detr_r50", HEIGHT, WIDTH), ("rt_detr_r18", _SIDE, _SIDE), ("d_fine_n", _SIDE, _SIDE)]
    if bench.rehearsal:
        cases = [shrunk(_OURS[0])]
        peers = [("rt_detr_r18", 160, 160)]
    for case in cases:
        name = f"{case.title}, {case.size[0]} x {case.size[1]}"
        bench.add_speed(name, partial(make_steps, bench, case), case.batch)
    for peer, height, width in peers:
        name = f"{DETECTORS[peer].title}, {height} x {width}"
        make = partial(make_peer_step, bench, peer, height, width)
        bench.add_speed(name, make, 1 if bench.rehearsal else 16)


def make_peer_step(
    bench: Bench, name: str, height: int, width: int, batch: int
) -> tuple[Callable[[], object], float]:
    """Returns a training step of a detector of transformers, and its number of operations."""
    model = DETECTORS[name].load()().to(bench.device)
    images = random_images(height, width, number=batch).to(bench.device) / 255
    operations = 3 * count_operations(model, images)  # their first argument is pixel_values
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    labels = []
    for _ in range(batch):
        boxes = torch.rand(7, 4, device=bench.device) / 4 + 0.25
        labels.append({"class_labels": torch.arange(7, device=bench.device), "boxes": boxes})

    def step() -> None:
        optimizer.zero_grad()
        # Most CPUs only emulate bfloat16.
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.rehearsal):
            loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        optimizer.step()

    return step, operations


def measure_inference(bench: Bench) -> None:
    """Measures predictions of our detectors and of their peers, without compiling."""
    large = HEIGHT, WIDTH
    square = _SIDE, _SIDE
    contenders = [
        ("285m_211", DEPLOYED, large),
        ("3.7g_522", DEPLOYED, large),
        ("detr_r50", EAGER, large),
        ("285m_211", DEPLOYED, square),
        ("rt_detr_r18", EAGER, square),
        ("d_fine_n", EAGER, square),
    ]
    batches = (1, 32)
    if bench.rehearsal:
        contenders = [("285m_211", DEPLOYED, (160, 160)), ("d_fine_n", EAGER, (320, 320))]
        batches = (1,)
    for name, form, size in contenders:
        for batch in batches:
            title = f"{DETECTORS[name].title}, {form}, {size[0]} x {size[1]}, {batch} at once"
            make = partial(make_prediction, bench, name, form, size)
            with torch.inference_mode():
                bench.add_speed(title, make, batch)


def make_prediction(
    bench: Bench, name: str, form: str, size: tuple[int, int], batch: int
) -> tuple[Callable[[], object], float]:
    """Returns a prediction in bfloat16, and the number of operations of a float32 one."""
    images = random_images(*size, number=batch).to(bench.device)
    plain = build(name, EAGER, device=bench.device.type)
    with FlopCounterMode(display=False) as counter:
        plain(images)
    operations = float(counter.get_total_flops())
    if form == EAGER:
        return partial(run_in_bfloat16, plain, images), operations
    forward = build(name, form, device=bench.device.type, dtype=torch.bfloat16)
    return partial(forward, images), operations


def measure_data_path(bench: Bench) -> None:
    """Measures reading JPEG files, training steps on them, and steps on one batch."""
    cases = dict(data.CASES)
    cases[""] = replace(cases[""], batch=SETTINGS["256"].cuda_batch)
    seconds = 5.0
    workers = os.cpu_count() or 1
    if bench.rehearsal:
        cases = {"": shrunk(cases[""])}
        seconds = 0.5
        workers = 1
    ahead = 2 * workers + 2  # PyTorch's workers load two batches each ahead
    for case in cases.values():
        with bench.rows.attempt(case.title):
            bench.free()
            cfg = bench.make_trainer_config(case, case.batch, num_images=max(64, case.batch))
            cfg.INPUT.FIXED_VIEWS.COUNT = 0  # views are drawn anew
            cfg.DATALOADER.NUM_WORKERS = workers
            files = iterate(cfg)
            loading = count_rate(bench, partial(next, files), case.batch, seconds, warm_up=ahead)
            files.close()
            whole = Steps(cfg, time.perf_counter)
            training = count_rate(bench, whole, case.batch, seconds, warm_up=ahead)
            whole.close()
            cfg = cfg.clone()
            cfg.OUTPUT_DIR += "_repeated"
            cfg.DATALOADER.NUM_WORKERS = 0
            steps = Steps(cfg, time.perf_counter, repeat=True)
            alone = count_rate(bench, steps, case.batch, seconds)
            values: dict[str, Value] = {
                "from JPEG files, images/s": loading,
                "workers": str(workers),
                "a worker, images/s": loading / workers,
                "steps on one batch, images/s": alone,
                "steps on files, images/s": training,
            }
            bench.rows.add(Row(f"{case.title}, {case.batch} a batch", values=values))


def iterate(cfg: CfgNode) -> Generator[Any]:
    """Yields the batches of a recipe's data stream."""
    from qbheat_det.engine import Trainer

    yield from Trainer.build_train_loader(cfg)


def count_rate(
    bench: Bench, call: Callable[[], object], batch: int, seconds: float, *, warm_up: int = 2
) -> float:
    """Returns the images per second of calls in a row, after ``warm_up`` calls."""
    clock = partial(synchronised_clock, bench.device)
    for _ in range(warm_up):
        call()
    start = clock()
    calls = 0
    while clock() - start < seconds:
        call()
        calls += 1
    return calls * batch / (clock() - start)


def measure_exported(bench: Bench) -> None:
    """Exports a detector, and compares onnxruntime on the device with PyTorch on the CPU."""
    import onnxruntime

    from qbheat_det.api import Detector, load_detector
    from qbheat_det.checkpoint import load_run_config
    from qbheat_det.inference.exported import ExportedModel
    from qbheat_det.inference.predict import build_detector

    providers = onnxruntime.get_available_providers()
    if not bench.rehearsal and "CUDAExecutionProvider" not in providers:
        reason = f"onnxruntime {onnxruntime.__version__} has {', '.join(providers)}"
        bench.rows.add(Row("onnxruntime-gpu", MISSING, error=reason))
        return
    name = "retinanet/285M_bccd"
    with bench.rows.attempt(f"{name} in onnxruntime"):
        width, height = PIL.Image.open(IMAGE).size
        opts: list[str] = []
        image_size: tuple[int, ...] = ()
        threshold = 0.3
        if bench.rehearsal:  # a file for one size takes half the time to export
            opts = ["INPUT.MIN_SIZE_TEST", "96"]
            image_size = height, width
            threshold = 0.0  # scores are low in small images
        cfg = load_run_config(f"qbheat://{name}", device="cpu", opts=opts)
        plain = Detector(build_detector(cfg), cfg)
        path = bench.folder / "detector.onnx"
        plain.export(path, images=[IMAGE], image_size=image_size)
        expected = plain.predict(IMAGE, threshold=threshold)
        found = load_detector(path, device=bench.device.type).predict(IMAGE, threshold=threshold)
        exported = ExportedModel.open(path, device=bench.device.type)
        images = random_images(height, width).byte().permute(0, 2, 3, 1).contiguous().numpy()
        values: dict[str, Value] = {
            "boxes, and those of PyTorch": f"{len(found)}, {len(expected)}",
            f"ms, {height} x {width}": 1000 * bench.time(lambda: exported(images)),
        }
        if len(found) == len(expected) > 0:
            instances = found.instances
            scores = instances.scores - expected.scores
            values["largest difference of scores"] = largest(scores)
            boxes = instances.pred_boxes.tensor - expected.boxes
            values["of boxes, pixels"] = largest(boxes)
        bench.rows.add(Row(f"{name} in onnxruntime", values=values))


def largest(x: Tensor) -> float:
    """Returns the largest absolute value of a tensor."""
    return float(x.abs().max())


JOBS: dict[str, Callable[[Bench], None]] = {
    "machine": describe_machine,
    "pretraining": measure_pretraining,
    "detector_training": measure_detector_training,
    "inference": measure_inference,
    "data_path": measure_data_path,
    "exported": measure_exported,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs jobs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="+", choices=JOBS, metavar="JOB")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    torch.backends.cudnn.benchmark = True  # as in the recipes
    device = torch.device("cpu" if args.rehearse else "cuda")
    rows = Rows(args.rows)
    for job in args.jobs:
        with tempfile.TemporaryDirectory() as folder, rows.attempt(job):
            JOBS[job](Bench(rows, device, args.rehearse, Path(folder)))


if __name__ == "__main__":
    main()
