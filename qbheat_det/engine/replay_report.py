# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the replay of a failed step found, and how it is printed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .failure import FailedStep

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ImageReport:
    """One image of the failed batch.

    Attributes:
        name: file and id.
        size: (height, width) in pixels, as the model gets it.
        num_boxes: of its ground truth.
        faults: what is wrong with the image or its ground truth.
        losses: of the image alone, in training mode; empty where it was not run.
        error: what running it alone raised, or "".
    """

    name: str
    size: tuple[int, int]
    num_boxes: int
    faults: tuple[str, ...] = ()
    losses: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass
class ReplayReport:
    """What running a failed step again showed; ``str`` of it is for people.

    Attributes:
        path: the file.
        failed: its content.
        device: where it was run again.
        losses: of the last micro-batch, weighted as in training.
        error: what the forward or backward pass raised, or "".
        first_module: name and class of the first module whose output is not finite; None where
            there is none.
        first_module_values: how many of its output's values are not finite, and of how many.
        first_module_has_finite_inputs: whether its arguments are finite.
        first_module_has_finite_weights: whether its parameters are.
        bad_weights: parameters that are not finite, from before the step.
        bad_buffers: buffers that are not finite, from after the failing forward pass.
        bad_last_gradients: parameters whose gradients were not finite in the file.
        bad_gradients: parameters whose gradients are not finite after this run.
        images: one an image, in the batch's order.
    """

    path: str
    failed: FailedStep
    device: str
    losses: dict[str, float] = field(default_factory=dict)
    error: str = ""
    first_module: str | None = None
    first_module_values: tuple[int, int] = (0, 0)
    first_module_has_finite_inputs: bool = True
    first_module_has_finite_weights: bool = True
    bad_weights: list[str] = field(default_factory=list)
    bad_buffers: list[str] = field(default_factory=list)
    bad_last_gradients: list[str] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    images: list[ImageReport] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether the losses are those of training, to float32 rounding."""
        before = self.failed.losses
        return before.keys() == self.losses.keys() and all(
            math.isclose(value, before[name], rel_tol=1e-5)
            or (math.isnan(value) and math.isnan(before[name]))
            for name, value in self.losses.items()
        )

    def __str__(self) -> str:
        failed = self.failed
        lines = [
            f"{self.path}: step {failed.iteration}, process {failed.rank} of "
            f"{failed.num_processes}, seed {failed.seed}; failed on {failed.device}, run again on "
            f"{self.device}",
            "",
            *self._list_losses(),
            "",
            *self._list_findings(),
            "",
            *_list_images(self.images),
        ]
        return "\n".join(lines)

    def _list_losses(self) -> list[str]:
        names = [*self.failed.losses, *(self.losses.keys() - self.failed.losses.keys())]
        width = max([4, *map(len, names)])
        rows = [f"{'loss':<{width}}  {'training':>11}  {'replay':>11}"]
        for name in names:
            values = (found.get(name) for found in (self.failed.losses, self.losses))
            cells = ("-" if value is None else f"{value:.5g}" for value in values)
            rows.append(f"{name:<{width}}  " + "  ".join(f"{cell:>11}" for cell in cells))
        if not self.is_same:
            rows.append(
                "The losses differ from those of training: another device, library or processes "
                "that took part (BatchNorm, normalisation, images of theirs that MoCo shuffles or "
                "the Wasserstein dependency compares with) can be why."
            )
        return rows

    def _list_findings(self) -> list[str]:
        rows = [f"The step raised {self.error}"] if self.error else []
        if self.first_module is None:
            rows.append("Every module's output is finite.")
        else:
            bad, total = self.first_module_values
            inputs = "finite" if self.first_module_has_finite_inputs else "not finite"
            weights = "finite" if self.first_module_has_finite_weights else "not finite"
            rows.append(
                f"First output that is not finite: {self.first_module}, {bad:,} of {total:,} "
                f"values; its inputs are {inputs}, its weights {weights}."
            )
        return [
            *rows,
            f"Weights before the step:       {_shorten(self.bad_weights)}",
            f"Statistics after it (buffers): {_shorten(self.bad_buffers)}",
            f"Last gradients in the file:    {_shorten(self.bad_last_gradients)}",
            f"Gradients of this replay:      {_shorten(self.bad_gradients)}",
        ]


def describe_image(entry: dict[str, Any]) -> ImageReport:
    """Looks at one entry of a batch without running anything."""
    image = entry.get("image")
    if not isinstance(image, Tensor):
        image = torch.empty(3, 0, 0)
    height, width = (int(length) for length in image.shape[-2:])
    faults = [] if image.numel() else ["no pixels"]
    if not torch.isfinite(image.float()).all():
        faults.append("pixels that are not finite")
    instances = entry.get("instances")
    boxes = getattr(getattr(instances, "gt_boxes", None), "tensor", None)
    if boxes is not None and boxes.shape[-1] == 4:
        sides = boxes[:, 2:] - boxes[:, :2]
        if not torch.isfinite(boxes).all():
            faults.append("a box that is not finite")
        if (sides <= 0).any():
            faults.append("a box without area")
        if (boxes[:, :2] < -1).any() or (
            boxes[:, 2:] > boxes.new_tensor([width, height]) + 1
        ).any():
            faults.append("a box beyond the image")
    identity = f" (id {entry['image_id']})" if "image_id" in entry else ""
    return ImageReport(
        name=f"{entry.get('file_name', 'an image without a file name')}{identity}",
        size=(height, width),
        num_boxes=0 if instances is None else len(instances),
        faults=tuple(faults),
    )


def _list_images(images: Sequence[ImageReport]) -> list[str]:
    rows = ["Images of this process, and the loss of each alone:"]
    for image in images:
        count = f"{image.num_boxes} box{'' if image.num_boxes == 1 else 'es'}"
        row = f"  {image.name}  {image.size[1]} x {image.size[0]}, {count}"
        if image.losses:
            row += f", loss {sum(image.losses.values()):.5g}"
        row += f", raised {image.error}" if image.error else ""
        rows.append(row + "".join(f"; {fault}" for fault in image.faults))
    return rows


def _shorten(names: Sequence[str]) -> str:
    if not names:
        return "all finite"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"not finite in {', '.join(names[:_NAMES_SHOWN])}{more}"
