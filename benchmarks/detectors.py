# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The detectors of the benchmarks: ours and the peers, all with random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

Forward = Callable[[Tensor], object]

# Typical size of COCO's test images after resizing the shorter side to 800.
HEIGHT = 800
WIDTH = 1333


def call_detectron2(model: nn.Module, images: Tensor) -> object:
    """Runs a Detectron2 model on images, and returns its ``Instances``."""
    height, width = images.shape[-2:]
    return model([{"image": image, "height": height, "width": width} for image in images])


def call_transformers(model: nn.Module, images: Tensor) -> object:
    """Runs a transformers model on pixels, and returns logits and boxes."""
    return model(pixel_values=images)


@dataclass(frozen=True)
class Detector:
    """A detector to measure.

    ``load`` imports the libraries, and returns a function that builds the model in eval mode.
    ``call`` runs the model on images (N, 3, H, W) with values in [0, 255].
    """

    title: str
    load: Callable[[], Callable[[], nn.Module]]
    call: Callable[[nn.Module, Tensor], object] = call_detectron2


def mf_detr_config(variant: str, num_blocks: Sequence[int], num_queries: int = 100) -> CfgNode:
    """Returns the config of an MF-DETR, for the CPU."""
    from qbheat_det.config import get_cfg

    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "MFDETR"
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.MOBILE_FORMER.VARIANT = variant
    cfg.MODEL.MF_DETR.NUM_BLOCKS = list(num_blocks)
    cfg.MODEL.MF_DETR.NUM_OBJECT_QUERIES = num_queries
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def load_mf_detr(
    variant: str, num_blocks: Sequence[int], num_queries: int = 100
) -> Callable[[], nn.Module]:
    """Returns a function that builds an MF-DETR in eval mode."""
    from detectron2.modeling import build_model

    import qbheat_det  # noqa: F401  (registers the model)

    return lambda: build_model(mf_detr_config(variant, num_blocks, num_queries)).eval()


def load_retinanet_r50() -> Callable[[], nn.Module]:
    from detectron2.config import get_cfg
    from detectron2.modeling import build_model

    def build() -> nn.Module:
        # The same values as in Detectron2's Base-RetinaNet.yaml, which has a Python tag.
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
        return build_model(cfg).eval()

    return build


def load_detr_r50() -> Callable[[], nn.Module]:
    from transformers import DetrConfig, DetrForObjectDetection

    # The architecture of facebook/detr-resnet-50; nothing is downloaded.
    config = DetrConfig(
        num_labels=91,
        backbone_config={
            "model_type": "timm_backbone",
            "backbone": "resnet50",
            "use_pretrained_backbone": False,
            "out_indices": [4],
        },
    )
    return lambda: DetrForObjectDetection(config).eval()


def load_rt_detr(**differences: Any) -> Callable[[], nn.Module]:
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    # The library's default is the architecture of PekingU/rtdetr_r50vd.
    config = RTDetrConfig(num_labels=80, **differences)
    return lambda: RTDetrForObjectDetection(config).eval()


# Differences of PekingU/rtdetr_r18vd from the library's default.
_RT_DETR_R18: dict[str, Any] = {
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "layer_type": "basic",
        "depths": [2, 2, 2, 2],
        "hidden_sizes": [64, 128, 256, 512],
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_in_channels": [128, 256, 512],
    "decoder_layers": 3,
    "hidden_expansion": 0.5,
}


def load_d_fine_n() -> Callable[[], nn.Module]:
    from transformers import DFineConfig, DFineForObjectDetection

    # The architecture of D-FINE-N (arXiv:2410.13842), with HGNetV2-B0.
    config = DFineConfig(
        num_labels=80,
        backbone_config={
            "model_type": "hgnet_v2",
            "stem_channels": [3, 16, 16],
            "stage_in_channels": [16, 64, 256, 512],
            "stage_mid_channels": [16, 32, 64, 128],
            "stage_out_channels": [64, 256, 512, 1024],
            "hidden_sizes": [64, 256, 512, 1024],
            "stage_num_blocks": [1, 1, 2, 1],
            "stage_numb_of_layers": [3, 3, 3, 3],
            "use_learnable_affine_block": True,
            "out_features": ["stage3", "stage4"],
        },
        encoder_in_channels=[512, 1024],
        feat_strides=[16, 32],
        encoder_hidden_dim=128,
        encode_proj_layers=[1],
        encoder_ffn_dim=512,
        hidden_expansion=0.34,
        depth_mult=0.5,
        d_model=128,
        decoder_in_channels=[128, 128],
        decoder_ffn_dim=512,
        num_feature_levels=2,
        decoder_layers=3,
        decoder_n_points=[6, 6],
    )
    return lambda: DFineForObjectDetection(config).eval()


DETECTORS = {
    "285m_211": Detector("MF-285M + MF-Dec-211", partial(load_mf_detr, "285M", (2, 1, 1))),
    "3.7g_522": Detector("MF-3.7G + MF-Dec-522", partial(load_mf_detr, "3.7G", (5, 2, 2))),
    "detr_r50": Detector("DETR-R50 (transformers)", load_detr_r50, call_transformers),
    "retinanet_r50": Detector("RetinaNet-R50-FPN (Detectron2)", load_retinanet_r50),
    "rt_detr_r18": Detector(
        "RT-DETR-R18 (transformers)", partial(load_rt_detr, **_RT_DETR_R18), call_transformers
    ),
    "d_fine_n": Detector("D-FINE-N (transformers)", load_d_fine_n, call_transformers),
    "rt_detr_r50": Detector("RT-DETR-R50 (transformers)", load_rt_detr, call_transformers),
}

OURS = ("285m_211", "3.7g_522")
PEERS = ("detr_r50", "retinanet_r50")


def random_images(height: int, width: int, *, number: int = 1) -> Tensor:
    """Returns images (number, 3, height, width) with values uniform in [0, 255)."""
    generator = torch.Generator().manual_seed(0)
    return 255 * torch.rand(number, 3, height, width, generator=generator)
