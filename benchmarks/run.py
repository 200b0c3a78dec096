# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the benchmarks, prints a table and writes ``output/bench/NAME.json`` for each.

Each benchmark is a module with ``run(quick, threads, …)``, which returns rows. ``quick`` uses small
images and few rounds, to see that everything runs. Options that a benchmark takes are parameters.

python benchmarks/run.py [--only NAME …] [--quick] [--list]
python benchmarks/run.py --only cached_training --cases 3.7g_211 --rounds 7 --clock cpu
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    "latency": "seconds a forward of ours, plain and deployed, beside DETR, RT-DETR and RetinaNet",
    "export": "seconds an image of exported files in onnxruntime and OpenVINO, beside PyTorch",
    "deployment": "seconds to the first image of a size, compiled for it",
    "memory": "the most memory of training on images of many sizes",
    "cached_training": "a head's training step from cached features beside one with its encoder",
    "training": "seconds of a training step of five recipes, beside float32",
    "data": "images a second from JPEG files to a batch, beside torchvision and simplejpeg",
    "gpu": "on a CUDA GPU: detectors at batch 1 and 32, pre-training, and images from memory",
    "pretraining": "a pre-training step of QB-Heat, 285M and 3.7G, beside MAE and SparK masking",
    "shards": "images a second of the stream from a folder, from shards here and over HTTP",
    "batch_prediction": "images a second of prediction into Parquet by 1 and 2 actors of Ray",
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and runs the benchmarks that they name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small images and few rounds, to see that all runs; writes to output/bench/quick",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="jobs or models to measure")
    parser.add_argument("--rounds", type=int, help="timed turns of each")
    parser.add_argument("--batch", type=int, help="images a step, of pre-training")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), help="cpu: for a machine that is shared"
    )
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
    folder = args.output / "quick" if args.quick else args.output
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
    """Returns the flags that are given, for a benchmark's ``run``."""
    known = inspect.signature(benchmark.run).parameters
    given = {name: vars(args)[name] for name in ("cases", "rounds", "batch", "clock")}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in known:
            raise UserError(f"--{name} is no option of {benchmark.__name__}: name others by --only")
    return given


if __name__ == "__main__":
    main()
