# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images per second of prediction to Parquet files, with 1 and 2 Ray actors and without Ray.

The model is a small, deployed detector of the zoo, on JPEGs of 640 x 480 pixels. Ray actors and
plain processes have one thread each. Rates are for the middle half of the run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.shards import draw_photographs
from benchmarks.timing import ROOT, PairedResult, Result
from qbheat_det.api import Job
from qbheat_det.inference import batch
from qbheat_det.inference.batch_inputs import Chunk, Item, cut_chunks, list_items

_OPTS = ("INPUT.MIN_SIZE_TEST", "320", "MODEL.DEPLOY.COMPILE", "off")
_JOB = Job("qbheat://retinanet/285M_bccd", device="cpu", fast=True, opts=_OPTS)
Stamp = tuple[float, float, int]  # time of a finished chunk, CPU seconds, process id


def run(
    *, quick: bool, threads: int = 2, rounds: int | None = None, clock: str = "wall"
) -> list[Result]:
    """Measures actors and processes in turns; compares both kinds, and two workers with one."""
    import ray

    parts, size, rounds = (16, 2, 1) if quick else (24, 8, rounds or 3)
    rates: dict[tuple[str, int], list[float]] = {}
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            images = Path(folder, "images")
            draw_photographs(images, parts * size, (640, 480))
            chunks = cut_chunks(list_items([str(images)]), size, ())
            for _ in range(rounds):
                for count in (1, 2):
                    for kind, measure in (("processes", _by_processes), ("actors", _by_actors)):
                        rate = _rate(measure(chunks, count), size, clock)
                        rates.setdefault((kind, count), []).append(rate)
                        print(f"{count} {kind}: {rate:.2f} images a second", flush=True)
    finally:
        ray.shutdown()
    pairs = {
        "1_actor_vs_1_process": (("actors", 1), ("processes", 1)),
        "2_actors_vs_2_processes": (("actors", 2), ("processes", 2)),
        "2_actors_vs_1_actor": (("actors", 2), ("actors", 1)),
        "2_processes_vs_1_process": (("processes", 2), ("processes", 1)),
    }
    return [
        PairedResult.higher_is_better(f"batch_prediction/{name}", rates[a], rates[b], "img/s")
        for name, (a, b) in pairs.items()
    ]


def _rate(stamps: Sequence[Stamp], size: int, clock: str) -> float:
    """Returns images per second: of the middle half (wall), or summed over workers (CPU)."""
    stamps = sorted(stamps)
    if clock == "wall":
        stamps = stamps[len(stamps) // 4 : -len(stamps) // 4]
        return (len(stamps) - 1) * size / (stamps[-1][0] - stamps[0][0])
    rate = 0.0
    for worker in {stamp[2] for stamp in stamps}:
        own = [seconds for _, seconds, of in stamps if of == worker]
        rate += (len(own) - 1) * size / (own[-1] - own[0])
    return rate


def _stamp() -> Stamp:
    return time.time(), time.process_time(), os.getpid()


class _TimedActor(batch._Actor):
    def __call__(self, batch: Any) -> Any:
        return {**super().__call__(batch), "content": [json.dumps(_stamp()).encode()]}


def _by_actors(chunks: Sequence[Chunk], count: int) -> list[Stamp]:
    batch._Actor = _TimedActor  # type: ignore[misc]
    return [json.loads(content) for _, content in batch._run_on_ray(_JOB, chunks, count)]


def _by_processes(chunks: Sequence[Chunk], count: int) -> list[Stamp]:
    """Like ``_by_actors``, with plain processes; each has its own session, like those of Ray."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        started = []
        for number in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.batch_prediction"],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            started.append(stack.enter_context(process))
            assert process.stdin
            process.stdin.write(json.dumps(chunks[number::count]))
            process.stdin.close()
        return [json.loads(line) for process in started for line in process.stdout or ()]


def _main() -> None:
    chunks = [Chunk(name, [Item(*each) for each in items]) for name, items in json.load(sys.stdin)]
    for _ in batch._run_here(_JOB, chunks):
        print(json.dumps(_stamp()), flush=True)


if __name__ == "__main__":
    _main()
