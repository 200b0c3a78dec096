# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exported detectors at batch 1 in onnxruntime and OpenVINO, against small detectors of others.

All weights are random, and all detect 80 classes. Our files take uint8 pixels and return boxes
after NMS, which has nothing to do, as no score reaches the threshold. The peers' take float32
pixels: YOLO26-n and D-FINE-N return their best boxes, YOLO11-n returns all boxes before NMS.
Ultralytics (AGPL) is not imported: its program ``yolo`` writes the files, in an environment of its
own, which is made in the cache on demand.

Each file runs in a process without PyTorch, and the processes take turns. With ``--clock cpu``, the
times are CPU seconds of all threads. Use it with ``--threads 1``, because threads that wait during
a run take CPU time too. Rows of memory have the process's peak. Rows of the first answer have
the wall time from the start of the program, with its imports.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import exported_file
from benchmarks.detectors import DETECTORS, random_images
from benchmarks.exported_file import ONNXRUNTIME, OPENVINO, OPENVINO_F32
from benchmarks.timing import Result, Sample, samples_in_rounds
from benchmarks.workers import LeftOut, Worker, said, started
from qbheat_det.core.files import get_cache_dir

_ROUNDS = 15
_SIDE = 640
_LITE0 = "custom/retinanet_lite0_finetune.yaml"
_YOLO26_N = "yolo26n"


@dataclass(frozen=True)
class Figures:
    """What a file takes in a runtime.

    Attributes:
        seconds: a forward pass.
        first: seconds from the start of the program to the first result.
        mib: the process's peak memory in MiB.
    """

    seconds: Sample
    first: float
    mib: float


def run(
    *,
    quick: bool,
    threads: int = 2,
    rounds: int = _ROUNDS,
    cases: list[str] | None = None,
    clock: str = "wall",
) -> list[Result]:
    """Writes the files, runs them in turns, and returns the rows of each against YOLO26-n.

    ``cases`` are names of files, by default all. ``quick`` uses small images and leaves out the
    files of Ultralytics, which need a network.
    """
    side = _SIDE
    if quick:
        side //= 4
        rounds = 2
    writers = list_files(side)
    if quick:
        writers = {name: write for name, write in writers.items() if "yolo" not in name}
    if cases:
        writers = {name: writers[name] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, Path] = {}
        for name, write in writers.items():
            with said(name):
                path = Path(folder) / f"{name}.onnx"
                write(path)
                paths[name] = path
        rows = []
        for runtime in list_runtimes():
            figures = measure(runtime, paths, threads=threads, rounds=rounds, clock=clock)
            rows += compare(figures, runtime)
    return rows


