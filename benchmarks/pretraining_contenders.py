# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The pre-training models of the benchmark, and the calls that are timed.

Run as a program, prints the peak memory in MiB of a training step of one model on the CPU:
``python -m benchmarks.pretraining_contenders NAME SETTING SIZE BATCH THREADS``.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from benchmarks.masked_peers import (
    MaskedConvolutionEncoder,
    MaskedReconstruction,
    TokenDroppingEncoder,
    draw_visible,
)
from benchmarks.timing import set_threads
from benchmarks.workers import resident_mib


@dataclass(frozen=True)
class Setting:
    """Sizes that all models share.

    On the CPU, the encoder is timed with more images than a step, because the fixed cost of a call
    would hide the effect of masking.
    """

    name: str
    title: str
    size: int
    feature_dim: int
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int
    cpu_batch: int
    cpu_encoder_batch: int
    cuda_batch: int

    def at(self, *, size: int) -> "Setting":
        """Returns this setting with a different image size."""
        return replace(self, size=size)


@dataclass(frozen=True)
class Contender:
    """A model to measure, with a variant of Mobile-Former.

    ``method`` is "quarter" (QB-Heat), "masked" (masked convolutions), "whole" (their encoder on the
    whole image) or "tokens" (a transformer without the hidden tokens).
    """

    title: str
    method: str
    variant: str = ""


SETTINGS = {
    "256": Setting("256", "the paper's decoder, 6 x 512", 256, 512, 512, 6, 16, 4, 16, 256),
    "128": Setting("128", "the CPU recipe's decoder, 2 x 192", 128, 256, 192, 2, 6, 16, 64, 512),
}
CONTENDERS = {
    "mae_vit_s": Contender("MAE-style ViT-S/16", "tokens"),
    "285m": Contender("QB-Heat 285M", "quarter", "285M"),
    "285m_masked_convolution": Contender("SparK-style 285M", "masked", "285M"),
    "285m_whole_image": Contender("285M, nothing masked", "whole", "285M"),
    "1.0g": Contender("QB-Heat 1.0G", "quarter", "1.0G"),
    "3.7g": Contender("QB-Heat 3.7G", "quarter", "3.7G"),
    "3.7g_masked_convolution": Contender("SparK-style 3.7G", "masked", "3.7G"),
    "3.7g_whole_image": Contender("3.7G, nothing masked", "whole", "3.7G"),
}


@dataclass(frozen=True)
class Calls:
    """The timed calls, each with forward and backward pass of one batch.

    ``encoder`` computes the features of visible positions. ``step`` takes uint8 images on the
    device (default: random images), and updates the weights with AdamW.
    """

    encoder: Callable[[], object]
    step: Callable[..., object]


def make_config(variant: str, setting: Setting) -> CfgNode:
    """Returns the pre-training recipe with the sizes of ``setting``."""
    from qbheat_det.config import get_config_path, load_config

    cfg = load_config(get_config_path("ImageNet-QBHeat/qb_heat_285M_400ep.yaml"))
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.MOBILE_FORMER.VARIANT = variant or "285M"
    cfg.MODEL.QB_HEAT.FEATURE_DIM = setting.feature_dim
    cfg.MODEL.QB_HEAT.DECODER_DIM = setting.decoder_dim
    cfg.MODEL.QB_HEAT.DECODER_DEPTH = setting.decoder_depth
    cfg.MODEL.QB_HEAT.DECODER_HEADS = setting.decoder_heads
    cfg.INPUT.PRETRAIN.SIZE = setting.size
    return cfg


def build(contender: Contender, setting: Setting) -> nn.Module:
    """Builds a model on the CPU; all models of a setting have the same decoder and loss."""
    from qbheat_det.modeling.pretrain import QBHeat

    parts = QBHeat.from_config(make_config(contender.variant, setting))
    model: nn.Module
    if contender.method == "quarter":
        model = QBHeat(**parts)
    else:
        encoder: nn.Module
        if contender.method == "tokens":
            encoder = TokenDroppingEncoder(image_size=setting.size)
        else:
            encoder = MaskedConvolutionEncoder(backbone=parts["backbone"])
        model = MaskedReconstruction(
            encoder=encoder,
            decoder=parts["decoder"],
            loss=parts["loss"],
            dim=setting.feature_dim,
            pixel_mean=parts["pixel_mean"],
            pixel_std=parts["pixel_std"],
        )
    return model.train()


def prepare(
    contender: Contender,
    setting: Setting,
    *,
    batch: int,
    device: torch.device,
    encoder_batch: int | None = None,
) -> Calls:
    """Builds a model on ``device`` and returns its timed calls, in bfloat16 on a GPU."""
    from qbheat_det.solver import build_optimizer

    model = build(contender, setting).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(make_config(contender.variant, setting), model)
    on_device = random_images(batch, setting.size).to(device)

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step(images: Tensor = on_device) -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = model([{"image": image} for image in images])["loss_reconstruction"]
        loss.backward()
        optimizer.step()

    encode = encoder_of(model, contender, setting, batch=encoder_batch or batch, device=device)
    with torch.no_grad(), precision():
        gradient = torch.randn_like(encode())

    def encoder() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision():
            features = encode()
        torch.autograd.backward(features, gradient)

    return Calls(encoder, step)


def encoder_of(
    model: Any, contender: Contender, setting: Setting, *, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """Returns a function that runs the forward pass of the encoder, including the masking."""
    from qbheat_det.modeling.pretrain import QUADRANTS, VisibleQuarters

    images = torch.randn(batch, 3, setting.size, setting.size, device=device)
    if contender.method == "quarter":
        half = ["centre"] * (batch // 2)
        corners = [QUADRANTS[i % 4] for i in range(batch - len(half))]
        quarters = VisibleQuarters.at([*corners, *half], device=device)
        return lambda: model.backbone(quarters.crop(images))["s16_expanded"]
    if contender.method == "whole":
        return lambda: model.encoder.backbone(images)["s16_expanded"]
    visible = draw_visible(batch, model.decoder.grid_size**2, device)
    return lambda: model.encoder(images, visible)


def random_images(batch: int, size: int) -> Tensor:
    """Returns random images (batch, 3, size, size), uint8."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, generator=generator)


def peak_memory(name: str, setting: str, size: int, batch: int, threads: int) -> float:
    """Returns the peak memory in MiB of two steps on the CPU, without that of the imports.

    Includes weights, AdamW's moments, gradients and activations. Call it once per process.
    """
    set_threads(threads)
    import qbheat_det.modeling.pretrain  # before memory is looked at
    import qbheat_det.solver  # noqa: F401

    torch.nn.functional.conv2d(torch.zeros(1, 3, 9, 9), torch.zeros(1, 3, 3, 3))
    before = resident_mib(peak=False)
    sizes = SETTINGS[setting].at(size=size)
    calls = prepare(CONTENDERS[name], sizes, batch=batch, device=torch.device("cpu"))
    for _ in range(2):
        calls.step()
    return resident_mib(peak=True) - before


if __name__ == "__main__":
    _name, _setting, *_numbers = sys.argv[1:]
    print(peak_memory(_name, _setting, *(int(number) for number in _numbers)))
