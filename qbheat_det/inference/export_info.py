# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The description inside an exported file: which images it takes, and which outputs it gives."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record

Task = Literal["detection", "classification", "features"]
METADATA_KEY = "qbheat_det"
"""The entry of ONNX's ``metadata_props`` that holds the description, as JSON."""
SHARED_ENCODER_KEY = f"{METADATA_KEY}_shared_encoder"
"""A second entry in the files of a shared-encoder export: the hash of the encoder."""
TASK_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "detection": ("boxes", "scores", "labels", "counts"),
    "classification": ("scores",),
}
"""Names of the outputs by task; those of "features" are the backbone's."""
_FORMAT = 1


@dataclass(frozen=True)
class ExportInfo:
    """The description of an exported file.

    The input "images" is (N, H, W, 3), uint8, any N, H and W, or with an ``image_size`` one image
    of it, channels in the order of ``pixel_format``; resize, normalisation and padding are inside.
    Outputs by ``task``:

    - "detection": "boxes" (N, R, 4), XYXY in pixels of the input image, "scores" (N, R) in [0, 1],
      in descending order, "labels" (N, R), from 0, and "counts" (N,): of the R rows of image n the
      first ``counts[n]`` are detections, the others are empty;
    - "classification": "scores" (N, K), which sum to one;
    - "features": the backbone's maps (N, C, H', W') and tokens (N, M, D), by its own names.
    """

    task: Task
    outputs: tuple[str, ...]  # their names, in the file's order
    pixel_format: Literal["RGB", "BGR"]
    class_names: tuple[str, ...] = ()  # in the order of the labels; empty if unknown
    category_ids: tuple[int, ...] = ()  # the annotation file's id of each label
    image_size: tuple[int, ...] = ()  # (H, W) of all images, one at a time; empty if any size
    score_threshold: float = 0.0  # detections with this score or less are left out in the file
    model: str = ""  # name of the meta-architecture
    config: str = ""  # the whole config, YAML
    version: str = ""  # of the package that exported it

    def to_json(self) -> str:
        """Returns what ``from_json`` reads."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str, where: str) -> "ExportInfo":
        """Reads a description from ``where``, an untrusted file, or raises a ``UserError``."""
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
                raise ValueError
            info: ExportInfo = parse_record(cls, content, f"'{where}'")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"'{where}' has no valid description of its outputs: export the weights again"
            ) from error
        if info.outputs != TASK_OUTPUTS.get(info.task, info.outputs):
            raise UserError(f"'{where}' does not have the outputs of its task: export it again")
        return info
