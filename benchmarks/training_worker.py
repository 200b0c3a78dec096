# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A process that makes training steps when it is told to, with the package as it lies in a folder.

python benchmarks/training_worker.py TREE JOB FOLDER THREADS QUICK CLOCK [KEY VALUE ...]

It is run by ``training_speed.py``, as ``workers.py`` says: a line is the number of steps of a turn.
Its answers have the turn's ``seconds`` without those in which images were ``waited`` for, the
``loss`` of the last step and the ``peak`` memory in MiB. With the clock "operators" an answer has
instead the seconds of a step in all ``kinds`` of operators.
"""

import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OPERATORS = "operators"
_PRETRAINING: dict[str, Any] = {  # ImageNet fits no memory; the precision is the contender's
    "file_size": (256, 320),
    "opts": {"INPUT.PRETRAIN.MEMORY_GB": 0.0, "SOLVER.AMP.ENABLED": False},
}
_BOXES: dict[str, Any] = {
    "size": (480, 640),
    "batch": 2,
    "file_size": (480, 640),
    "opts": {
        "INPUT.MIN_SIZE_TRAIN": (480,),
        "INPUT.MAX_SIZE_TRAIN": 640,
        "INPUT.DETR_CROP_RESIZE": [],
    },
}


def find_jobs() -> dict[str, Any]:
    """Returns what is trained, by name; imports the package that lies first on the path."""
    from benchmarks.cached_cases import Case

    large: dict[str, Any] = {"size": (256, 256), "batch": 4, **_PRETRAINING}
    small: dict[str, Any] = {"size": (128, 128), "batch": 16, **_PRETRAINING}
    qb_heat, coco = "ImageNet-QBHeat/qb_heat", "coco/mf_detr_211_285M"
    decoder = "256 px, the paper's decoder"
    return {
        "qb_heat_285m": Case(f"QB-Heat 285M, {decoder}", f"{qb_heat}_285M_100ep.yaml", **large),
        "qb_heat_285m_128px": Case(
            "QB-Heat 285M, 128 px, the CPU recipe", "custom/qb_heat_285M_cpu.yaml", **small
        ),
        "qb_heat_3.7g": Case(f"QB-Heat 3.7G, {decoder}", f"{qb_heat}_3.7G_100ep.yaml", **large),
        "mf_detr_285m_211": Case("MF-285M + MF-Dec-211", f"{coco}_finetune.yaml", **_BOXES),
        "mf_detr_285m_211_frozen": Case(
            "MF-Dec-211 on a frozen MF-285M", f"{coco}_probe.yaml", **_BOXES
        ),
        "retinanet_285m": Case(
            "MF-285M + RetinaNet", "coco/retinanet_285M_finetune.yaml", **_BOXES
        ),
    }


def build_steps(
    job: str, folder: Path, opts: list[str], *, quick: bool, clock: Callable[[], float]
) -> Callable[[], tuple[float, float]]:
    """Returns what makes a step of a job and returns its seconds of waiting and its loss.

    Args:
        job: of ``find_jobs``.
        folder: for images and for what a run writes.
        opts: keys and values of the config that differ.
        quick: two images of 64 pixels.
        clock: seconds.
    """
    from benchmarks.cached_cases import make_config, shrunk
    from benchmarks.trainer_steps import Steps

    case = find_jobs()[job]
    if quick:
        case = shrunk(case)
    cfg = make_config(case, folder, num_images=2 * case.batch)
    cfg.merge_from_list(opts)
    return Steps(cfg, clock)


def serve(
    step: Callable[[], tuple[float, float]],
    turns: Iterable[str],
    answer: Callable[[dict[str, Any]], None],
    clock: Callable[[], float],
) -> None:
    """Makes as many steps as each line says, and answers each."""
    from benchmarks.timing import resident_mib

    for turn in turns:
        start = clock()
        told = [step() for _ in range(int(turn))]
        waited = sum(waited for waited, _ in told)
        seconds, peak = clock() - start - waited, resident_mib(peak=True)
        answer({"seconds": seconds, "waited": waited, "loss": told[-1][1], "peak": peak})


def main() -> None:
    """Prepares the job and serves until standard input ends."""
    tree, job, folder, threads, quick, clock_name, *opts = sys.argv[1:]
    root = Path(__file__).resolve().parents[1]
    # The package of the tree, the benchmarks of this file.
    sys.path[:] = [tree, *(p for p in sys.path[1:] if Path(p or ".").resolve() != root), str(root)]
    from benchmarks.workers import open_answers

    answer = open_answers()
    try:
        found = find_spec("qbheat_det")
        origin = Path(str(found and found.origin)).resolve()
        if Path(tree).resolve() not in origin.parents:
            raise ImportError(f"qbheat_det would come from {origin}, not from {tree}")
        import torch

        torch.set_num_threads(int(threads))
        clock = CLOCKS.get(clock_name, time.perf_counter)
        step = build_steps(job, Path(folder), opts, quick=quick == "1", clock=clock)
        answer({"ready": True})
        if clock_name == OPERATORS:
            from benchmarks.step_profile import seconds_by_kind

            for turn in sys.stdin:
                answer({"kinds": seconds_by_kind(step, int(turn))})
        else:
            serve(step, sys.stdin, answer, clock)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
