# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the classifiers compute; their exact sizes are tests/analysis/test_complexity.py's."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from detectron2.layers import ShapeSpec
from torch import nn
from torch.testing import assert_close

from qbheat_det.modeling.classification import LinearDecoder, TransformerDecoder

SHAPE = {"s16_expanded": ShapeSpec(channels=12, stride=16), "tokens": ShapeSpec(channels=8)}


@pytest.fixture
def features() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "s16_expanded": torch.randn(4, 12, 3, 5, generator=generator),
        "tokens": torch.randn(4, 6, 8, generator=generator),
    }


def test_the_linear_decoder_reads_the_pooled_map_and_the_first_token(
    features: dict[str, torch.Tensor],
) -> None:
    decoder = LinearDecoder(input_shape=SHAPE, num_classes=7)
    logits = decoder(features)
    for image in range(4):
        pooled = [features["s16_expanded"][image, c].mean() for c in range(12)]
        vector = torch.cat([torch.stack(pooled), features["tokens"][image, 0]])
        assert_close(logits[image], decoder.classifier.weight @ vector + decoder.classifier.bias)


@pytest.mark.parametrize("make", [LinearDecoder, partial(TransformerDecoder, dim=64)])
def test_without_tokens_the_map_alone_is_read(
    features: dict[str, torch.Tensor], make: Callable[..., nn.Module]
) -> None:
    shape = {"s16_expanded": SHAPE["s16_expanded"]}
    both = make(input_shape=SHAPE, num_classes=7).eval()
    alone = make(input_shape=shape, num_classes=7).eval()
    state = both.state_dict()
    state["classifier.weight"] = state["classifier.weight"][:, :-8].clone()
    alone.load_state_dict(state)
    without_token = features | {"tokens": torch.zeros(4, 6, 8)}
    assert_close(alone({"s16_expanded": features["s16_expanded"]}), both(without_token))
