# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Latency of plain eager detectors on a CPU, batch 1, beside DETR-R50 and RetinaNet-R50-FPN.

Detectron2's models, ours and the peer, are timed from ``batched_inputs`` to ``Instances``: with
normalisation, padding and post-processing. DETR's forward runs from a normalised batch to logits
and boxes, without them.
"""

from functools import partial

import torch

from benchmarks.detectors import DETECTORS, HEIGHT, OURS, PEERS, WIDTH, random_image
from benchmarks.timing import Result, set_threads, time_interleaved


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Times all detectors in turns in this process.

    Args:
        quick: a small image and two rounds, to see that everything runs.
        threads: CPU threads.
    """
    set_threads(threads)
    height, width = (HEIGHT // 4, WIDTH // 4) if quick else (HEIGHT, WIDTH)
    image = random_image(height, width)
    forwards = {name: DETECTORS[name].load()() for name in (*OURS, *PEERS)}
    print(f"seconds a forward at {height}x{width}, batch 1: median (least to greatest)")
    with torch.inference_mode():
        samples = time_interleaved(
            {name: partial(forward, image) for name, forward in forwards.items()},
            rounds=2 if quick else 7,
        )
    for name, sample in samples.items():
        print(f"  {DETECTORS[name].title:<32} {sample}")
    return [
        Result.lower_is_better(
            f"latency/{ours}_eager_vs_{peer}", samples[ours].median, samples[peer].median, "s"
        )
        for ours in OURS
        for peer in PEERS
    ]
