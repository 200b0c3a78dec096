# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One optimizer step: parts that add up to the whole, precision, what stops it, and on a GPU."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.core import environment
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import seed_step
from qbheat_det.engine import step as step_module
from qbheat_det.engine.step import BatchSource, StepTrainer, choose_precision


class MeanOverImages(nn.Module):
    """Two losses, each a mean over the images of the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, batch):
        inputs = torch.stack([entry["image"] for entry in batch])
        error = (inputs * self.weight).sum(dim=1) - 1
        return {"loss_square": error.square().mean(), "loss_size": error.abs().mean()}


class MeanOverBoxes(MeanOverImages):
    """One loss: the sum over images, divided by the count of boxes that all of them have."""

    def loss_counts(self, batch):
        return torch.tensor([float(sum(entry["boxes"] for entry in batch))])

    def loss_normalizers(self, counts, parts):
        return counts / parts

    def forward(self, batch, normalizers=None):
        if normalizers is None:
            normalizers = self.loss_counts(batch)
        inputs = torch.stack([entry["image"] * entry["boxes"] for entry in batch])
        return {"loss": (inputs * self.weight).square().sum() / normalizers[0].clamp(min=1e-6)}


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randn(2, generator=generator), "boxes": index % 4} for index in range(count)
    ]


def make(model, data, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": len(data), **options}
    return StepTrainer(model, options.pop("loader", itertools.repeat(data)), optimizer, **options)


def step(trainer, iteration=0):
    """Runs one step; returns the latest logged scalars."""
    trainer.iter = iteration
    with EventStorage(iteration) as storage:
        trainer.run_step()
        return {name: value for name, (value, _) in storage.latest().items()}


@pytest.mark.parametrize("build", [MeanOverImages, MeanOverBoxes])
@pytest.mark.parametrize(("count", "accumulate"), [(6, 3), (7, 3), (4, 4)])
def test_parts_of_a_batch_give_the_gradients_and_losses_of_the_whole(build, count, accumulate):
    whole, parts = build(), build()
    expected = step(make(whole, images(count)))
    found = step(make(parts, images(count), accumulate=accumulate))
    assert parts.weight.grad is not None
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)
    torch.testing.assert_close(parts.weight, whole.weight)
    names = {name for name in expected if "loss" in name}
    assert names >= {"total_loss"}
    torch.testing.assert_close({n: found[n] for n in names}, {n: expected[n] for n in names})


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx2"}, None), ({"avx2", "amx_bf16"}, torch.float16)]
)
def test_a_processor_that_emulates_half_precision_trains_in_float32(
    flags, dtype, monkeypatch, caplog
):
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: flags)
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", True])
    with caplog.at_level("WARNING", logger=step_module.__name__):
        assert choose_precision(cfg) == dtype
    assert ("SOLVER.AMP" in caplog.text) == (dtype is None)


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", None), ("float16", torch.float16)])
def test_a_gpu_without_bfloat16_trains_in_float16_or_float32(precision, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    cfg = get_cfg()
    amp = ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", precision]
    cfg.merge_from_list(["MODEL.DEVICE", "cuda", *amp])
    assert choose_precision(cfg) == dtype


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_low_precision_comes_near_the_step_in_full(precision):
    class Layered(MeanOverImages):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(2, 2)

        def forward(self, batch):
            inputs = self.layer(torch.stack([entry["image"] for entry in batch]))
            self.seen = inputs.dtype
            return {"loss": inputs.float().square().mean()}

    full, low = Layered(), Layered()
    step(make(full, images(8)))
    trainer = make(low, images(8), precision=precision)
    step(trainer)
    assert low.seen == precision
    assert low.layer.weight.dtype == torch.float32
    torch.testing.assert_close(low.layer.weight.grad, full.layer.weight.grad, rtol=0.03, atol=0.02)
    assert trainer.grad_scaler.is_enabled() == (precision == torch.float16)


def test_a_step_whose_half_precision_gradients_overflow_is_left_out_and_the_scale_saved():
    model = MeanOverImages()
    trainer = make(model, images(2), precision=torch.float16)
    trainer.grad_scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    before = model.weight.detach().clone()
    step(trainer)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    assert trainer.grad_scaler.get_scale() < 3e38
    other = make(MeanOverImages(), images(2), precision=torch.float16)
    other.load_state_dict(trainer.state_dict())
    assert other.grad_scaler.get_scale() == trainer.grad_scaler.get_scale()


def test_a_loss_that_is_not_finite_stops_before_the_weights_change():
    ends = []

    class Ending(MeanOverImages):
        def after_step(self):
            ends.append(self.weight.detach().clone())

    model = Ending()
    bad = [{"image": torch.tensor([math.nan, 1.0]), "file_name": "a.jpg"}] * 2
    trainer = make(model, images(2), loader=iter([images(2), bad]))
    step(trainer)
    weights = model.weight.detach().clone()
    torch.testing.assert_close(ends, [weights], rtol=0, atol=0)
    with pytest.raises(UserError, match=r"iteration 1 \(loss_square nan.*a\.jpg"):
        step(trainer, 1)
    torch.testing.assert_close(model.weight.detach(), weights, rtol=0, atol=0)
    assert len(ends) == 1


def test_the_seed_of_a_step_depends_on_run_iteration_and_process_alone():
    def draw(*place):
        seed_step(*place)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first = draw(7, 100, 1)
    assert draw(7, 100, 1) == first
    places = [(8, 100, 1), (7, 101, 1), (7, 100, 0), (7, 1, 100), (0, 0, 0)]
    columns = zip(first, *(draw(*place) for place in places), strict=True)
    assert all(len(set(column)) == 1 + len(places) for column in columns)


def numbered(count):
    """Yields batches of an image whose values are the batch's number."""
    for number in map(float, range(count)):
        found = Instances((2, 2), gt_boxes=Boxes(torch.full((1, 4), number)))
        features = {"s8": torch.full((1,), number)}
        image = torch.full((3, 2, 2), number)
        yield [{"image": image, "instances": found, "file_name": str(number), "features": features}]


@pytest.mark.gpu
def test_on_a_gpu_the_next_batch_is_there_before_it_is_asked_for():
    source = BatchSource(numbered(4).__next__, torch.device("cuda"))
    for number in map(float, range(4)):
        (entry,), _ = source.take()
        assert source._ahead is None
        source.load_ahead()
        assert (source._ahead is None) == (number == 3)
        for tensor in (entry["image"], entry["features"]["s8"], entry["instances"].gt_boxes.tensor):
            assert tensor.device.type == "cuda"
            torch.testing.assert_close(tensor.cpu(), torch.full_like(tensor.cpu(), number))
        assert entry["file_name"] == str(number)
    with pytest.raises(StopIteration):
        source.take()


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_that_of_the_cpu_and_stops_where_a_loss_is_bad():
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
