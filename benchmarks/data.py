# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images per second of one core, from JPEG files to a batch, beside torchvision and simplejpeg.

Files have 640 x 480 pixels, and about the size of photographs. Ours are the data streams of recipes
with their mappers. The peers decode with torchvision or (if installed) simplejpeg, and use the same
transforms of torchvision: a random resized crop to 256 pixels and a flip for pre-training, a random
shorter side and a flip of image and boxes for detection.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import Tensor
from torchvision import io, tv_tensors
from torchvision.transforms import v2

from benchmarks.cached_cases import Case, make_config
from benchmarks.timing import PairedResult, Result, seconds_in_rounds, set_threads
from qbheat_det.engine import Trainer

_FILES: dict[str, Any] = {"size": (256, 256), "file_size": (480, 640)}
CASES = {
    "": Case(
        "pre-training at 256 pixels", "ImageNet-QBHeat/qb_heat_285M_400ep.yaml", batch=32, **_FILES
    ),
    "_boxes": Case("detection", "coco/retinanet_285M_finetune.yaml", batch=32, **_FILES),
}


def run(*, quick: bool, threads: int = 1, rounds: int = 7) -> list[Result]:
    """Measures each mapper in turns with its peers."""
    set_threads(1)
    rows: list[Result] = []
    names = list(CASES)
    if quick:
        names = names[:1]
        rounds = 1
    for end in names:
        case = CASES[end]
        with tempfile.TemporaryDirectory() as folder:
            cfg = make_config(case, Path(folder), num_images=2 * case.batch)
            cfg.INPUT.FIXED_VIEWS.COUNT = 0  # views are drawn anew, as by the peers
            decoders = {"torchvision": decode_with_torchvision}
            if find_spec("simplejpeg"):
                decoders["simplejpeg"] = decode_with_simplejpeg
            calls: dict[str, Callable[[], Any]] = {
                name: partial(next, iterate_as_peer(cfg, case, decode))
                for name, decode in decoders.items()
            }
            calls["ours"] = partial(next, iterate_as_ours(cfg, case))
            taken = seconds_in_rounds(calls, rounds=rounds, clock=time.process_time)
        rates = {name: [case.batch / s for s in seconds] for name, seconds in taken.items()}
        print(f"  {case.title}: {', '.join(f'{k} {max(v):.0f} img/s' for k, v in rates.items())}")
        rows += [
            PairedResult.higher_is_better(
                f"data/jpeg_to_batch{end}_vs_{name}", rates["ours"], rates[name], "img/s"
            )
            for name in decoders
        ]
    return rows


def iterate_as_ours(cfg: CfgNode, case: Case) -> Iterator[Any]:
    """Yields batches of the package's data stream."""
    for entries in Trainer.build_train_loader(cfg):
        yield gather([entry["image"] for entry in entries], case)


def iterate_as_peer(cfg: CfgNode, case: Case, decode: Callable[[str], Tensor]) -> Iterator[Any]:
    """Yields batches that torchvision's transforms make of the same files."""
    keys = cfg.INPUT.PRETRAIN
    place: Any = v2.RandomResizedCrop(keys.SIZE, scale=keys.SCALE)
    if case.has_boxes:
        place = v2.RandomShortestSize(list(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN)
    transform = v2.Compose([place, v2.RandomHorizontalFlip()])
    records = itertools.cycle(DatasetCatalog.get(cfg.DATASETS.TRAIN[0]))
    while True:
        images = []
        for record in itertools.islice(records, case.batch):
            image: Any = tv_tensors.Image(decode(record["file_name"]))
            if case.has_boxes:
                boxes = [each["bbox"] for each in record["annotations"]]
                placed = {"format": "XYWH", "canvas_size": image.shape[1:]}
                image, _ = transform(image, tv_tensors.BoundingBoxes(boxes, **placed))
            else:
                image = transform(image)
            images.append(image)
        yield gather(images, case)


def gather(images: list[Tensor], case: Case) -> Any:
    """Stacks images, unless they have boxes and therefore different sizes."""
    if case.has_boxes:
        return images
    return torch.stack(images)


def decode_with_torchvision(path: str) -> Tensor:
    """Decodes a JPEG file to RGB (3, H, W)."""
    return io.decode_image(path, io.ImageReadMode.RGB)


def decode_with_simplejpeg(path: str) -> Tensor:
    """Decodes a JPEG file to RGB (3, H, W)."""
    import simplejpeg

    return torch.from_numpy(simplejpeg.decode_jpeg(Path(path).read_bytes())).permute(2, 0, 1)
