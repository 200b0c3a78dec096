# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Peak resident memory of one forward pass on a CPU, batch 1, beside the same peers.

Each model runs in a fresh process; what its imports hold is taken off, weights and activations
stay. The forward passes are those of the latency benchmark.
"""

from benchmarks.detectors import DETECTORS, HEIGHT, OURS, PEERS, WIDTH
from benchmarks.timing import Result, peak_memory_in_turns


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures all detectors in turns, each time in a fresh process.

    Args:
        quick: a small image and one round.
        threads: CPU threads.
    """
    height, width = (HEIGHT // 4, WIDTH // 4) if quick else (HEIGHT, WIDTH)
    sizes = [str(number) for number in (height, width, threads)]
    commands = {name: ["benchmarks/detectors.py", name, *sizes] for name in (*OURS, *PEERS)}
    print(f"MiB at the peak of a forward at {height}x{width}, batch 1: median (least to greatest)")
    samples = peak_memory_in_turns(commands, rounds=1 if quick else 3)
    for name, sample in samples.items():
        print(f"  {DETECTORS[name].title:<32} {sample}")
    return [
        Result.lower_is_better(
            f"memory/{ours}_eager_vs_{peer}", samples[ours].median, samples[peer].median, "MiB"
        )
        for ours in OURS
        for peer in PEERS
    ]
