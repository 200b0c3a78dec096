# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pixel format and statistics of every job in this package, as in Base-MobileFormer.yaml."""

constants = {
    "pixel_mean": [123.675, 116.28, 103.53],
    "pixel_std": [58.395, 57.12, 57.375],
    "pixel_format": "RGB",
}
