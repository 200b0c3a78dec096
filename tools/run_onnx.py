#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs exported ONNX files with onnxruntime and NumPy: no PyTorch, no Detectron2, no qbheat_det.

Pillow reads the images. Copy this one file to where a model will run, or take what you need from
it: everything but decoding the image is inside the exported file.

examples:
  # boxes, scores and class names of each image, one line of JSON per image
  python tools/run_onnx.py output/model.onnx photo.jpg other.jpg

  # a folder of qbheat export --shared-encoder: the encoder runs once, then every head
  python tools/run_onnx.py output/shared photo.jpg --threshold 0.5

exit code: 0; 1 if an image was skipped, with the reason on stderr; 2 if the model cannot be run.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime

OUTPUTS = {
    "detection": {"boxes", "scores", "labels", "counts"},
    "classification": {"scores"},
    "features": set(),
}
"""Outputs of a file by task; those of a backbone have their own names."""


class InputError(Exception):
    """A file or an image that cannot be used; the message names it and the reason."""


class OnnxModel:
    """An exported file, or a folder of an encoder and heads that share it.

    Attributes:
        description: of the file or of the encoder: "task", "pixel_format", "class_names" and more.
        heads: description of each head, by name; a single file is one head, named "".
    """

    def __init__(self, path: Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)) -> None:
        """
        Args:
            path: ``.onnx``, or a folder with ``encoder.onnx`` and ``head_NAME.onnx``.
            providers: of onnxruntime, the preferred one first.

        Raises:
            InputError: a file is missing, damaged, not an export, or of another encoder.
        """
        self._encoder: onnxruntime.InferenceSession | None = None
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self.heads: dict[str, dict[str, Any]] = {}
        if not path.is_dir():
            self._sessions[""], self.description, shared = open_file(path, providers)
            if shared:
                raise InputError(f"'{path}' is part of a shared-encoder export: name its folder")
            self.heads[""] = self.description
            return
        file = path / "encoder.onnx"
        self._encoder, self.description, shared = open_file(file, providers)
        if not shared:
            raise InputError(
                f"'{file}' is not part of a shared-encoder export: name another folder"
            )
        for file in sorted(path.glob("head_*.onnx")):
            session, description, own = open_file(file, providers)
            if own != shared:
                raise InputError(
                    f"'{file}' was exported with another encoder than the one beside it: export "
                    "both again in one call of qbheat export --shared-encoder"
                )
            name = file.stem[len("head_") :]
            self._sessions[name], self.heads[name] = session, description
        if not self.heads:
            raise InputError(f"'{path}' has no head_NAME.onnx beside its encoder.onnx")

    def __call__(self, images: "np.ndarray") -> "dict[str, dict[str, np.ndarray]]":
        """
        Args:
            images: (N, H, W, 3), uint8, channels in the order of ``description["pixel_format"]``.

        Returns:
            Of each head the file's outputs by name: of a detector "boxes" (N, R, 4), XYXY in
            pixels of the image, "scores" (N, R), "labels" (N, R) and "counts" (N,): the first
            ``counts[n]`` rows are detections; of a classifier "scores" (N, K).
        """
        size = self.description.get("image_size") or images.shape[1:3]
        if tuple(size) != images.shape[1:3]:
            raise InputError(f"the file takes images of {size[0]} x {size[1]} pixels alone")
        values = {"images": images}
        if self._encoder is not None:
            values = run(self._encoder, values)
        return {name: run(session, values) for name, session in self._sessions.items()}


def open_file(
    path: Path, providers: tuple[str, ...]
) -> "tuple[onnxruntime.InferenceSession, dict[str, Any], str]":
    """Opens an ONNX file.

    Returns:
        A session; the description of the file; and of a part of a shared-encoder export the hash
        of the encoder, else nothing.

    Raises:
        InputError: the file is missing, damaged or not an export.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=list(providers))
    except Exception as error:  # onnxruntime's errors have no common base
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"'{path}' cannot be opened (missing or truncated): {reason}") from error
    metadata = session.get_modelmeta().custom_metadata_map
    try:
        description = json.loads(metadata["qbheat_det"])
        is_valid = (
            OUTPUTS[description["task"]] <= {one.name for one in session.get_outputs()}
            and description["pixel_format"] in ("RGB", "BGR")
            and isinstance(description["class_names"], list)
        )
    except (ValueError, TypeError, KeyError):
        is_valid = False
    if not is_valid:
        raise InputError(f"'{path}' is not a file of qbheat export, or does not fit its metadata")
    return session, description, metadata.get("qbheat_det_shared_encoder", "")


def run(session: "onnxruntime.InferenceSession", values: "dict[str, np.ndarray]") -> dict[str, Any]:
    """Runs a session on the inputs it has among ``values``; returns its outputs by name."""
    inputs = {one.name: values[one.name] for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def read_image(path: Path, pixel_format: str) -> "np.ndarray":
    """Reads an image, upright as its EXIF orientation says: (1, H, W, 3).

    Raises:
        InputError: the file cannot be decoded.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            mode = image.mode
            pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise InputError(" ".join(str(error).split()) or type(error).__name__) from error
    if mode.startswith("I"):  # Pillow turns all above 255 into white
        raise InputError("16-bit greyscale: convert it to 8 bits first")
    return np.ascontiguousarray(pixels[None] if pixel_format == "RGB" else pixels[None, :, :, ::-1])


def summarize(
    outputs: "dict[str, np.ndarray]", description: dict[str, Any], threshold: float
) -> list[dict[str, Any]] | dict[str, list[int]]:
    """Returns the boxes of one image, or the five likeliest classes, or the sizes of the maps."""
    names = description["class_names"]

    def name(label: int) -> str:
        return names[label] if names else str(label)

    if description["task"] == "features":
        return {key: list(value.shape) for key, value in outputs.items()}
    scores = outputs["scores"][0]
    if description["task"] == "classification":
        best = (-scores).argsort(kind="stable")[:5]
        return [{"name": name(label), "score": float(scores[label])} for label in best]
    rows = zip(outputs["boxes"][0], scores, outputs["labels"][0], strict=True)
    return [
        {"name": name(int(label)), "score": float(score), "box": box.tolist()}
        for box, score, label in list(rows)[: int(outputs["counts"][0])]
        if score >= threshold
    ]


def main(argv: list[str] | None = None) -> int:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="exported .onnx, or folder of --shared-encoder")
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--threshold", type=float, default=0.3, help="default 0.3")
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
            name: summarize(outputs[name], description, args.threshold)
            for name, description in model.heads.items()
        }
        print(json.dumps({"image": str(path), "found": found.get("", found)}))
    return 1 if num_skipped else 0


if __name__ == "__main__":
    sys.exit(main())
