# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The error of a loss that is not finite names the first module with a bad output."""

from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.engine.step import StepTrainer
from tests.engine.tiny_detectors import make_retinanet_config


class Explosive(nn.Module):
    """Takes the logarithm of dropped pixels, so that each draw of dropout can break it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.dropout, self.logarithm = nn.Dropout(rate), Logarithm()
        self.seen: list[Tensor] = []

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        values = self.dropout(torch.stack([entry["image"] for entry in batch]))
        self.seen.append(values)
        return {
            "loss_scale": self.scale(values).mean(),
            "loss_logarithm": self.logarithm(values).mean() * self.scale.weight.square().sum(),
        }


class Logarithm(nn.Module):
    """The one module with an output that is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def run(model: nn.Module, batch: list[dict[str, Any]], *, accumulate: int = 1) -> str:
    """Returns the error of a step of the model on a batch."""
    trainer = StepTrainer(
        model,
        iter([batch]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=len(batch),
        accumulate=accumulate,
        seed=3,
    )
    trainer.iter = 5
    with EventStorage(5), pytest.raises(UserError) as caught:
        trainer.run_step()
    return str(caught.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_runs_again_with_the_same_dropout(accumulate: int) -> None:
    model = Explosive(0.1).train()
    batch = [
        {"image": torch.full((10,), 2.0 + i)[:, None], "file_name": f"{i}.jpg"} for i in (0, 1)
    ]
    message = run(model, batch, accumulate=accumulate)
    half = len(model.seen) // 2
    assert len(model.seen) == 2 * half
    for before, after in zip(model.seen[:half], model.seen[half:], strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    count = int((model.seen[-1] == 0).sum())
    assert f"logarithm (Logarithm), {count} values, inputs finite, weights finite" in message
    assert "iteration 5 (loss_logarithm -inf on process 0)" in message
    last = [f"{index}.jpg" for index in range(2)][accumulate - 1 :]
    assert f"images: {', '.join(last)};" in message


def test_a_broken_weight_of_a_detector_is_named() -> None:
    model = build_model(make_retinanet_config()).train()
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    boxes = Instances((64, 64), gt_boxes=Boxes([[0, 0, 9, 9]]), gt_classes=torch.tensor([0]))
    message = run(model, [{"image": torch.rand(3, 64, 64), "instances": boxes}])
    assert name.rpartition(".")[0] in message
    assert "inputs finite, weights not finite" in message


def test_an_error_of_the_second_run_does_not_hide_the_failure() -> None:
    class Once(Explosive):
        def forward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
            if self.seen:
                raise RuntimeError("out of memory")
            return super().forward(batch)

    message = run(Once(0.9).train(), [{"image": torch.ones(10, 1)}])
    assert "loss_logarithm -inf" in message
    assert "RuntimeError: out of memory" in message
