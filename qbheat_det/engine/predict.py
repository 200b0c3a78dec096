# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction on images and videos with trained weights, by Detectron2's ``DefaultPredictor``."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import join_first
from qbheat_det.engine.media import (
    Image,
    MediaFile,
    UnreadableMedia,
    VideoReader,
    name_outputs,
    open_video,
    read_bgr,
    write_image,
)


def build_predictor(
    cfg: CfgNode, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> DefaultPredictor:
    """Returns Detectron2's predictor, its model holding exactly the tensors of the weights file.

    Args:
        cfg: as of ``load_run_config``.
        prepare: from the model with its weights to the one that predicts, such as its deployed
            form.

    Raises:
        UserError: the weights cannot be read, or do not fit the model of the config.
    """
    unloaded = cfg.clone()
    unloaded.defrost()
    unloaded.MODEL.WEIGHTS = ""
    unloaded.MODEL.DEPLOY.ENABLED = False  # the weights come first
    predictor = DefaultPredictor(unloaded)
    checkpointer = ExactCheckpointer(predictor.model, class_names=cfg.MODEL.CLASS_NAMES)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    if prepare is not None:
        predictor.model = prepare(predictor.model)
    return predictor


def get_category_id(cfg: CfgNode, class_index: int) -> int:
    """Returns the annotation file's id of a contiguous class, or ``class_index + 1`` if unknown.

    Raises:
        UserError: the config lists ids, but fewer than the model has classes.
    """
    ids = cfg.MODEL.CATEGORY_IDS
    if not ids:
        return class_index + 1
    if class_index >= len(ids):
        raise UserError(
            f"the model predicts class {class_index}, but MODEL.CATEGORY_IDS lists {len(ids)} ids"
        )
    return int(ids[class_index])


def read_image_ids(json_file: str, media: Sequence[MediaFile]) -> list[int]:
    """Looks up each file's image id in a COCO annotation file, by its path or else its own name.

    Raises:
        UserError: the file is not COCO's format, or does not know all of the images.
    """
    try:
        images = json.loads(Path(json_file).read_text(encoding="utf-8"))["images"]
        ids = {str(image["file_name"]): int(image["id"]) for image in images}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{json_file}' is not a COCO annotation file: {error!r}") from error
    by_name: dict[str, set[int]] = {}
    for file_name, image_id in ids.items():
        by_name.setdefault(Path(file_name).name, set()).add(image_id)
    found, unknown = [], []
    for file in media:
        same_name = by_name.get(file.path.name, set())
        if file.name in ids:
            found.append(ids[file.name])
        elif len(same_name) == 1 and not file.is_video:
            found.extend(same_name)
        else:
            unknown.append(file.name)
    if unknown:
        raise UserError(f"'{json_file}' has no single image for {join_first(map(repr, unknown))}")
    if len(set(found)) < len(found):
        raise UserError(f"{json_file}: two of the input files are the same image there")
    return found


@dataclass
class PredictionReport:
    """Counts of a run over files; ``skipped`` pairs a file's path with the reason."""

    num_images: int = 0
    num_frames: int = 0
    num_boxes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


class MediaPredictor:
    """Predicts on files, draws the boxes with ``draw``, and collects COCO-format results.

    ``results`` has, for each box, ``image_id``, ``file_name``, ``category_id``, ``bbox`` (XYWH,
    pixels of the upright input image) and ``score``; ``segmentation`` (RLE) where the model
    predicts masks; ``frame`` (from 0) in videos, where each frame has an image id of its own.
    """

    def __init__(
        self,
        predictor: Callable[[Image], Mapping[str, Instances]],
        *,
        cfg: CfgNode,
        score_threshold: float,
        output_dir: Path | None,
        draw: Callable[[Image, Instances], Image],
    ) -> None:
        """
        Args:
            predictor: a ``DefaultPredictor``, or another function from a (H, W, 3) BGR image,
                whatever ``cfg.INPUT.FORMAT`` is, to {"instances"}.
            cfg: ``MODEL.CATEGORY_IDS`` and ``INPUT.MAX_SIZE_TEST`` are read.
            score_threshold: boxes below it are neither drawn nor collected.
            output_dir: folder for the drawn images; nothing is drawn if None.
            draw: from a BGR image and its instances to the drawn image, also BGR.
        """
        self._predictor = predictor
        self._cfg = cfg
        self._score_threshold = score_threshold
        self._output_dir = output_dir
        self._draw = draw
        self._next_id = 1
        self.results: list[dict[str, Any]] = []
        self.report = PredictionReport()

    def run(self, media: Sequence[MediaFile], image_ids: Sequence[int] | None = None) -> None:
        """Predicts on every file; unreadable ones are listed in ``report`` and passed over.

        Args:
            media: as of ``find_media``.
            image_ids: an id for each file; None numbers images and frames from 1.
        """
        outputs = name_outputs(media)
        with tqdm(total=len(media), unit="file", desc="predicting") as bar:
            for index, (file, output) in enumerate(zip(media, outputs, strict=True)):
                try:
                    if file.is_video:
                        self._run_video(file, output)
                    else:
                        self._run_image(file, output, image_ids[index] if image_ids else None)
                except UnreadableMedia as error:
                    self.report.skipped.append((str(file.path), str(error)))
                bar.update()

    def _run_image(self, file: MediaFile, output: Path, image_id: int | None) -> None:
        image = read_bgr(file.path)
        short, long = sorted(image.shape[:2])
        if short * self._cfg.INPUT.MAX_SIZE_TEST < long:
            raise UnreadableMedia(f"{long} x {short} pixels is too elongated to be resized")
        instances = self._predict(image, image_id, {"file_name": file.name})
        self.report.num_images += 1
        if self._output_dir is not None:
            write_image(self._output_dir / output, self._draw(image, instances))

    def _run_video(self, file: MediaFile, output: Path) -> None:
        frames = VideoReader(file.path)
        bar = tqdm(frames, total=frames.num_frames, unit="frame", desc=file.name, leave=False)
        with contextlib.ExitStack() as stack:
            append = None
            if self._output_dir is not None:
                append = stack.enter_context(open_video(self._output_dir / output, frames.fps))
            for index, frame in enumerate(bar):
                instances = self._predict(frame, None, {"file_name": file.name, "frame": index})
                self.report.num_frames += 1
                if append is not None:
                    append(self._draw(frame, instances))

    def _predict(self, image: Image, image_id: int | None, origin: Mapping[str, Any]) -> Instances:
        """Returns the boxes above the threshold, after collecting them as results."""
        instances = self._predictor(image)["instances"].to("cpu")
        instances = instances[instances.scores >= self._score_threshold]
        if image_id is None:
            image_id, self._next_id = self._next_id, self._next_id + 1
        for found in instances_to_coco_json(instances, image_id):
            found["category_id"] = get_category_id(self._cfg, found["category_id"])
            self.results.append({"image_id": image_id, **origin, **found})
        self.report.num_boxes += len(instances)
        return instances


def write_json(path: Path, content: object) -> None:
    """Writes JSON, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(content).encode()
    write_atomically(path, lambda stream: stream.write(text))
