# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The detectors that are measured: ours, and the peers with random weights.

Run as a program it prints the peak memory of one detector:
``python benchmarks/detectors.py NAME HEIGHT WIDTH THREADS``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import resident_mib, set_threads

Forward = Callable[[torch.Tensor], object]

# Test images of COCO have about this size after resizing the shorter side to 800.
HEIGHT, WIDTH = 800, 1333


@dataclass(frozen=True)
class Detector:
    """A detector to measure.

    Attributes:
        title: for people.
        load: imports what is needed and returns the function that builds the model. The model
            takes one image (3, H, W) with values 0 to 255 and is in evaluation mode.
    """

    title: str
    load: Callable[[], Callable[[], Forward]]


def _load_mf_detr(variant: str, num_blocks: list[int]) -> Callable[[], Forward]:
    from detectron2.modeling import build_model

    import qbheat_det  # noqa: F401  (registers the model)

    def build() -> Forward:
        return _detectron2_forward(build_model(mf_detr_config(variant, num_blocks)).eval())

    return build


def mf_detr_config(variant: str, num_blocks: list[int]) -> CfgNode:
    """Returns the config of an MF-DETR, for the CPU."""
    from qbheat_det.config import get_cfg

    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "MFDETR"
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.MOBILE_FORMER.VARIANT = variant
    cfg.MODEL.MF_DETR.NUM_BLOCKS = num_blocks
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def _load_retinanet_r50() -> Callable[[], Forward]:
    from detectron2.config import get_cfg
    from detectron2.modeling import build_model

    def build() -> Forward:
        # Detectron2's Base-RetinaNet.yaml computes its anchors with a Python tag; same values.
        cfg = get_cfg()
        cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
        cfg.MODEL.BACKBONE.NAME = "build_retinanet_resnet_fpn_backbone"
        cfg.MODEL.RESNETS.DEPTH = 50
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
        cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = [
            [size, size * 2 ** (1 / 3), size * 2 ** (2 / 3)] for size in (32, 64, 128, 256, 512)
        ]
        cfg.MODEL.DEVICE = "cpu"
        return _detectron2_forward(build_model(cfg).eval())

    return build


def _load_detr_r50() -> Callable[[], Forward]:
    from transformers import DetrConfig, DetrForObjectDetection

    def build() -> Forward:
        # facebook/detr-resnet-50's architecture; nothing is downloaded.
        config = DetrConfig(
            num_labels=91,
            backbone_config={
                "model_type": "timm_backbone",
                "backbone": "resnet50",
                "use_pretrained_backbone": False,
                "out_indices": [4],
            },
        )
        model = DetrForObjectDetection(config).eval()
        return lambda image: model(pixel_values=image[None])

    return build


def _detectron2_forward(model: torch.nn.Module) -> Forward:
    def forward(image: torch.Tensor) -> object:
        height, width = image.shape[-2:]
        return model([{"image": image, "height": height, "width": width}])

    return forward


DETECTORS = {
    "285m_211": Detector("MF-285M + MF-Dec-211", lambda: _load_mf_detr("285M", [2, 1, 1])),
    "3.7g_522": Detector("MF-3.7G + MF-Dec-522", lambda: _load_mf_detr("3.7G", [5, 2, 2])),
    "detr_r50": Detector("DETR-R50 (transformers)", _load_detr_r50),
    "retinanet_r50": Detector("RetinaNet-R50-FPN (Detectron2)", _load_retinanet_r50),
}

OURS = ("285m_211", "3.7g_522")
PEERS = ("detr_r50", "retinanet_r50")


def random_image(height: int, width: int) -> torch.Tensor:
    """Returns (3, height, width), uniform in [0, 255)."""
    return 255 * torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))


def peak_memory(name: str, height: int, width: int, threads: int) -> float:
    """Builds a detector, runs it twice and returns the peak in MiB beyond the imports.

    Counts weights and activations. To be called once, in a fresh process.
    """
    set_threads(threads)
    build = DETECTORS[name].load()
    image = random_image(height, width)
    torch.nn.functional.conv2d(image[None], torch.zeros(1, 3, 3, 3))  # starts the thread pool
    before = resident_mib(peak=False)
    with torch.inference_mode():
        forward = build()
        for _ in range(2):
            forward(image)
    return resident_mib(peak=True) - before


if __name__ == "__main__":
    print(peak_memory(sys.argv[1], *(int(argument) for argument in sys.argv[2:5])))
