#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs exported ONNX files with onnxruntime and NumPy: no PyTorch, no Detectron2, no qbheat_det.

Pillow reads the images. Copy this one file to where a model is to run, or take from it what
you need: everything but decoding the image is inside the exported file.

examples:
  # boxes, scores and class names of each image, one line of JSON an image
  python tools/run_onnx.py output/model.onnx photo.jpg other.jpg

  # a folder of tools/export.py --split: the encoder runs once, and every head on what it gives
  python tools/run_onnx.py output/split photo.jpg --score-threshold 0.5

exit code: 0; 1 if an image was skipped, which stderr says why; 2 if the model cannot be run.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

OUTPUTS = {
    "detection": {"boxes", "scores", "labels", "counts"},
    "classification": {"scores"},
    "features": set(),
}
"""What a file of each task gives; a backbone's outputs have names of its own."""


class InputError(Exception):
    """A file or an image that cannot be used; the message says why and what to do."""


class OnnxModel:
    """An exported file, or a folder of an encoder and heads that share its pass.

    Attributes:
        description: what the file says of itself, or the encoder: "task", "pixel_format" and more.
        heads: what each head says of itself, by name; a whole file is one head, called "".
        multiple_of: where not 0, the heads share a pass only on images whose resized height and
            width are multiples of this.
    """

    def __init__(self, path: Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)) -> None:
        """
        Args:
            path: ``.onnx``, or a folder with ``encoder.onnx`` and ``head_NAME.onnx``.
            providers: of onnxruntime, the first one preferred.

        Raises:
            InputError: a file is missing, damaged, of other origin or of another encoder.
        """
        self._encoder: onnxruntime.InferenceSession | None = None
        self._heads: dict[str, onnxruntime.InferenceSession] = {}
        self.heads: dict[str, dict[str, Any]] = {}
        self.multiple_of = 0
        if not path.is_dir():
            self._heads[""] = open_session(path, providers)
            if read_split(self._heads[""], path):
                raise InputError(f"'{path}' is one part of a split export: name its folder")
            self.heads[""] = self.description = read_description(self._heads[""], path)
            return
        file = path / "encoder.onnx"
        self._encoder = open_session(file, providers)
        self.description = read_description(self._encoder, file)
        split = read_split(self._encoder, file)
        if split is None:
            raise InputError(f"'{file}' is no part of a split export: name another folder")
        self.multiple_of = split[1]
        for file in sorted(path.glob("head_*.onnx")):
            head = open_session(file, providers)
            if read_split(head, file) != split:
                raise InputError(
                    f"'{file}' was not exported with the encoder beside it: export both again in "
                    "one call of tools/export.py --split"
                )
            name = file.stem[len("head_") :]
            self._heads[name], self.heads[name] = head, read_description(head, file)
        if not self.heads:
            raise InputError(f"'{path}' has no head_NAME.onnx beside its encoder.onnx")

    def __call__(self, images: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """
        Args:
            images: (N, H, W, 3), uint8, channels in the order of ``description["pixel_format"]``.

        Returns:
            Of each head the file's outputs by name: of a detector "boxes" (N, R, 4), XYXY in
            pixels of the image, "scores" (N, R), "labels" (N, R) and "counts" (N,), of which the
            first ``counts[n]`` rows hold; of a classifier "scores" (N, K).

        Raises:
            InputError: the heads share a pass only on images of some sizes, and these are others.
        """
        given = {"images": images}
        if self._encoder is not None:
            given = run(self._encoder, given)
            check_sizes(given["sizes"], self.multiple_of)
        return {name: run(head, given) for name, head in self._heads.items()}


def open_session(path: Path, providers: tuple[str, ...]) -> onnxruntime.InferenceSession:
    """Opens an ONNX file.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if not path.is_file():
        raise InputError(f"'{path}' does not exist: name a file or a folder of tools/export.py")
    try:
        return onnxruntime.InferenceSession(str(path), providers=list(providers))
    except Exception as error:  # onnxruntime's errors share no base of their own
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"'{path}' cannot be opened; it may be truncated: {reason}") from error


def run(session: onnxruntime.InferenceSession, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Feeds a session what it takes of ``given``; returns its outputs by name."""
    taken = {one.name: given[one.name] for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, taken), strict=True))


