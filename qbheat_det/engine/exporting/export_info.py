# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an exported file says of itself: which pixels it takes, and what its outputs mean."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from qbheat_det.core.errors import UserError

Task = Literal["detection", "classification", "features"]
METADATA_KEY = "qbheat_det"
"""The one entry of ONNX's ``metadata_props`` that holds all of it, as JSON."""
SPLIT_KEY = f"{METADATA_KEY}_split"
"""A second entry, of the parts of a split export: which encoder, and which sizes, as JSON."""
METADATA_FILE = f"{METADATA_KEY}.json"
"""The same, as an extra file inside TorchScript and torch.export archives."""
DETECTION_OUTPUTS = ("boxes", "scores", "labels", "counts")
_FORMAT = 1


@dataclass(frozen=True)
class ExportInfo:
    """Travels inside every exported file.

    Its input "images" is (N, H, W, 3), uint8, any N, H and W, channels in the order of
    ``pixel_format``; resize, normalisation and padding are inside. Outputs by ``task``:

    - "detection": "boxes" (N, R, 4), XYXY in pixels of the input image, "scores" (N, R) in [0, 1],
      falling, "labels" (N, R), from 0 on, and "counts" (N,): of the R rows of image n the first
      ``counts[n]`` are detections, the others are to be passed over;
    - "classification": "scores" (N, K), which sum to one;
    - "features": the backbone's maps (N, C, H', W') and tokens (N, M, D), by its own names.

    Attributes:
        task: what the outputs are.
        outputs: their names, in the file's order.
        pixel_format: "RGB" or "BGR".
        class_names: in the order of the labels; empty where nobody named them.
        category_ids: the annotation file's id of each label; empty where there was none.
        score_threshold: detections with this score or less were left out inside the file.
        model: name of the meta-architecture.
        config: the whole config, YAML.
        version: of the package that exported it.
        tolerance: the largest difference from PyTorch that the export would have let pass.
    """

    task: Task
    outputs: tuple[str, ...]
    pixel_format: str
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    score_threshold: float = 0.0
    model: str = ""
    config: str = ""
    version: str = ""
    tolerance: float = 0.0

    def to_json(self) -> str:
        """Returns what ``from_json`` reads."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str, where: str) -> "ExportInfo":
        """Reads what ``to_json`` gave, from a file that anyone may have written.

        Args:
            text: JSON; empty where the file has no such entry.
            where: what the sentence of an error calls the file.

        Raises:
            UserError: it is not of this package's exports, or of a later kind.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            kind = content.pop("format")
            if not isinstance(kind, int) or kind > _FORMAT:
                raise UserError(
                    f"'{where}' was exported by a later qbheat_det (its description is of kind "
                    f"{kind}, and {_FORMAT} is known here): update the package"
                )
            known = {field.name for field in dataclasses.fields(cls)}
            read = {key: _freeze(value) for key, value in content.items() if key in known}
            info = cls(**cast(Any, read))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise _refuse(where) from error
        if type(kind) is not int or not _is_sound(info):
            raise _refuse(where)
        return info


def _is_sound(info: ExportInfo) -> bool:
    """Whether every entry is of its type, which JSON leaves open."""
    lists = (info.outputs, info.class_names, info.category_ids)
    numbers = (info.score_threshold, info.tolerance)
    if not all(isinstance(one, tuple) for one in lists):
        return False
    outputs = {"detection": DETECTION_OUTPUTS, "classification": ("scores",)}
    return (
        info.task in get_args(Task)
        and info.outputs == outputs.get(info.task, info.outputs)
        and info.pixel_format in ("RGB", "BGR")
        and all(isinstance(name, str) for name in (*info.outputs, *info.class_names))
        and all(type(number) is int for number in info.category_ids)
        and all(isinstance(text, str) for text in (info.model, info.config, info.version))
        and all(type(number) in (int, float) for number in numbers)
    )


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse(where: str) -> UserError:
    return UserError(
        f"'{where}' does not say what its outputs are, as files of tools/export.py do: export the "
        "weights with it"
    )
