# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The boxes of an exported file, as NumPy arrays."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # an exported file runs without Detectron2
    from detectron2.structures import Instances


@dataclass(frozen=True)
class ArrayInstances:
    """The boxes in one image. The fields have the names of Detectron2's ``Instances``.

    Attributes:
        image_size: (H, W) of the image in pixels.
        pred_boxes: (N, 4), float32, XYXY in pixels of the image.
        scores: (N,), float32, in [0, 1].
        pred_classes: (N,), int64.
    """

    image_size: tuple[int, int]
    pred_boxes: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    pred_classes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, keep: npt.NDArray[np.bool_]) -> "ArrayInstances":
        """Returns the boxes for which ``keep`` (N,) is true."""
        return ArrayInstances(
            self.image_size, self.pred_boxes[keep], self.scores[keep], self.pred_classes[keep]
        )

    def to_instances(self) -> "Instances":
        """Returns Detectron2's ``Instances`` on the CPU, with tensors."""
        import torch
        from detectron2.structures import Boxes, Instances

        return Instances(
            self.image_size,
            pred_boxes=Boxes(torch.from_numpy(self.pred_boxes)),
            scores=torch.from_numpy(self.scores),
            pred_classes=torch.from_numpy(self.pred_classes),
        )

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """Returns what Detectron2's ``instances_to_coco_json`` returns: a dict per box."""
        sizes = self.pred_boxes[:, 2:] - self.pred_boxes[:, :2]
        boxes = np.concatenate([self.pred_boxes[:, :2], sizes], axis=1)  # XYWH
        results = []
        for box, score, k in zip(
            boxes.tolist(), self.scores.tolist(), self.pred_classes.tolist(), strict=True
        ):
            results.append({"image_id": image_id, "category_id": k, "bbox": box, "score": score})
        return results
