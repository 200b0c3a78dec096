# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images per second and core that pre-training reads, beside torchvision's pipeline.

Example:
    python benchmarks/image_loading.py --image-folder photographs/ --sizes 256 128

Processor time of one thread is what counts, so other work on the machine disturbs little. The
best of three passes over up to ``--images`` files, after one pass that brings them into the page
cache. On a Xeon at 2.5 GHz, with Pillow 13.0, torch 2.15 and torchvision 0.29:

    photographs (JPEG)         S    from files  reduced decoding off  from memory  torchvision
    COCO, 512 x 363 pixels    256          442                   441        1,273          341
                              128          571                   475        2,081          411
    Caltech-101, 300 x 240    256          843                   794        1,626          641
                              128        1,112                 1,123        3,005        1,017
    enlarged, 3072 x 2304     256           50                    11          888           10
                              128           62                    11        2,311           10
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from qbheat_det.core.errors import exit_on_user_error
from qbheat_det.data import PretrainingMapper, images, list_images

PASSES = 3


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image-folder", required=True, metavar="DIR")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 128], help="pixels a side")
    parser.add_argument("--images", type=int, default=400, help="how many files are read")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    paths = list_images(args.image_folder)
    print(f"{len(paths):,} files listed in {time.perf_counter() - began:.2f} s")
    order = np.random.default_rng(0).permutation(len(paths))[: args.images]
    paths = [paths[i] for i in order]
    print("| S | from files | without reduced decoding | from memory | torchvision |")
    print("|---|---|---|---|---|")
    for size in args.sizes:
        figures = (
            measure(make_reader(size), paths),
            measure_whole_decoding(size, paths),
            measure(make_reader(size, paths), paths),
            measure(make_torchvision_reader(size), paths),
        )
        print(f"| {size} | " + " | ".join(f"{figure:,.0f}" for figure in figures) + " |")


def make_reader(size: int, kept: list[str] | None = None) -> Callable[[str], object]:
    """Returns the mapper of pre-training; the images in ``kept`` stay in memory."""
    mapper = PretrainingMapper(size=size, memory_gb=64)
    mapper.prepare([{"file_name": path} for path in kept or ()])
    return lambda path: mapper({"file_name": path})


def make_torchvision_reader(size: int) -> Callable[[str], object]:
    """Returns what ``ImageFolder`` with the usual transforms does, up to bytes in a tensor."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )

    def read(path: str) -> object:
        with open(path, "rb") as file:
            return transform(Image.open(file).convert("RGB"))

    return read


def measure_whole_decoding(size: int, paths: list[str]) -> float:
    """As ``measure``, with every JPEG decoded at full size."""
    reductions = images._REDUCTIONS
    images._REDUCTIONS = ()
    try:
        return measure(make_reader(size), paths)
    finally:
        images._REDUCTIONS = reductions


def measure(read: Callable[[str], object], paths: list[str]) -> float:
    """Returns images per second of one core."""
    seconds = []
    for _ in range(PASSES + 1):
        torch.manual_seed(0)
        began = time.process_time()
        for path in paths:
            read(path)
        seconds.append(time.process_time() - began)
    return len(paths) / min(seconds[1:])


if __name__ == "__main__":
    main()
