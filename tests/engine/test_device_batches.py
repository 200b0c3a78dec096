# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches to the device and losses back: plain on the CPU, ahead and late on a GPU."""

import math
from typing import Any

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch._subclasses import FakeTensorMode

from qbheat_det.core.errors import UserError
from qbheat_det.engine.step import BatchSource, LossReading

from .test_step import MeanOverImages, images, make, step


def numbered(count: int) -> Any:
    """Returns a function that gives batches 0, 1, … and then stops."""
    batches = iter(
        [
            {
                "image": torch.full((3, 2, 2), float(number)),
                "instances": Instances((2, 2), gt_boxes=Boxes(torch.full((1, 4), float(number)))),
                "file_name": str(number),
                "features": {"s8": torch.full((1,), float(number))},
            }
        ]
        for number in range(count)
    )
    return lambda: next(batches)


def test_the_arrival_of_losses_is_awaited_on_the_device_that_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current device, whose stream an event is recorded on by default, is another."""
    recorded = []

    class Event:
        def record(self, stream: Any = None) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    with FakeTensorMode():
        assert LossReading({"a": torch.zeros((), device="cuda:1")}).is_late
    assert recorded == ["stream of cuda:1"]


@pytest.mark.gpu
def test_on_a_gpu_the_next_batch_is_there_before_it_is_asked_for() -> None:
    device = torch.device("cuda")
    source = BatchSource(numbered(4), device)
    for number in range(4):
        (entry,), _ = source.take()
        assert source._ahead is None
        source.load_ahead()
        assert (source._ahead is None) == (number == 3)
        expected = float(number)
        for tensor in (entry["image"], entry["features"]["s8"], entry["instances"].gt_boxes.tensor):
            assert tensor.device.type == "cuda"
            torch.testing.assert_close(tensor.cpu(), torch.full_like(tensor.cpu(), expected))
        assert entry["file_name"] == str(number)
    with pytest.raises(StopIteration):
        source.take()


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_that_of_the_cpu_and_ends_before_the_weights_where_a_loss_is_bad() -> (
    None
):
    on_cpu, on_gpu = MeanOverImages(), MeanOverImages().cuda()
    expected = step(make(on_cpu, images(4)))
    bad = [{"image": torch.tensor([math.nan, 1.0])}] * 4
    trainer = make(on_gpu, images(4), loader=iter([images(4), bad]))
    found = step(trainer)
    torch.testing.assert_close(on_gpu.weight.cpu(), on_cpu.weight)
    assert found["total_loss"] == pytest.approx(expected["total_loss"])
    weights = on_gpu.weight.detach().clone()
    with pytest.raises(UserError, match="iteration 1"):
        step(trainer, 1)
    torch.testing.assert_close(on_gpu.weight.detach(), weights, rtol=0, atol=0)
