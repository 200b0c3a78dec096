# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the benchmarks, prints a table and writes ``output/bench/NAME.json`` for each.

Each benchmark is a module with a function ``run(quick, threads, …)``, which returns rows. ``quick``
uses small images and few rounds, to check that everything runs. Further parameters of ``run`` are
options of the benchmark.

python -m benchmarks.run [--only NAME …] [--quick] [--list]
python -m benchmarks.run --only cached_training --cases 3.7g_211 --rounds 7 --clock cpu
"""

import argparse
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import (
    ENVIRONMENTS,
    OUTPUT,
    environment,
    format_results,
    set_threads,
    write_environment,
    write_results,
)
from qbheat_det.core.errors import UserError, exit_on_user_error

BENCHMARKS = {
    "latency": "latency of our detectors, plain and deployed, against DETR, RT-DETR and RetinaNet",
    "export": "latency of exported files in onnxruntime and OpenVINO, against PyTorch",
    "deploy": "exported detectors in onnxruntime and OpenVINO, against YOLO26-n and D-FINE-N",
    "memory": "peak memory of training on images of many sizes",
    "cached_training": "training steps of a head on cached features, against running its encoder",
    "training": "seconds per training step of five recipes, against float32",
    "data": "images per second from JPEG files to a batch, against torchvision and simplejpeg",
    "start": "CPU seconds from the start of Python to the first boxes, against Detectron2",
    "gpu": "on a CUDA GPU: detectors at batch 1 and 32, pre-training, and images in memory",
    "pretraining": "pre-training steps of QB-Heat, 285M and 3.7G, against MAE and SparK masking",
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and runs the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small images and few rounds, to check that everything runs; writes to "
        "output/bench/quick",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="jobs or models to measure")
    parser.add_argument("--rounds", type=int, help="number of timed turns of each contender")
    parser.add_argument("--batch", type=int, help="images per step (pre-training)")
    parser.add_argument("--clock", choices=("wall", "cpu"), help="use cpu on a shared machine")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:<18}{line}" for name, line in BENCHMARKS.items()))
        return
    for name in args.only:
        if name not in BENCHMARKS:
            raise UserError(f"no benchmark named '{name}'; there are {', '.join(BENCHMARKS)}")
    set_threads(args.threads)
    print(environment())
    folder = args.output
    if args.quick:
        folder /= "quick"
    results = []
    for name in args.only:
        print(f"\n{name}: {BENCHMARKS[name]}")
        benchmark = importlib.import_module(f"benchmarks.{name}")
        try:
            rows = benchmark.run(
                quick=args.quick, threads=args.threads, **options_of(benchmark, args)
            )
        except ModuleNotFoundError as error:
            raise UserError(
                f"the benchmark '{name}' needs {error.name}: install the extra 'bench'"
            ) from error
        write_results(rows, folder / f"{name}.json")
        write_environment(name, folder / ENVIRONMENTS)
        results += rows
    print(f"\n{format_results(results)}\nwritten to {folder}")


def options_of(benchmark: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the given flags that are arguments of a benchmark's ``run``."""
    known = inspect.signature(benchmark.run).parameters
    options = {}
    for name in ("cases", "rounds", "batch", "clock"):
        value = vars(args)[name]
        if value is None:
            continue
        if name not in known:
            raise UserError(
                f"--{name} is not an option of {benchmark.__name__}: choose others with --only"
            )
        options[name] = value
    return options


if __name__ == "__main__":
    main()
