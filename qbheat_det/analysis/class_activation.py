# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class activation maps: what each position of an image adds to the score of a class.

Paper: "Learning Deep Features for Discriminative Localization", arXiv:1512.04150, Eq. 2, which
QB-Heat, arXiv:2211.13228, sets out from in Sec. 1 and Fig. 1. A map exists where a linear
classifier reads the average of a feature map over its positions: sum and mean change places. Two
things of this package's classifier are not in that paper: the BatchNorm without scale and offset
before the linear layer in linear probing, which is folded into the weights, and the first token
beside the pooled map, which belongs to no position and stands outside the map.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbheat_det.modeling.classification import LinearDecoder
from qbheat_det.modeling.classification.image_classifier import ImageClassifier


@dataclass(frozen=True)
class ClassActivation:
    """Class activation maps of N images, one class each.

    Attributes:
        maps: (N, H, W), in logits: their mean over positions, and ``rest``, sum to ``logits``.
        rest: (N,), what no position adds: the bias, and the first token if it is read.
        logits: (N,), of the class.
        scores: (N,), softmax of it over all classes, in [0, 1].
        classes: (N,), its index.
    """

    maps: Tensor
    rest: Tensor
    logits: Tensor
    scores: Tensor
    classes: Tensor


@torch.no_grad()
def measure_class_activation(
    model: ImageClassifier, images: Tensor, classes: Sequence[int] | None = None
) -> ClassActivation:
    """Returns the class activation map of each image.

    Args:
        model: with a linear decoder, in evaluation mode.
        images: (N, 3, S, S), normalised.
        classes: one index for each image; None takes the class that the model predicts.

    Raises:
        ValueError: the decoder is not linear, so that no such map exists.
    """
    decoder = model.decoder
    if not isinstance(decoder, LinearDecoder):
        raise ValueError(
            f"a class activation map needs a linear decoder over the pooled map, not a "
            f"{type(decoder).__name__}: behind it, only Grad-CAM, another quantity, is defined"
        )
    features = model.backbone(images)
    logits = decoder(features).float()
    chosen = logits.argmax(dim=1) if classes is None else torch.tensor(classes).to(logits.device)
    weights, bias = fold_normalization(decoder)
    channels = decoder.pool.channels
    maps = torch.einsum(
        "nchw,nc->nhw", features[decoder.pool.in_feature].float(), weights[chosen, :channels]
    )
    rest = bias[chosen]
    if decoder.pool.token_dim:
        first = features["tokens"][:, 0].float()
        rest = rest + (first * weights[chosen, channels:]).sum(dim=1)
    index = chosen[:, None]
    return ClassActivation(
        maps=maps,
        rest=rest,
        logits=logits.gather(1, index)[:, 0],
        scores=logits.softmax(dim=1).gather(1, index)[:, 0],
        classes=chosen,
    )


def fold_normalization(decoder: LinearDecoder) -> tuple[Tensor, Tensor]:
    """Returns weights (K, C + D) and bias (K,) that take features as they come from the pool.

    Those of the linear layer where nothing normalises before it; behind a BatchNorm of mean m and
    variance v, w / sqrt(v + eps) and b - w m / sqrt(v + eps).
    """
    weights, bias = decoder.classifier.weight.float(), decoder.classifier.bias.float()
    norm = decoder.norm
    if not isinstance(norm, nn.BatchNorm1d):
        return weights, bias
    assert norm.running_mean is not None
    assert norm.running_var is not None
    folded = weights * torch.rsqrt(norm.running_var.float() + norm.eps)
    return folded, bias - folded @ norm.running_mean.float()
