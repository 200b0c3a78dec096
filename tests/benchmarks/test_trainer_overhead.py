# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of the trainer: fair turns, equal updates, and that it runs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.utils.events import EventStorage

from benchmarks import trainer_overhead
from benchmarks.trainer_overhead import (
    bare_step,
    build_trainer,
    make_batch,
    make_config,
    time_pairs,
    timed_inside,
    whole_step,
)
from qbheat_det.data import ToySpec, prepare_toy_set

TOY_SET = "qbheat_toy_train"


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight images in place of the 2,400 of the set, which is drawn and of which none is shown."""
    folder = Path(prepare_toy_set(ToySpec(name="few", num_images=8, image_size=32), tmp_path))
    few = load_coco_json(str(folder / "annotations.json"), str(folder / "images"), TOY_SET)
    monkeypatch.setitem(DatasetCatalog.data, TOY_SET, lambda: few)


def test_steps_are_timed_in_turns_and_each_goes_first_as_often() -> None:
    now, order = [0.0], []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    whole, bare = time_pairs(
        lambda: call("whole", 3.0),
        lambda: call("bare", 2.0),
        rounds=4,
        warm_up=1,
        clock=lambda: now[0],
    )
    assert (whole, bare) == ([3.0] * 4, [2.0] * 4)
    assert order == ["bare", "whole", "whole", "bare"] * 2 + ["bare", "whole"]


class Stub:
    """A trainer whose parts move a clock: its own by 5 s, forward and optimizer by 1 s each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.weight = torch.ones(1, requires_grad=True)
        self.model = SimpleNamespace(forward=lambda: self.wait(1.0))
        self.optimizer = SimpleNamespace(step=lambda: self.wait(1.0))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def before_step(self) -> None:
        self.wait(5.0)

    def after_step(self) -> None:
        self.model.forward()  # of an evaluation, which is no part of the step

    def step(self) -> None:
        self.before_step()
        self.model.forward()
        self.weight.sum().backward()
        self.optimizer.step()
        self.after_step()


def test_forward_and_optimizer_of_a_step_are_counted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, backward = Stub(), torch.Tensor.backward
    monkeypatch.setattr(trainer_overhead.time, "perf_counter", lambda: trainer.now)
    with timed_inside(trainer) as inside:
        trainer.model.forward()
        trainer.step()
        trainer.model.forward()
        trainer.step()
    assert torch.Tensor.backward is backward
    assert inside == [2.0, 2.0]


def test_both_steps_make_the_same_update(tmp_path: Path) -> None:
    weights = []
    for step in ("whole", "bare"):
        cfg = make_config(tmp_path)
        cfg.MODEL.MF_DETR.DROPOUT = 0.0
        with EventStorage() as storage:
            torch.manual_seed(0)
            trainer = build_trainer(cfg, make_batch(64))
            trainer.storage = storage
            for hook in trainer._hooks:
                hook.before_train()
            (whole_step if step == "whole" else bare_step)(trainer)
            weights.append({k: v.detach().clone() for k, v in trainer.model.named_parameters()})
    first = next(iter(weights[0].values()))
    assert torch.isfinite(first).all()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], msg=name)


def test_a_quick_run_gives_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = trainer_overhead.run(quick=True, threads=1)
    assert row.name == "trainer_overhead/285m_211_vs_bare"
    assert 0 < row.peer < row.ours
    assert "share: " in capsys.readouterr().out