def list_files(side: int) -> dict[str, Callable[[Path], None]]:
    """Returns functions that write a file for images of ``side`` x ``side``, by its name.

    Names of ours begin with "ours". Our default recipe also has a file for its own size of test
    images, which is three quarters of ``side``, and for smaller ones.
    """
    own_side = side * 3 // 4
    small = "custom/retinanet_285M_finetune.yaml"
    return {
        "ours": partial(write_ours, _LITE0, side),
        "ours_480": partial(write_ours, _LITE0, own_side),
        "ours_384": partial(write_ours, _LITE0, side * 3 // 5),
        "ours_285m": partial(write_ours, small, side),
        _YOLO26_N: partial(write_yolo, "yolo26n.yaml", side),
        "yolo11n": partial(write_yolo, "yolo11n.yaml", side),
        "d_fine_n": partial(write_d_fine_n, side),
    }


def write_ours(recipe: str, side: int, path: Path) -> None:
    """Writes the detector of a recipe for images of one size."""
    from detectron2.modeling import build_model

    import qbheat_det  # noqa: F401  (registers the model)
    from qbheat_det.config import load_config
    from qbheat_det.export.files import write_model

    size = ("INPUT.MIN_SIZE_TEST", 0)  # images are not resized
    cfg = load_config(recipe, ["MODEL.DEVICE", "cpu", *size])
    torch.manual_seed(0)
    write_model(build_model(cfg).eval(), cfg, path, image_size=(side, side))


class _Detections(nn.Module):
    """A detector of transformers that returns a tuple of logits and boxes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Takes pixels (N, 3, H, W) in [0, 1]."""
        found = self.model(pixel_values=pixels)
        return found.logits, found.pred_boxes


def write_d_fine_n(side: int, path: Path) -> None:
    """Writes D-FINE-N of transformers, from pixels to logits and boxes."""
    torch.manual_seed(0)
    model = _Detections(DETECTORS["d_fine_n"].load()()).eval()
    pixels = random_images(side, side) / 255
    # The newer exporter cannot convert its deformable attention.
    torch.onnx.export(model, (pixels,), path, opset_version=18, dynamo=False)


def write_yolo(model: str, side: int, path: Path) -> None:
    """Writes a model of Ultralytics with its program, whose YAML gives random weights.

    Raises ``LeftOut`` if the program cannot be installed or fails.
    """
    program = install_ultralytics()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"YOLO_CONFIG_DIR": folder, "YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "false"}
        # nms=False writes YOLO26's own head without NMS, and YOLO11's without NMS behind it.
        options = ["format=onnx", f"imgsz={side}", "nms=False", "opset=18", "simplify=False"]
        _call([str(program), "export", f"model={model}", *options], folder, settings)
        written = Path(folder) / Path(model).with_suffix(".onnx")
        path.write_bytes(written.read_bytes())


def install_ultralytics() -> Path:
    """Returns the program ``yolo`` in its own environment, which sees our packages, not vice versa.

    Raises ``LeftOut`` if it cannot be installed.
    """
    environment = get_cache_dir() / "bench" / "ultralytics"
    program = environment / "bin" / "yolo"
    if not program.exists():
        print(f"  installing Ultralytics in {environment} …", flush=True)
        _call([sys.executable, "-m", "venv", str(environment)])
        python = str(environment / "bin" / "python")
        variables = {"base": str(environment), "platbase": str(environment)}
        packages = Path(sysconfig.get_path("purelib", "venv", variables))
        (packages / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        _call([python, "-m", "pip", "install", "--quiet", "ultralytics"])
    return program


def _call(
    command: list[str], folder: str | None = None, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a program. Raises ``LeftOut`` with the last line of its output if it fails."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        raise LeftOut(lines[-1] if lines else f"{command[0]} fails")


def list_runtimes() -> list[str]:
    """Returns the runtimes to measure; OpenVINO's default only if it computes in bfloat16."""
    import openvino

    runtimes = [ONNXRUNTIME, OPENVINO_F32]
    if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        runtimes.append(OPENVINO)
    return runtimes


def measure(
    runtime: str, paths: Mapping[str, Path], *, threads: int, rounds: int, clock: str
) -> dict[str, Figures]:
    """Runs the files in turns in a runtime; returns their figures by name, and prints them.

    ``clock`` is "wall" or "cpu".
    """
    print(f"  {runtime}, {clock} seconds: median (least to greatest)", flush=True)
    workers: dict[str, Worker] = {}
    firsts: dict[str, float] = {}
    with ExitStack() as stack:
        for name, path in paths.items():
            with said(f"{name}, {runtime}"):
                command = [exported_file.__file__, runtime, str(path), str(threads)]
                start = time.perf_counter()
                workers[name], _ = stack.enter_context(started(command))
                firsts[name] = time.perf_counter() - start
        key = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
        calls = {name: partial(_run, worker, key) for name, worker in workers.items()}
        samples = samples_in_rounds(calls, rounds=rounds, clock=None)
        figures = {
            name: Figures(samples[name], firsts[name], _run(worker, "mib"))
            for name, worker in workers.items()
        }
    for name, each in figures.items():
        print(f"    {name:<20} {each.seconds}; first {each.first:.1f} s, {each.mib:.0f} MiB")
    return figures


def _run(worker: Worker, key: str) -> float:
    """Runs a file once, and returns one figure of the answer."""
    return float(worker()[key])


def compare(figures: Mapping[str, Figures], runtime: str) -> list[Result]:
    """Returns the rows of each file against YOLO26-n in a runtime.

    Without YOLO26-n, the last file takes its place.
    """
    if not figures:
        return []
    peer = _YOLO26_N if _YOLO26_N in figures else list(figures)[-1]
    theirs = figures[peer]
    rows = []
    for name, mine in figures.items():
        if name == peer:
            continue
        row = f"{runtime}_{name}_vs_{peer}"
        rows += [
            Result.lower_is_better(
                f"deploy/time_{row}", mine.seconds.median, theirs.seconds.median, "s"
            ),
            Result.lower_is_better(f"deploy/first_answer_{row}", mine.first, theirs.first, "s"),
            Result.lower_is_better(f"deploy/memory_{row}", mine.mib, theirs.mib, "MiB"),
        ]
    return rows