def read_description(session: onnxruntime.InferenceSession, path: Path) -> dict[str, Any]:
    """Returns what a file says of itself: "task", "class_names", "pixel_format" and more.

    Raises:
        InputError: it says nothing, or gives something else.
    """
    given = {one.name for one in session.get_outputs()}
    try:
        description = json.loads(session.get_modelmeta().custom_metadata_map["qbheat_det"])
        is_sound = (
            OUTPUTS[description["task"]] <= given
            and description["pixel_format"] in ("RGB", "BGR")
            and isinstance(description["class_names"], list)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"'{path}' is no file of tools/export.py") from error
    if not is_sound:
        raise InputError(f"'{path}' does not give what it says of itself: export it again")
    return description


def read_split(session: onnxruntime.InferenceSession, path: Path) -> tuple[str, int] | None:
    """Returns the hash of the encoder that a part of a split export goes with, and the number of
    which the heads take multiples as sizes; None of a whole file.

    Raises:
        InputError: the file says something else.
    """
    text = session.get_modelmeta().custom_metadata_map.get("qbheat_det_split")
    try:
        split = {} if text is None else json.loads(text)
        return None if text is None else (str(split["encoder"]), int(split["multiple_of"]))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"'{path}' is no file of tools/export.py") from error


def check_sizes(sizes: np.ndarray, multiple_of: int) -> None:
    """Refuses images on which heads that share a pass would not give what they give alone.

    Args:
        sizes: (4,), the encoder's: height and width before and after the resize.
        multiple_of: see ``OnnxModel``.

    Raises:
        InputError: height or width after the resize is no multiple.
    """
    height, width = sizes[2:].tolist()
    if multiple_of and (height % multiple_of or width % multiple_of):
        raise InputError(
            "these heads pad images differently, and share a pass only where height and width "
            f"after the resize, here {height} and {width}, are multiples of {multiple_of}: cut "
            "the image so, or export each head on its own"
        )


def read_image(path: Path, pixel_format: str) -> np.ndarray:
    """Reads an image upright, as its EXIF orientation says: (1, H, W, 3).

    Raises:
        InputError: the file cannot be decoded.
    """
    try:
        with Image.open(path) as image:
            mode = image.mode
            pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise InputError(" ".join(str(error).split()) or type(error).__name__) from error
    if mode.startswith("I"):  # Pillow turns all above 255 into white
        raise InputError("16 bits of grey: convert it to 8 first")
    return np.ascontiguousarray(pixels[None] if pixel_format == "RGB" else pixels[None, :, :, ::-1])


def summarize(
    outputs: dict[str, np.ndarray], description: dict[str, Any], threshold: float
) -> list[dict[str, Any]] | dict[str, list[int]]:
    """Returns what was found on one image: boxes, or the five likeliest classes, or map sizes."""
    names = description["class_names"]

    def name(label: int) -> str:
        return names[label] if names else str(label)

    if description["task"] == "features":
        return {key: list(value.shape) for key, value in outputs.items()}
    scores = outputs["scores"][0]
    if description["task"] == "classification":
        best = np.argsort(-scores, kind="stable")[:5]
        return [{"name": name(label), "score": float(scores[label])} for label in best]
    return [
        {"name": name(int(label)), "score": float(score), "box": box.tolist()}
        for box, score, label in list(
            zip(outputs["boxes"][0], scores, outputs["labels"][0], strict=True)
        )[: int(outputs["counts"][0])]
        if score >= threshold
    ]


def main(argv: list[str] | None = None) -> int:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="exported .onnx, or folder of --split")
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--score-threshold", type=float, default=0.3, help="default 0.3")
    args = parser.parse_args(argv)
    try:
        model = OnnxModel(args.model)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    num_skipped = 0
    for path in args.images:
        try:
            outputs = model(read_image(path, model.description["pixel_format"]))
        except InputError as error:
            print(f"skipped {path}: {error}", file=sys.stderr)
            num_skipped += 1
            continue
        found = {
            name: summarize(outputs[name], description, args.score_threshold)
            for name, description in model.heads.items()
        }
        print(json.dumps({"image": str(path), "found": found.get("", found)}))
    return 1 if num_skipped else 0


if __name__ == "__main__":
    sys.exit(main())
