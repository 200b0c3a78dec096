# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MFDecoder`` against the naive second implementation, parameter by parameter."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.modeling.detr import MFDecoder
from qbheat_det.modeling.detr.decoder_block import DecoderWidths

from ..reference_mf_decoder import mf_decoder
from ..reference_mobile_former import Weights, randomise_

BLOCKS = {"522": (5, 2, 2), "211": (2, 1, 1)}
CHANNELS = {"3.7G": (192, 2880), "1.0G": (96, 1440), "285M": (48, 720)}
COCO_IDS = 91  # the paper's count of classes: the highest category id of COCO, plus one

# Exact numbers of parameters with 92 logits.
PARAMETERS = {
    ("3.7G", "522"): 19_413_216,
    ("1.0G", "522"): 18_635_520,
    ("285M", "522"): 18_246_672,
    ("3.7G", "211"): 9_214_560,
    ("1.0G", "211"): 8_436_864,
    ("285M", "211"): 8_048_016,
}
BLOCK_PARAMETERS = {
    "522": [[2_106_368] * 5, [1_939_776] * 2, [1_939_776, 1_185_024]],
    "211": [[2_106_368] * 2, [1_939_776], [1_185_024]],
}


# The same code at a size that is quick in double precision.
SMALL = DecoderWidths(dim=64, num_heads=4, hidden=96, expansion=2)


def build(channels: tuple[int, int], blocks: Sequence[int], **options: Any) -> MFDecoder:
    fine, coarse = channels
    shapes = [ShapeSpec(channels=fine, stride=8), ShapeSpec(channels=coarse, stride=16)]
    return MFDecoder(input_shape=shapes, num_blocks=blocks, **options)


def small_decoder(blocks: Sequence[int]) -> MFDecoder:
    decoder = build((12, 20), blocks, num_classes=5, num_queries=9, widths=SMALL)
    randomise_(decoder)
    return decoder.double().eval()


def maps(channels: tuple[int, int], size: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """The backbone's two maps of one image of this size in pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(width, *(-(-side // stride) for side in size), generator=generator).double()
        for width, stride in zip(channels, (8, 16), strict=True)
    ]


@pytest.mark.parametrize(("variant", "name"), PARAMETERS)
def test_parameter_counts_are_the_published_ones(variant: str, name: str) -> None:
    decoder = build(CHANNELS[variant], BLOCKS[name], num_classes=COCO_IDS)
    assert sum(p.numel() for p in decoder.parameters()) == PARAMETERS[variant, name]
    counts = [
        [sum(p.numel() for p in block.parameters()) for block in level] for level in decoder.levels
    ]
    assert counts == BLOCK_PARAMETERS[name]


@pytest.mark.parametrize("size", [(50, 77), (8, 170), (1, 33)], ids=str)
@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 1, 3)], ids=str)
def test_every_prediction_equals_the_naive_implementation(
    blocks: tuple[int, int, int], size: tuple[int, int]
) -> None:
    decoder, features = small_decoder(blocks), maps((12, 20), size)
    weights = Weights(decoder)
    sizes = {"queries": 9, "dim": 64, "heads": 4, "hidden": 96, "expansion": 2}
    with torch.no_grad():
        queries = decoder.refine_queries([feature[None] for feature in features])
        outputs = decoder.predict(queries)
        expected = mf_decoder(weights, *features, blocks, 5, **sizes)
    assert len(queries) == len(expected) == sum(blocks)
    for key, tensor in outputs.items():
        wanted = torch.stack([prediction[key] for prediction in expected])
        spread = float(wanted.std(dim=1).min())  # among the queries
        assert spread > 1e-4, f"{key} is too flat to tell anything"
        assert_close(tensor[:, 0].double(), wanted, rtol=0, atol=1e-6, msg=key)
    assert weights.names_read == set(weights.tensors)


def test_evaluation_predicts_from_the_last_block_and_training_from_all() -> None:
    decoder = small_decoder((1, 1, 2))
    features = [feature[None] for feature in maps((12, 20), (40, 56))]
    with torch.no_grad():
        states = decoder.refine_queries(features)
        outputs = decoder(features)
        for key, tensor in decoder.predict(states[-1:]).items():
            assert_close(outputs[key], tensor)
        decoder.training = True  # its parts stay in evaluation: no dropout, stored statistics
        outputs = decoder(features)
        for key, tensor in decoder.predict(states).items():
            assert_close(outputs[key], tensor)
