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


def test_probing_normalises_the_features_of_a_batch_without_parameters(
    features: dict[str, torch.Tensor],
) -> None:
    plain = LinearDecoder(input_shape=SHAPE, num_classes=7)
    probe = LinearDecoder(input_shape=SHAPE, num_classes=7, normalize=True)
    probe.classifier.load_state_dict(plain.classifier.state_dict())
    assert len(list(probe.parameters())) == len(list(plain.parameters()))
    scaled = {name: 10 * value + 3 for name, value in features.items()}
    assert_close(probe(scaled), probe(features), atol=1e-4, rtol=1e-4)


def test_only_the_first_token_reaches_the_transformer_decoder(
    features: dict[str, torch.Tensor],
) -> None:
    decoder = TransformerDecoder(input_shape=SHAPE, num_classes=7, dim=64).eval()
    features["tokens"].requires_grad_(True)
    (gradient,) = torch.autograd.grad(decoder(features).square().sum(), features["tokens"])
    assert gradient[:, 0].abs().min() > 0
    assert_close(gradient[:, 1:], torch.zeros(4, 5, 8), atol=0, rtol=0)


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


def test_bad_arguments_are_named() -> None:
    tokens = {"tokens": SHAPE["tokens"]}
    with pytest.raises(ValueError, match="s16_expanded"):
        LinearDecoder(input_shape=tokens, num_classes=7)
    with pytest.raises(ValueError):
        TransformerDecoder(input_shape=SHAPE, num_classes=7, dim=100)
    with pytest.raises(ValueError, match="DEPTH"):
        TransformerDecoder(input_shape=SHAPE, num_classes=7, dim=64, depth=0)
