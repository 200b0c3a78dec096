# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A trained model with its pre- and post-processing as one module of tensors, and its graph."""

import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.modeling.classification import ImageClassifier
from qbheat_det.modeling.contracts import get_backbone

from .heads import Head, Suppress, build_head, suppress_overlaps
from .metadata import ExportInfo
from .preprocessing import CenterCrop, Preprocessing, ShortestEdge


class ExportableModel(nn.Module):
    """Preprocessing, backbone and head: from uint8 images to the outputs that ``info`` names."""

    def __init__(
        self, preprocessing: Preprocessing, backbone: Backbone, head: Head, info: ExportInfo
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.backbone = backbone
        self.head = head
        self.info = info

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """From (N, H, W, 3), uint8, to the outputs in the order of ``info.outputs``."""
        x, sizes = self.preprocessing(images)
        return cast(tuple[Tensor, ...], self.head(self.backbone(x), sizes))


def build_exportable(
    model: nn.Module, cfg: CfgNode, *, suppress: Suppress = suppress_overlaps
) -> ExportableModel:
    """Builds the module around a trained model, whose parts it shares, in evaluation mode.

    ``suppress`` is ``suppress_overlaps``, or an operator that computes it.

    Raises:
        UserError: the model's boxes cannot be computed in a graph.
    """
    head = build_head(model.eval(), suppress)
    backbone = get_backbone(model)
    assert backbone is not None  # all of ``build_head`` have one
    resize: ShortestEdge | CenterCrop
    if isinstance(model, ImageClassifier):
        resize = CenterCrop(model.image_size, share=cfg.INPUT.CLASSIFY.TEST_CROP)
    else:
        resize = ShortestEdge(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    preprocessing = Preprocessing(
        resize,
        mean=cfg.MODEL.PIXEL_MEAN,
        std=cfg.MODEL.PIXEL_STD,
        size_divisibility=0 if head.task == "classification" else backbone.size_divisibility,
    )
    # The exporter's own paths mean nothing elsewhere, and may be private.
    public, defaults = cfg.clone(), get_cfg()
    public.defrost()
    public.MODEL.WEIGHTS, public.OUTPUT_DIR = defaults.MODEL.WEIGHTS, defaults.OUTPUT_DIR
    info = ExportInfo(
        task=head.task,
        outputs=head.outputs,
        pixel_format=str(cfg.INPUT.FORMAT),
        class_names=tuple(str(name) for name in cfg.MODEL.CLASS_NAMES),
        category_ids=tuple(int(number) for number in cfg.MODEL.CATEGORY_IDS),
        score_threshold=head.score_threshold,
        model=str(cfg.MODEL.META_ARCHITECTURE),
        config=dump_config(public),
        version=importlib.import_module("qbheat_det").__version__,
    )
    return ExportableModel(preprocessing, backbone, head, info).eval()


def trace(
    module: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Sequence[Any]
) -> ExportedProgram:
    """Returns a module in evaluation mode as a program of torch.export."""
    with torch.no_grad():
        return torch.export.export(
            module, inputs, dynamic_shapes=tuple(dynamic_shapes), strict=False
        )


def trace_images(module: nn.Module) -> ExportedProgram:
    """Returns a module of (N, H, W, 3), uint8, as a program for any N, H and W."""
    shape = {0: Dim("batch", min=1), 1: Dim("height"), 2: Dim("width")}
    return trace(module, (example_images(),), (shape,))


def example_images() -> Tensor:
    """Returns images to trace a module with: (2, 253, 311, 3), uint8."""
    # Of a size that no other number in a network is likely to have.
    values = torch.arange(2 * 253 * 311 * 3, dtype=torch.int64).view(2, 253, 311, 3) * 37 % 256
    return values.to(torch.uint8)
