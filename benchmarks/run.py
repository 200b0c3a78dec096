# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the benchmarks, prints a table and writes ``output/bench/NAME.json`` for each.

python benchmarks/run.py [--only NAME …] [--quick] [--list]
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import (
    ENVIRONMENTS,
    ROOT,
    environment,
    format_results,
    set_threads,
    write_environment,
    write_results,
)
from qbheat_det.core.errors import UserError, exit_on_user_error

BENCHMARKS = {
    "latency": "seconds a forward of ours, plain and deployed, beside DETR, RT-DETR and RetinaNet",
    "machine": "multiply-adds a second of each model beside the best that the machine reaches",
    "memory": "peak memory of the same forward passes",
    "exported": "image in, boxes out: an exported ONNX file in onnxruntime beside PyTorch",
    "trainer_overhead": "a training step of 285M + 211 beyond forward, backward and optimizer",
    "data_path": "images a second of each kind of loader alone, beside what its steps would take",
    "cached_training": "a head's training step from cached features beside one with its encoder",
    "training_help": "a training step of MF-Dec-211 with each training-only help beside none",
    "training_speed": "training steps a second, now and at the start of the work on speed",
    "step_profile": "where a training step's time goes, now and at that start",
    "gpu": "on a CUDA GPU: detectors at batch 1 and 32, pre-training, and images from memory",
    "pretraining": "a pre-training step of QB-Heat, 285M and 3.7G, beside MAE and SparK masking",
    # Last: what it deploys sets for the whole process how memory is kept.
    "growth": "how the cost grows with pixels, batch, queries and processes",
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and runs what they name.

    Raises:
        UserError: no benchmark has the name, or a peer's library is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small images and few rounds, written to output/bench/quick: figures of no worth",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "bench")
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
            rows = benchmark.run(quick=args.quick, threads=args.threads)
        except ModuleNotFoundError as error:
            extra = "export" if str(error.name).startswith("onnx") else "bench"
            raise UserError(
                f"the benchmark '{name}' needs {error.name}; install the extra '{extra}'"
            ) from error
        write_results(rows, folder / f"{name}.json")
        write_environment(name, folder / ENVIRONMENTS)
        if hasattr(benchmark, "draw"):
            (folder / f"{name}.svg").write_bytes(benchmark.draw(rows))
        results += rows
    print(f"\n{format_results(results)}\nwritten to {folder}")


if __name__ == "__main__":
    main()
