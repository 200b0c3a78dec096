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
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


class OnnxModel:
    """An exported file, or a folder of an encoder and heads that share its pass.

    Attributes:
        heads: what each says of itself, by name; a whole file is one head, called "".
    """

    def __init__(self, path: Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)) -> None:
        """
        Args:
            path: ``.onnx``, or a folder with ``encoder.onnx`` and ``head_NAME.onnx``.
            providers: of onnxruntime, the first one preferred.
        """
        files = {"": path}
        if path.is_dir():
            files = {file.stem[len("head_") :]: file for file in sorted(path.glob("head_*.onnx"))}
        load = {"providers": list(providers)}
        self._heads = {n: onnxruntime.InferenceSession(str(f), **load) for n, f in files.items()}
        self.heads = {name: read_description(head) for name, head in self._heads.items()}
        self._encoder = None
        if path.is_dir():
            self._encoder = onnxruntime.InferenceSession(str(path / "encoder.onnx"), **load)
            self.description = read_description(self._encoder)
        else:
            self.description = self.heads[""]

    def __call__(self, images: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """
        Args:
            images: (N, H, W, 3), uint8, channels in the order of ``description["pixel_format"]``.

        Returns:
            Of each head the file's outputs by name: of a detector "boxes" (N, R, 4), XYXY in
            pixels of the image, "scores" (N, R), "labels" (N, R) and "counts" (N,), of which the
            first ``counts[n]`` rows hold; of a classifier "scores" (N, K).
        """
        given = {"images": images}
        if self._encoder is not None:
            given = run(self._encoder, given)
            check_padding(given["sizes"], self.description)
        return {name: run(head, given) for name, head in self._heads.items()}


def run(session: onnxruntime.InferenceSession, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Feeds a session what it takes of ``given``; returns its outputs by name."""
    taken = {one.name: given[one.name] for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, taken), strict=True))


def read_description(session: onnxruntime.InferenceSession) -> dict[str, Any]:
    """Returns what a file says of itself: "task", "class_names", "pixel_format" and more."""
    return json.loads(session.get_modelmeta().custom_metadata_map["qbheat_det"])


def check_padding(sizes: np.ndarray, description: dict[str, Any]) -> None:
    """Refuses an image on which heads that share a pass would not give what they give alone."""
    if description.get("exact_sizes_only") and (sizes[1] != sizes[2]).any():
        raise ValueError(
            f"these heads share a pass only where the resized image, here {sizes[1].tolist()}, "
            f"needs no padding, here to {sizes[2].tolist()}"
        )


def read_image(path: Path, pixel_format: str) -> np.ndarray:
    """Reads an image upright, as its EXIF orientation says: (1, H, W, 3)."""
    with Image.open(path) as image:
        pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
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


def main() -> int:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="exported .onnx, or folder of --split")
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--score-threshold", type=float, default=0.3, help="default 0.3")
    args = parser.parse_args()
    model = OnnxModel(args.model)
    for path in args.images:
        outputs = model(read_image(path, model.description["pixel_format"]))
        found = {
            name: summarize(outputs[name], description, args.score_threshold)
            for name, description in model.heads.items()
        }
        print(json.dumps({"image": str(path), "found": found.get("", found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
