# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small picture files for tests of reading."""

import io
import re

import cv2
import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def draw(width, height, seed=0):
    """Returns (height, width, 3): waves of all directions and lengths from 12 pixels, and grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    picture = np.full((height, width, 3), 128.0)
    for length in (12, 20, 40, 90, 200):
        for channel in range(3):
            angle, phase = rng.uniform(0, 2 * np.pi, 2)
            wave = np.cos(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / length + phase)
            picture[..., channel] += 18 * wave
    picture += rng.normal(0, 3, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)


def save(path, pixels, *, mode="RGB", **options):
    """Writes pixels as a file of the ending's format; ``orientation`` becomes EXIF's tag."""
    orientation = options.pop("orientation", None)
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    elif mode != image.mode:
        image = image.convert(mode)
    image.save(path, **options)
    return str(path)


def save_video(path, frames):
    """Writes frames (H, W, 3) of one size, ten a second."""
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (width, height))
    for frame in frames:
        writer.write(frame[:, :, ::-1].copy())
    writer.release()
    return path


def make_jpeg_of_scans(count, size=(5000, 4000)):
    """Returns a small JPEG of 20 megapixels with ``count`` scans, which is slow to decode."""
    stream = io.BytesIO()
    Image.new("L", size).save(stream, "JPEG", progressive=True)
    content = stream.getvalue()
    starts = [found.start() for found in re.finditer(b"\xff\xda", content)]
    last = content[starts[-1] : -2]
    return content[: starts[-1]] + last * (count - len(starts) + 1) + b"\xff\xd9"
