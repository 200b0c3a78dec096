# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The description inside every exported file: which images it takes, what its outputs mean."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qbheat_det.core.errors import UserError

Task = Literal["detection", "classification", "features"]
METADATA_KEY = "qbheat_det"
"""The entry of ONNX's ``metadata_props`` that holds the description, as JSON."""
METADATA_FILE = f"{METADATA_KEY}.json"
"""The same, as an extra file inside torch.export archives."""
SHARED_ENCODER_KEY = f"{METADATA_KEY}_shared_encoder"
"""A second entry in the files of a shared-encoder export, see ``shared_encoder.py``."""
TASK_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "detection": ("boxes", "scores", "labels", "counts"),
    "classification": ("scores",),
}
"""Names of the outputs by task; those of "features" are the backbone's."""
_FORMAT = 1


@dataclass(frozen=True)
class ExportInfo:
    """The description of an exported file.

    The input "images" is (N, H, W, 3), uint8, any N, H and W, channels in the order of
    ``pixel_format``; resize, normalisation and padding are inside. Outputs by ``task``:

    - "detection": "boxes" (N, R, 4), XYXY in pixels of the input image, "scores" (N, R) in [0, 1],
      in descending order, "labels" (N, R), from 0, and "counts" (N,): of the R rows of image n the
      first ``counts[n]`` are detections, the others are empty;
    - "classification": "scores" (N, K), which sum to one;
    - "features": the backbone's maps (N, C, H', W') and tokens (N, M, D), by its own names.
    """

    task: Task
    outputs: tuple[str, ...]  # their names, in the file's order
    pixel_format: str  # "RGB" or "BGR"
    class_names: tuple[str, ...] = ()  # in the order of the labels; empty if unknown
    category_ids: tuple[int, ...] = ()  # the annotation file's id of each label
    score_threshold: float = 0.0  # detections with this score or less are left out in the file
    model: str = ""  # name of the meta-architecture
    config: str = ""  # the whole config, YAML
    version: str = ""  # of the package that exported it

    def to_json(self) -> str:
        """Returns what ``from_json`` reads."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str, where: str) -> "ExportInfo":
        """Reads a description from ``where``, a file that anyone may have written.

        Raises:
            UserError: it is not a description of this version's exports.
        """
        try:
            content: Any = json.loads(text)
            is_known = type(content["format"]) is int and content.pop("format") == _FORMAT
            lists = {key: tuple(v) for key, v in content.items() if isinstance(v, list)}
            info = cls(**(content | lists))
            is_known = is_known and info._is_valid()
        except (ValueError, TypeError, AttributeError, KeyError):
            is_known = False
        if not is_known:
            raise UserError(
                f"'{where}' has no valid description of its outputs: export the weights again"
            )
        return info

    def _is_valid(self) -> bool:
        """Returns whether every value has its type, which JSON does not ensure."""
        names = (*self.outputs, *self.class_names)
        return (
            self.task in get_args(Task)
            and self.outputs == TASK_OUTPUTS.get(self.task, self.outputs)
            and self.pixel_format in ("RGB", "BGR")
            and isinstance(self.class_names, tuple)
            and all(isinstance(x, str) for x in (*names, self.model, self.config, self.version))
            and all(type(number) is int for number in self.category_ids)
            and type(self.score_threshold) in (int, float)
        )
