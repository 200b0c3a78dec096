# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an encoder costs in a step of training, counted while one is made."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.analysis import CountingRule, count_madds
from qbheat_det.core.errors import UserError
from qbheat_det.data import DataError, build_mapper
from qbheat_det.modeling.contracts import get_backbone

from ..trainer import Trainer

Sizes = Counter[tuple[int, int]]


def count_encoder_madds(backbone: Backbone, height: int, width: int) -> int:
    """Returns the multiply-adds of one image, see ``CountingRule.CORE``."""
    parameter = next(backbone.parameters())
    image = torch.zeros(1, 3, height, width, device=parameter.device)
    return count_madds(backbone, image).total(CountingRule.CORE)


def count_training_madds(cfg: CfgNode, records: Sequence[dict[str, Any]]) -> float:
    """Returns the multiply-adds of all encoders in the forward pass of training, for an image.

    A batch of the config's size goes through its model, and what each encoder is called with is
    counted: quarters as quarters, two views as two, a momentum encoder as another.

    Args:
        cfg: of the objective; the model is built and thrown away.
        records: images of training, labelled where the objective needs it.

    Raises:
        UserError: the model has no encoder, or no image can be read.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    batch = _draw_batch(cfg, records)
    model = Trainer.build_model(cfg).train()
    backbone = get_backbone(model)
    if backbone is None:
        raise UserError(f"{cfg.MODEL.META_ARCHITECTURE} has no encoder named 'backbone' to count")
    with EventStorage(0), _counted_calls(model, type(backbone)) as sizes:
        model(batch)
    per_size = {size: count_encoder_madds(backbone, *size) for size in sizes}
    return sum(per_size[size] * number for size, number in sizes.items()) / len(batch)


def time_step(cfg: CfgNode, records: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds of a step of training but for its optimizer, the second of two.

    Args:
        cfg: of the objective; the model is built and thrown away.
        records: as for ``count_training_madds``.

    Raises:
        UserError: no model can be built, or no image can be read.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = cfg.MODEL.DEVICE if torch.cuda.is_available() else "cpu"
    model = Trainer.build_model(cfg).train()
    seconds = 0.0
    for _ in range(2):  # the first one finds memory and plans
        begin = time.perf_counter()
        batch = _draw_batch(cfg, records)
        with EventStorage(0):
            losses = model(batch)
        sum(value for name, value in losses.items() if "loss" in name).backward()
        seconds = time.perf_counter() - begin
    return seconds


def _draw_batch(cfg: CfgNode, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a batch as the trainer would make it, short only where images are few."""
    mapper = build_mapper(cfg, is_train=True)
    order = random.Random(0).sample(range(len(records)), len(records))
    batch: list[dict[str, Any]] = []
    for index in order:
        entry = mapper(dict(records[index]))
        if entry is not None and not isinstance(entry, DataError):
            batch.append(entry)
        if len(batch) == cfg.SOLVER.IMS_PER_BATCH:
            break
    if not batch:
        raise UserError("no image can be read to count the encoder's multiply-adds on")
    # A queue takes whole batches: of few images, each comes several times.
    return [batch[i % len(batch)] for i in range(cfg.SOLVER.IMS_PER_BATCH)]


@contextmanager
def _counted_calls(model: nn.Module, kind: type[nn.Module]) -> Iterator[Sizes]:
    """Counts the images of each size that modules of a kind are called with."""
    sizes: Sizes = Counter()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        images = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        sizes[int(images.shape[-2]), int(images.shape[-1])] += len(images)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if type(module) is kind
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()
