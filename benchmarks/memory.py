# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Peak resident memory of training a RetinaNet on images of many sizes, in one thread.

``python -m benchmarks.memory CONFIG STEPS KEY VALUE …`` trains and prints the peak in MiB.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.cached_cases import Case, make_config
from benchmarks.timing import Result, peak_memory_in_turns
from benchmarks.trainer_steps import Steps
from benchmarks.workers import resident_mib

_CASES = {
    "retinanet_training_gib": "custom/retinanet_lite0_finetune.yaml",
    "retinanet_285m_training_gib": "custom/retinanet_285M_finetune.yaml",
}


def run(*, quick: bool, threads: int = 1) -> list[Result]:
    """Compares training with and without ``SOLVER.KEEP_MEMORY``."""
    num_steps = 2 if quick else 60
    rows = []
    for name, config in _CASES.items():
        command = ["-m", "benchmarks.memory", config, str(num_steps), "SOLVER.KEEP_MEMORY"]
        peaks = peak_memory_in_turns({key: [*command, key] for key in ("True", "False")}, rounds=1)
        kept = peaks["True"].median / 1024
        freed = peaks["False"].median / 1024
        rows.append(Result.lower_is_better(f"memory/{name}", kept, freed, "GiB"))
    return rows


def main() -> None:
    """Trains and prints the peak memory in MiB."""
    config, steps, *opts = sys.argv[1:]
    torch.set_num_threads(1)
    case = Case("", config, size=(288, 448), batch=4, file_size=(480, 640))
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(case, Path(folder), num_images=240)
        cfg.merge_from_list(opts)
        step = Steps(cfg, time.perf_counter)
        for _ in range(int(steps)):
            step()
        print(resident_mib(peak=True))


if __name__ == "__main__":
    main()
