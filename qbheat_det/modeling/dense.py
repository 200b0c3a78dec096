# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dense detectors with losses normalized over all processes: the base class, and FCOS.

Papers: arXiv:1708.02002 and arXiv:2006.09214. Detectron2 divides the losses by a running mean of
the number of positive anchors. There, each process keeps its own mean, which is lost on resume.
Here the mean is over all processes, updated once per step, and saved in checkpoints. FCOS is
registered and built from ``MODEL.FCOS``, with two fixes from Detectron2's main branch: images
without boxes, and GroupNorm heads on a recent PyTorch.

Unlabelled images: "Dense Teacher", arXiv:2207.02541. A detector learns from a teacher's scores and
boxes at selected locations, without NMS or score threshold. The teacher's weights are the moving
average of the detector's weights. The teacher sees the weak view of an image, and the student (the
detector) sees the strong view.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from qbheat_det.modeling.contracts import PSEUDO_LABELS, STRONG, UNLABELLED, pick_outputs
from qbheat_det.modeling.image_model import find_cached_images

COUNT = "num_positives"  # ``losses`` returns the count under this key, next to the losses


@dataclass(frozen=True)
class DensePredictions:
    """Predictions of a dense detector at R anchors or locations of N images.

    Attributes:
        logits: (N, R, K), class logits for a sigmoid.
        boxes: (N, R, 4), XYXY, in pixels of the padded batch.
        quality: (N, R), centerness logits; None for RetinaNet.
    """

    logits: Tensor
    boxes: Tensor
    quality: Tensor | None = None


@dataclass(frozen=True)
class DenseTargets:
    """Targets of the student, from a teacher, at R anchors or locations of N images.

    Attributes:
        scores: (N, R, K), the teacher's class scores at the selected locations; zero elsewhere.
        boxes: (N, R, 4), the teacher's boxes, XYXY, in pixels of the padded batch.
        total: (N,), one value, repeated. It is the sum of the highest class scores of all selected
            locations of all processes, divided by the number of their micro-batches.
        quality: (N, R), the teacher's centerness; None for RetinaNet.
    """

    scores: Tensor
    boxes: Tensor
    total: Tensor
    quality: Tensor | None = None

    def split(self) -> list["DenseTargets"]:
        """Returns the targets of each image, with N = 1."""
        parts = {name: each.split(1) for name, each in vars(self).items() if each is not None}
        images = zip(*parts.values(), strict=True)
        return [DenseTargets(**dict(zip(parts, image, strict=True))) for image in images]

    @staticmethod
    def join(parts: list["DenseTargets"]) -> "DenseTargets":
        """Reverses ``split``."""
        names = [name for name, each in vars(parts[0]).items() if each is not None]
        return DenseTargets(**{name: torch.cat([vars(p)[name] for p in parts]) for name in names})


@dataclass(frozen=True)
class DenseTeacherLoss:
    """The losses on unlabelled images (Sec. 3 of the paper).

    Attributes:
        top_ratio: number of locations in a step's unlabelled images that learn from the teacher,
            divided by the running mean of the number of positive locations in the labelled images.
            These locations have the teacher's highest class scores. The targets of all others are
            zero. The paper selects 1 % of all locations. In small images with many objects, this
            is too few.
        weight: factor on the losses.
        gamma: exponent of the quality focal loss (arXiv:2006.04388).
    """

    top_ratio: float = 2.0
    weight: float = 1.0
    gamma: float = 2.0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "DenseTeacherLoss":
        """Reads ``MODEL.SEMI`` of a config."""
        semi = cfg.MODEL.SEMI
        return cls(top_ratio=semi.TOP_RATIO * semi.RATIO, weight=semi.WEIGHT)

    @torch.no_grad()
    def select(
        self, teacher: Sequence[DensePredictions], num_positives: float
    ) -> list[DenseTargets]:
        """Returns the targets of each image. Every process must call this function.

        Args:
            teacher: the predictions for each micro-batch of this process.
            num_positives: running mean of the number of positive locations in the labelled images
                of a step.
        """
        scores = [part.logits.float().sigmoid() for part in teacher]
        best = torch.cat([each.amax(dim=2).flatten() for each in scores])
        num_top = max(1, round(self.top_ratio * num_positives))
        top = best.topk(min(num_top, len(best))).values
        if (num_processes := comm.get_world_size()) > 1:
            top = torch.cat(comm.all_gather(top.cpu())).to(best.device)
        least = top.topk(min(num_top, len(top))).values[-1]
        total = best.where(best >= least, 0).sum()
        if num_processes > 1:
            torch.distributed.all_reduce(total)
        total /= len(teacher) * num_processes
        found = []
        for part, each in zip(teacher, scores, strict=True):
            is_top = each.amax(dim=2, keepdim=True) >= least
            quality = None if part.quality is None else part.quality.float().sigmoid()
            totals = total.expand(len(each))
            found += DenseTargets(each * is_top, part.boxes.float(), totals, quality).split()
        return found

    def __call__(self, student: DensePredictions, targets: DenseTargets) -> dict[str, Tensor]:
        """Returns the losses by name. Their mean over all micro-batches is the loss of a step."""
        logits, best, total = student.logits.float(), targets.scores.amax(dim=2), targets.total[0]
        loss = quality_focal_loss(logits, targets.scores, self.gamma)
        losses = {"loss_teacher_cls": loss.sum() / total}
        # Locations are weighted by the teacher's highest class score.
        top = best > 0
        weights = best[top] / total
        giou = generalized_box_iou_loss(student.boxes.float()[top], targets.boxes[top])
        losses["loss_teacher_box"] = (weights * giou).sum()
        if student.quality is not None and targets.quality is not None:
            quality = F.binary_cross_entropy_with_logits(
                student.quality.float()[top], targets.quality[top], reduction="none"
            )
            losses["loss_teacher_ctr"] = (weights * quality).sum()
        return {name: self.weight * loss for name, loss in losses.items()}


