# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mixup and CutMix of a batch, and their soft targets; both are timm's.

Papers: "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412; "CutMix: Regularization
Strategy to Train Strong Classifiers with Localizable Features", arXiv:1905.04899; label
smoothing: "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567.
"""

from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor

from qbheat_det.core.errors import UserError


class BatchMixing:
    """Mixes image i of N with image N - 1 - i, and their labels likewise.

    Each process draws one share for its batch from NumPy's global generator, which the trainer
    seeds by run, step and process, so that a resumed run draws the same.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        """Args:
        num_classes: K.
        label_smoothing: share of a target that is distributed evenly over all classes.
        mixup: alpha of Mixup's Beta(alpha, alpha); 0 turns it off.
        cutmix: alpha of CutMix's; with both, each batch takes one at random.
        """
        if num_classes < 1:
            raise ValueError(f"MODEL.CLASSIFIER.NUM_CLASSES is at least 1, not {num_classes}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                f"MODEL.CLASSIFIER.LABEL_SMOOTHING is a share in [0, 1), not {label_smoothing}"
            )
        if not (mixup >= 0 and cutmix >= 0):
            raise ValueError(
                f"MODEL.CLASSIFIER.MIXUP ({mixup}) and CUTMIX ({cutmix}) are at least 0"
            )
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self._mix = (
            Mixup(
                mixup_alpha=mixup,
                cutmix_alpha=cutmix,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )
            if mixup or cutmix
            else None
        )

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """From images (N, 3, H, W), mixed in place, and labels (N,) to images and targets (N, K).

        Raises:
            UserError: the batch is mixed, and its number of images is odd.
        """
        if self._mix is None:
            return images, mixup_target(labels, self.num_classes, smoothing=self.label_smoothing)
        if len(images) % 2:
            raise UserError(
                f"Mixup and CutMix pair the images of a batch, and a process has {len(images)}: "
                "choose SOLVER.IMS_PER_BATCH so that the share of each process, and each of its "
                "SOLVER.ACCUMULATE parts, is even"
            )
        mixed, targets = self._mix(images, labels)
        return mixed, targets
