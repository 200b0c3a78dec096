# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images in which only some classes are labelled: which class logits learn from them.

The rest of such an image is background for the classes that were annotated there, but not for the
others, whose objects may lack labels. Detectors call ``ignore_unannotated`` on their logits before
the classification loss.

In shapes, N is the number of images, and K the number of classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .contracts import ANNOTATED_CLASSES

_NO_CLASS = -1e4  # a logit whose probability is exactly 0, also in half precision


def find_annotated(
    batched_inputs: Sequence[Mapping[str, Any]], num_classes: int, device: torch.device
) -> Tensor | None:
    """Returns a mask (N, K), True where a class is annotated in an image (``ANNOTATED_CLASSES``).

    Returns None if all images are annotated for all classes.
    """
    if not any(ANNOTATED_CLASSES in entry for entry in batched_inputs):
        return None
    is_annotated = torch.ones(len(batched_inputs), num_classes, dtype=torch.bool)
    for row, entry in zip(is_annotated, batched_inputs, strict=True):
        if ANNOTATED_CLASSES in entry:
            row.zero_()
            row[list(entry[ANNOTATED_CLASSES])] = True
    if is_annotated.all():
        return None
    return is_annotated.to(device, non_blocking=True)


def ignore_unannotated(logits: Tensor, is_annotated: Tensor | None, classes: Tensor) -> Tensor:
    """Replaces the logits that teach nothing by a constant, so that they get no gradient.

    These are the logits of classes that are not annotated in the image, except that of the labelled
    object. If the target of a replaced logit is 0, its sigmoid's cross-entropy and focal losses are
    exactly 0. In a softmax, the class has the probability 0.

    Args:
        logits: (…, N, R, K) or, with a last logit for "no object", (…, N, R, K + 1).
        is_annotated: the result of ``find_annotated`` (N, K). None returns ``logits`` unchanged.
        classes: (…, N, R), the class of the labelled object. Any value outside [0, K) means that
            there is none.
    """
    if is_annotated is None:
        return logits
    num_classes = is_annotated.shape[1]
    class_indices = torch.arange(num_classes, device=logits.device)
    is_labelled = classes[..., None] == class_indices  # (…, N, R, K)
    teaches = is_labelled | is_annotated[:, None]
    if logits.shape[-1] > num_classes:
        teaches = F.pad(teaches, (0, 1), value=True)
    return logits.masked_fill(~teaches, _NO_CLASS)