def quality_focal_loss(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Returns the loss (arXiv:2006.04388) of each logit. Targets in [0, 1] have the same shape."""
    bce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (targets - logits.sigmoid()).abs() ** gamma * bce


class SyncNormalizer(DenseDetector):
    """Mixin that divides the losses of RetinaNet or FCOS by a running mean of the number of
    positive anchors in all processes together."""

    first_normalizer: float
    """Initial value of the running mean, as in Detectron2."""

    @configurable
    def __init__(self, *, teacher_loss: DenseTeacherLoss | None = None, **kwargs: Any) -> None:
        """Takes the detector's arguments, and the losses on unlabelled images."""
        super().__init__(**kwargs)
        self.teacher_loss = teacher_loss or DenseTeacherLoss()
        # Named as in Detectron2.
        self.register_buffer("loss_normalizer", torch.tensor(self.first_normalizer))
        self.loss_normalizer: Tensor

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """Same as in the base class. In training, ``normalizers`` (1,) divides the losses. By
        default, it is computed from the batches of all processes."""
        outputs = super().forward(batched_inputs)
        if not self.training:
            return outputs
        count = outputs.pop(COUNT)
        if normalizers is None:
            if comm.get_world_size() > 1:
                torch.distributed.all_reduce(count)
            normalizers = self.loss_normalizers(count, comm.get_world_size())
        losses = {name: total / normalizers[0] for name, total in outputs.items()}
        unlabelled = [one for entry in batched_inputs for one in entry.get(UNLABELLED, ())]
        return {**losses, **self._learn_from_teacher(unlabelled)} if unlabelled else losses

    @torch.no_grad()
    def pseudo_labels(self, batches: Sequence[list[dict[str, Any]]]) -> list[DenseTargets]:
        """See ``SupportsUnlabelled`` in ``modeling/contracts.py``."""
        predictions = [self._predict_densely(batch) for batch in batches]
        return self.teacher_loss.select(predictions, float(self.loss_normalizer))

    def _learn_from_teacher(self, unlabelled: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the losses on the strong views."""
        targets = DenseTargets.join([entry[PSEUDO_LABELS] for entry in unlabelled])
        key = "features" if "features" in unlabelled[0] else "image"
        strong = [{**entry, key: entry[STRONG]} for entry in unlabelled]
        return self.teacher_loss(self._predict_densely(strong), targets)

    def _predict_densely(self, batched_inputs: list[dict[str, Any]]) -> DensePredictions:
        maps = self.backbone(self.preprocess_image(batched_inputs).tensor)
        features = [maps[name] for name in self.head_in_features]
        outputs = self.head(features)
        sizes = [self.num_classes, 4, 1][: len(outputs)]  # FCOS has a centerness
        levels = self._transpose_dense_predictions(outputs, sizes)
        logits, deltas, *quality = (torch.cat(each, dim=1) for each in levels)
        anchors = Boxes.cat(self.anchor_generator(features)).tensor
        boxes = [self.box2box_transform.apply_deltas(image, anchors) for image in deltas]
        return DensePredictions(logits, torch.stack(boxes), *(each.squeeze(2) for each in quality))

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """Same as in the base class. Inputs with the key "features" become ``CachedImages``."""
        cached = find_cached_images(batched_inputs, self.backbone.size_divisibility, self.device)
        return super().preprocess_image(batched_inputs) if cached is None else cached

    def loss_counts(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the number (1,) of positive anchors in a batch. Does not run the backbone."""
        height, width = self.preprocess_image(batched_inputs).tensor.shape[-2:]
        maps = [
            torch.empty(0, math.ceil(height / stride), math.ceil(width / stride))
            for stride in self.anchor_generator.strides
        ]
        truth = [entry["instances"].to(self.device) for entry in batched_inputs]
        labels, _ = self.label_anchors(self.anchor_generator(maps), truth)
        return self._count_positives(labels)

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Updates the running mean with the number of positive anchors (1,). Returns the divisor of
        each micro-batch."""
        momentum = 0.9  # Detectron2's
        self.loss_normalizer.mul_(momentum).add_(counts[0].clamp(min=1), alpha=1 - momentum)
        return self.loss_normalizer[None] / parts

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """Returns the sums of the detector's losses and, as ``COUNT``, the number of positives."""
        sums = super().losses(anchors, pred_logits, gt_labels, *others)
        return {**sums, COUNT: self._count_positives(gt_labels)}

    def _count_positives(self, gt_labels: list[Tensor]) -> Tensor:
        labels = torch.stack(gt_labels)  # (N, R): -1 is ignored, K is background
        return ((labels >= 0) & (labels != self.num_classes)).sum().float()[None]

    def _ema_update(self, *args: Any, **kwargs: Any) -> float:
        return 1.0  # so that the detector does not divide; ``forward`` does

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Checkpoints of Detectron2's class do not contain this buffer.
        state_dict.setdefault(f"{prefix}loss_normalizer", self.loss_normalizer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@META_ARCH_REGISTRY.register()
class SyncFCOS(SyncNormalizer, FCOS):
    """FCOS whose losses are normalized over the effective batch.

    With one process and one micro-batch, the losses equal Detectron2's, except for the two fixes in
    the module's docstring.
    """

    first_normalizer = 300.0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node, backbone = cfg.MODEL.FCOS, build_backbone(cfg)
        input_shape = pick_outputs(backbone, node.IN_FEATURES, "MODEL.FCOS.IN_FEATURES")
        return {
            "teacher_loss": DenseTeacherLoss.from_config(cfg),
            "backbone": backbone,
            "head": FCOSHead(
                input_shape=input_shape,
                num_classes=node.NUM_CLASSES,
                conv_dims=[input_shape[0].channels] * node.NUM_CONVS,
                prior_prob=node.PRIOR_PROB,
                norm=_group_norm if node.NORM == "GN" else node.NORM,
            ),
            "head_in_features": node.IN_FEATURES,
            "num_classes": node.NUM_CLASSES,
            "center_sampling_radius": node.CENTER_SAMPLING_RADIUS,
            "focal_loss_alpha": node.FOCAL_LOSS_ALPHA,
            "focal_loss_gamma": node.FOCAL_LOSS_GAMMA,
            "test_score_thresh": node.SCORE_THRESH_TEST,
            "test_topk_candidates": node.TOPK_CANDIDATES_TEST,
            "test_nms_thresh": node.NMS_THRESH_TEST,
            "max_detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def label_anchors(
        self, anchors: list[Boxes], gt_instances: list[Instances]
    ) -> tuple[list[Tensor], Any]:
        """See ``FCOS``. In images without boxes, all locations are background."""
        return super().label_anchors(anchors, [_or_empty_box(found) for found in gt_instances])

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """See ``SyncNormalizer``. The deltas are cast to float32, because torchvision's GIoU loss
        does not support autocast."""
        deltas, *rest = others
        deltas = [each.float() for each in deltas]
        return super().losses(anchors, pred_logits, gt_labels, deltas, *rest)


def _group_norm(channels: int) -> nn.GroupNorm:
    # Detectron2 v0.6 builds the norm for 1 channel to check its type, which fails with 32 groups.
    return nn.GroupNorm(min(32, channels), channels)


def _or_empty_box(instances: Instances) -> Instances:
    """Returns the instances. If there are none, returns an empty box, which matches no location."""
    if len(instances):
        return instances
    return Instances(
        instances.image_size,
        gt_boxes=Boxes(instances.gt_boxes.tensor.new_zeros(1, 4)),
        gt_classes=instances.gt_classes.new_zeros(1),
    )
