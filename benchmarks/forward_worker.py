# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A process that runs a detector's forward pass when it is told to; see ``workers.py``.

python benchmarks/forward_worker.py NAME FORM HEIGHT WIDTH THREADS QUICK

Its first answer has the seconds until the ``first`` result, from building over compiling, and the
``report`` of a deployed model; every later one the ``seconds`` of a forward pass.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workers import open_answers


def main() -> None:
    """Builds the detector and serves until standard input ends."""
    name, form, *numbers = sys.argv[1:]
    height, width, threads, quick = (int(number) for number in numbers)
    answer = open_answers()
    try:
        import torch

        from benchmarks.detectors import random_images
        from benchmarks.forms import build, report_of
        from benchmarks.timing import set_threads

        set_threads(threads)
        images = random_images(height, width)
        with torch.inference_mode():
            start = time.perf_counter()
            forward = build(name, form, quick=bool(quick), image_sizes=((height, width),))
            forward(images)
            answer({"first": time.perf_counter() - start, "report": report_of(forward)})
            for _ in sys.stdin:
                start = time.perf_counter()
                forward(images)
                answer({"seconds": time.perf_counter() - start})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
