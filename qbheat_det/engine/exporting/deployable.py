# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A trained model with its pre- and post-processing as one module of tensors, ready to export."""

import importlib
from collections.abc import Mapping
from typing import cast

from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.classification import ImageClassifier
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone

from .detector_heads import Suppress, build_head
from .export_info import DETECTION_OUTPUTS, ExportInfo, Task
from .pixels import CentreSquare, Normalisation, ShortestEdge
from .suppression import suppress


class Encoder(nn.Module):
    """From bytes to a backbone's outputs."""

    def __init__(
        self, *, resize: ShortestEdge | CentreSquare, normalise: Normalisation, backbone: nn.Module
    ) -> None:
        """
        Args:
            resize: of the images.
            normalise: and pad.
            backbone: from (N, 3, H, W) to maps and tokens by name.
        """
        super().__init__()
        self.resize = resize
        self.normalise = normalise
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """
        Args:
            images: (N, H, W, 3), uint8.

        Returns:
            The backbone's outputs by name, and (4,): H, W, H', W' before and after the resize.
        """
        planes, sizes = self.resize(images)
        return self.backbone(self.normalise(planes, sizes)), sizes


class ClassifierHead(nn.Module):
    """Scores of the classes."""

    def __init__(self, decoder: nn.Module) -> None:
        """
        Args:
            decoder: from a backbone's outputs to logits.
        """
        super().__init__()
        self.decoder = decoder

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Returns "scores", (N, K), which sum to one."""
        return (self.decoder(features).float().softmax(dim=1),)


class FeatureHead(nn.Module):
    """The backbone's outputs themselves."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """
        Args:
            names: of the outputs, in their order.
        """
        super().__init__()
        self.names = names

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs, in their order."""
        return tuple(features[name] for name in self.names)


class DeployableModel(nn.Module):
    """All of it: (N, H, W, 3), uint8, to the outputs that ``info`` names."""

    def __init__(self, *, encoder: Encoder, head: nn.Module, info: ExportInfo) -> None:
        """
        Args:
            encoder: from bytes to a backbone's outputs.
            head: from these, and the sizes, to the outputs.
            info: what the outputs are.
        """
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.info = info

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            images: (N, H, W, 3), uint8.

        Returns:
            The outputs in the order of ``info.outputs``, see ``ExportInfo``.
        """
        return cast(tuple[Tensor, ...], self.head(*self.encoder(images)))


def build_deployable(
    model: nn.Module, cfg: CfgNode, *, suppress: Suppress = suppress, tolerance: float = 0.0
) -> DeployableModel:
    """Builds the module around a trained model, whose parts it shares.

    Args:
        model: a detector, a classifier, or anything else with a ``backbone``; it is set to
            evaluation mode.
        cfg: of the model, with ``MODEL.CLASS_NAMES`` and ``MODEL.CATEGORY_IDS``.
        suppress: see ``DenseHead``.
        tolerance: noted in ``info``.

    Raises:
        UserError: the model's boxes cannot be computed in a graph.
    """
    model.eval()
    backbone = get_backbone(model)
    if backbone is None:
        raise UserError(f"{type(model).__name__} has no backbone, and cannot be exported")
    resize: ShortestEdge | CentreSquare = ShortestEdge(
        min_size=cfg.INPUT.MIN_SIZE_TEST, max_size=cfg.INPUT.MAX_SIZE_TEST
    )
    task: Task = "features"
    outputs: tuple[str, ...]
    head = build_head(model, suppress)
    if head is not None:
        task, outputs = "detection", DETECTION_OUTPUTS
    elif isinstance(model, ImageClassifier):
        task, outputs, head = "classification", ("scores",), ClassifierHead(model.decoder)
        resize = CentreSquare(size=model.image_size, share=cfg.INPUT.CLASSIFY.TEST_CROP)
    elif isinstance(model, FixedSizeModel):
        outputs = tuple(backbone.output_shape())
        head = FeatureHead(outputs)
    else:
        raise UserError(
            f"{cfg.MODEL.META_ARCHITECTURE} cannot be exported: how many boxes pass between its "
            "stages depends on the image. MF-DETR, RetinaNet and FCOS can be, and so can "
            "classifiers and pre-trained backbones"
        )
    normalise = Normalisation(
        mean=cfg.MODEL.PIXEL_MEAN,
        std=cfg.MODEL.PIXEL_STD,
        size_divisibility=0 if task == "classification" else backbone.size_divisibility,
    )
    encoder = Encoder(resize=resize, normalise=normalise, backbone=backbone)
    info = _describe(cfg, task, outputs, model, tolerance)
    return DeployableModel(encoder=encoder, head=head, info=info).eval()


def _describe(
    cfg: CfgNode, task: Task, outputs: tuple[str, ...], model: nn.Module, tolerance: float
) -> ExportInfo:
    # Where the exporter's files lie is of no meaning elsewhere, and tells of the exporter.
    own, fresh = cfg.clone(), get_cfg()
    own.defrost()
    own.MODEL.WEIGHTS, own.OUTPUT_DIR = fresh.MODEL.WEIGHTS, fresh.OUTPUT_DIR
    return ExportInfo(
        task=task,
        outputs=outputs,
        pixel_format=str(cfg.INPUT.FORMAT),
        class_names=tuple(str(name) for name in cfg.MODEL.CLASS_NAMES),
        category_ids=tuple(int(number) for number in cfg.MODEL.CATEGORY_IDS),
        score_threshold=float(getattr(model, "test_score_thresh", 0.0)),
        model=str(cfg.MODEL.META_ARCHITECTURE),
        config=dump_config(own),
        version=importlib.import_module("qbheat_det").__version__,
        tolerance=tolerance,
    )
