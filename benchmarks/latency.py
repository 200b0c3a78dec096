# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Latency of detectors on a CPU at batch size 1: as built, and in their fastest forms.

Detectron2 models (ours and a peer) are timed from ``batched_inputs`` to ``Instances``, with
normalization, padding and post-processing. DETR, RT-DETR and D-FINE are timed from pixels to logits
and boxes. ``forms.py`` describes the forms. RT-DETR and D-FINE are compared at their own image
size, 640 x 640. Each detector has its own process, because deploying changes how a process keeps
freed memory. The processes take turns.
"""

from benchmarks.detectors import DETECTORS, HEIGHT, OURS, PEERS, WIDTH
from benchmarks.forms import COMPILED, DEPLOYED, EAGER, FROZEN, Forwards
from benchmarks.timing import Result, Sample, samples_in_rounds

Contender = tuple[str, str]  # name of a detector, and its form
_ROUNDS = 7
RT_DETR_SIDE = 640
# Pairs (ours, peer) for the rows of the results, at COCO's test size and at RT-DETR's size.
AT_TEST_SIZE: list[tuple[Contender, Contender]] = [
    *(((ours, EAGER), (peer, EAGER)) for ours in OURS for peer in PEERS),
    *(((ours, DEPLOYED), ("detr_r50", form)) for ours in OURS for form in (EAGER, COMPILED)),
    *(((ours, DEPLOYED), (ours, EAGER)) for ours in OURS),
]
AT_640: list[tuple[Contender, Contender]] = [
    (("285m_211", EAGER), ("rt_detr_r18", EAGER)),
    (("285m_211", DEPLOYED), ("rt_detr_r18", EAGER)),
    (("285m_211", DEPLOYED), ("rt_detr_r18", COMPILED)),
    (("285m_211", DEPLOYED), ("d_fine_n", COMPILED)),
]


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Times all detectors in turns, each in its own process."""
    shrink = 4 if quick else 1
    height = HEIGHT // shrink
    width = WIDTH // shrink
    side = RT_DETR_SIDE // shrink
    rows = compare(AT_TEST_SIZE, height, width, threads=threads, quick=quick)
    return rows + compare(AT_640, side, side, threads=threads, quick=quick, where="640_")


def compare(
    pairs: list[tuple[Contender, Contender]],
    height: int,
    width: int,
    *,
    threads: int,
    quick: bool,
    where: str = "",
) -> list[Result]:
    """Times pairs (ours, peer) in turns on images of one size; returns a row per pair."""
    contenders = list(dict.fromkeys(each for pair in pairs for each in pair))
    # Which compiled form is faster depends on the machine. The rows have the faster one.
    contenders += [(name, FROZEN) for name, form in contenders if form == COMPILED and not quick]
    print(f"seconds a forward at {height}x{width}, batch 1: median (least to greatest)")
    with Forwards(contenders, height, width, threads=threads, quick=quick) as calls:
        named = {"/".join(each): call for each, call in calls.items()}
        samples = samples_in_rounds(named, rounds=2 if quick else _ROUNDS, clock=None)
    for name, form in calls:
        title = f"{DETECTORS[name].title}, {form}"
        print(f"  {title:<42} {samples[f'{name}/{form}']}")
    for name in {name for name, form in calls if form == FROZEN and (name, COMPILED) in calls}:
        both = samples[f"{name}/{COMPILED}"], samples[f"{name}/{FROZEN}"]
        samples[f"{name}/{COMPILED}"] = min(both, key=lambda sample: sample.median)
    return [row_of(*pair, samples, where) for pair in pairs if all(each in calls for each in pair)]


def row_of(ours: Contender, peer: Contender, samples: dict[str, Sample], where: str = "") -> Result:
    """Returns the row of a pair; its name omits the form of an eager peer."""
    form = "" if peer[1] == EAGER and peer[0] != ours[0] else f"_{peer[1]}"
    return Result.lower_is_better(
        f"latency/{ours[0]}_{where}{ours[1]}_vs_{peer[0]}{form}",
        samples["/".join(ours)].median,
        samples["/".join(peer)].median,
        "s",
    )
