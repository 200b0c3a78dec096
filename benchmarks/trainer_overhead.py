# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a step of the trainer takes beyond the model's forward, backward and the optimizer's step.

MF-285M + MF-Dec-211 trains on one batch over and over: all hooks, seeding, checks of the losses
and logs take part, loading data does not. The figure is the time of a step less what forward,
backward and optimizer took within that same step, so a slow spell of the machine meets both. As a
check, plain steps of three lines are timed in turns with the trainer's.
"""

import contextlib
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from benchmarks.timing import Result, Sample, set_threads

BAR = 0.03
_NUM_IMAGES, _NUM_BOXES = 2, 8


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Times steps of the trainer and what they consist of.

    Args:
        quick: a small image and two rounds, to see that everything runs.
        threads: CPU threads.

    Returns:
        One row; "ours" is the trainer's step and "peer" its forward, backward and optimizer.
    """
    set_threads(threads)
    side, rounds = (64, 2) if quick else (320, 16)
    with tempfile.TemporaryDirectory() as folder, EventStorage() as storage:
        trainer = build_trainer(make_config(Path(folder)), make_batch(side))
        trainer.storage = storage
        for hook in trainer._hooks:
            hook.before_train()
        with timed_inside(trainer) as inside:
            whole, bare = time_pairs(
                lambda: whole_step(trainer), lambda: bare_step(trainer), rounds=rounds
            )
    of_steps = inside[-rounds:]  # the first ones warmed up
    beyond = [total - within for total, within in zip(whole, of_steps, strict=True)]
    share = statistics.median(beyond) / statistics.median(of_steps)
    paired = sorted(ours / plain - 1 for ours, plain in zip(whole, bare, strict=True))
    print(f"{rounds} steps, {_NUM_IMAGES} images of {side}x{side}: median (least to greatest)")
    print(f"  step of the trainer, s                     {Sample.of(whole)}")
    print(f"  forward, backward, optimizer within it, s  {Sample.of(of_steps)}")
    print(f"  the trainer's own, ms                      {Sample.of([1e3 * t for t in beyond])}")
    print(f"  share: {share:.2%}, the bar is {BAR:.0%}")
    print(
        f"  in turns with plain steps: {statistics.median(paired):.2%} longer, quarters "
        f"{paired[rounds // 4]:.2%} to {paired[-1 - rounds // 4]:.2%}"
    )
    peer = statistics.median(of_steps)
    ours = peer + statistics.median(beyond)
    return [Result.lower_is_better("trainer_overhead/285m_211_vs_bare", ours, peer, "s")]


def make_config(folder: Path) -> CfgNode:
    """Returns the model's config, with the solver of its recipe."""
    from qbheat_det.config import get_config_path, load_config

    cfg = load_config(get_config_path("quick_schedules/mf_detr_211_285M_toy.yaml"))
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.OUTPUT_DIR = str(folder)
    cfg.SOLVER.IMS_PER_BATCH = _NUM_IMAGES
    cfg.SOLVER.MAX_ITER = 1_000_000  # more than the benchmark makes
    cfg.SOLVER.BASE_LR = 1e-6  # the loss stays finite however often the batch is seen
    cfg.SEED = 1
    return cfg


def build_trainer(cfg: CfgNode, batch: list[dict[str, Any]]) -> Any:
    """Returns a trainer that is given ``batch`` at each step."""
    from qbheat_det.engine import Trainer

    trainer = Trainer(cfg)
    give_batches(trainer, itertools.repeat(batch))
    return trainer


def give_batches(trainer: Any, batches: Iterator[list[dict[str, Any]]]) -> None:
    """Makes a trainer take its batches from an iterator."""
    inner = trainer._trainer
    inner.model.train()
    for name in ("_data_loader_iter_obj", "_data_loader_iter"):  # main's, then v0.6's
        try:
            setattr(inner, name, batches)
        except AttributeError:  # a property on main
            continue


def make_batch(side: int) -> list[dict[str, Any]]:
    """Returns random images with random boxes."""
    generator = torch.Generator().manual_seed(0)
    batch = []
    for _ in range(_NUM_IMAGES):
        corners = torch.rand(_NUM_BOXES, 2, generator=generator) * side / 2
        sides = side / 8 + torch.rand(_NUM_BOXES, 2, generator=generator) * side / 4
        instances = Instances(
            (side, side),
            gt_boxes=Boxes(torch.cat([corners, corners + sides], dim=1)),
            gt_classes=torch.zeros(_NUM_BOXES, dtype=torch.int64),
        )
        image = 255 * torch.rand(3, side, side, generator=generator)
        batch.append({"image": image, "instances": instances, "height": side, "width": side})
    return batch


def whole_step(trainer: Any) -> None:
    """One iteration as ``TrainerBase.train`` makes it."""
    trainer.before_step()
    trainer.run_step()
    trainer.after_step()
    trainer.iter += 1


def bare_step(trainer: Any) -> None:
    """The same update in plain PyTorch, with the losses of the same model."""
    losses = trainer.model(next(trainer._trainer._data_loader_iter))
    trainer.optimizer.zero_grad()
    sum(losses.values()).backward()
    trainer.optimizer.step()


@contextlib.contextmanager
def timed_inside(trainer: Any) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of forward, backward and optimizer, one entry a step.

    A step lasts from ``trainer.before_step`` to ``trainer.after_step``; outside of one, nothing is
    counted.
    """
    inside: list[float] = []
    in_step = False

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            if in_step:
                inside[-1] += time.perf_counter() - start
            return result

        return wrapped

    def begin() -> None:
        nonlocal in_step
        inside.append(0.0)
        in_step = True
        originals["before_step"]()

    def end() -> None:
        nonlocal in_step
        in_step = False
        originals["after_step"]()

    model, optimizer = trainer.model, trainer.optimizer
    places = [
        (trainer, "before_step", lambda _: begin),
        (trainer, "after_step", lambda _: end),
        (model, "forward", timed),
        (optimizer, "step", timed),
        (torch.Tensor, "backward", timed),
    ]
    originals = {name: getattr(owner, name) for owner, name, _ in places}
    for owner, name, wrap in places:
        setattr(owner, name, wrap(originals[name]))
    try:
        yield inside
    finally:
        for owner, name, _ in places:
            setattr(owner, name, originals[name])


def time_pairs(
    whole: Callable[[], object],
    bare: Callable[[], object],
    *,
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Times two calls in turns; every other round the second goes first.

    Returns:
        Seconds of each call in each round.
    """
    calls: tuple[tuple[Callable[[], object], list[float]], ...] = ((whole, []), (bare, []))
    for number in range(warm_up + rounds):
        for call, seconds in calls if number % 2 else calls[::-1]:
            start = clock()
            call()
            if number >= warm_up:
                seconds.append(clock() - start)
    return calls[0][1], calls[1][1]
