# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MFDecoder`` against the naive second implementation; queries selected from the maps."""

import math

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.structures import Boxes
from torch.testing import assert_close
from torchvision.ops import box_convert

from qbheat_det.modeling.atss import AtssAssigner
from qbheat_det.modeling.detr import MFDecoder
from qbheat_det.modeling.detr.criterion import Targets
from qbheat_det.modeling.detr.decoder_block import DecoderWidths
from qbheat_det.modeling.detr.query_selection import QuerySelection, refine_boxes

from ..reference_mf_decoder import mf_decoder
from ..reference_mobile_former import Weights, randomise_

BLOCKS = {"522": (5, 2, 2), "211": (2, 1, 1)}
# Exact numbers of parameters with 92 logits.
BLOCK_PARAMETERS = {
    "522": [[2_106_368] * 5, [1_939_776] * 2, [1_939_776, 1_185_024]],
    "211": [[2_106_368] * 2, [1_939_776], [1_185_024]],
}


# The same code at a size that is quick in double precision.
SMALL = DecoderWidths(dim=64, num_heads=4, hidden=96, expansion=2)


def build(channels, blocks, **options):
    fine, coarse = channels
    shapes = [ShapeSpec(channels=fine, stride=8), ShapeSpec(channels=coarse, stride=16)]
    return MFDecoder(input_shape=shapes, num_blocks=blocks, **options)


def small_decoder(blocks):
    decoder = build((12, 20), blocks, num_classes=5, num_queries=9, widths=SMALL)
    randomise_(decoder)
    return decoder.double().eval()


def maps(channels, size, seed=0):
    """The backbone's two maps of one image of this size in pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(width, *(-(-side // stride) for side in size), generator=generator).double()
        for width, stride in zip(channels, (8, 16), strict=True)
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_parameter_counts_of_blocks_are_the_published_ones(name):
    decoder = build((48, 720), BLOCKS[name], num_classes=91)  # the highest id of COCO, plus one
    counts = [
        [sum(p.numel() for p in block.parameters()) for block in level] for level in decoder.levels
    ]
    assert counts == BLOCK_PARAMETERS[name]


@pytest.mark.parametrize("size", [(50, 77), (8, 170), (1, 33)], ids=str)
@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 1, 3)], ids=str)
def test_every_prediction_equals_the_naive_implementation(blocks, size):
    decoder, features = small_decoder(blocks), maps((12, 20), size)
    weights = Weights(decoder)
    sizes = {"queries": 9, "dim": 64, "heads": 4, "hidden": 96, "expansion": 2}
    decoder.training = True  # all blocks; its parts stay in evaluation
    with torch.no_grad():
        outputs = decoder([feature[None] for feature in features])
        expected = mf_decoder(weights, *features, blocks, 5, **sizes)
    assert len(outputs["pred_boxes"]) == len(expected) == sum(blocks)
    for key, tensor in outputs.items():
        wanted = torch.stack([prediction[key] for prediction in expected])
        spread = float(wanted.std(dim=1).min())  # among the queries
        assert spread > 1e-4, f"{key} is too flat to tell anything"
        assert_close(tensor[:, 0].double(), wanted, rtol=0, atol=1e-6, msg=key)
    assert weights.names_read == set(weights.tensors)


def test_evaluation_predicts_from_the_last_block_and_training_from_all():
    decoder = small_decoder((1, 1, 2))
    features = [feature[None] for feature in maps((12, 20), (40, 56))]
    with torch.no_grad():
        last = decoder(features)
        decoder.training = True  # its parts stay in evaluation: no dropout, stored statistics
        for key, tensor in decoder(features).items():
            assert len(tensor) == 4
            assert_close(tensor[-1:], last[key])


CLASSES, QUERIES, DIM = 3, 7, 64
SHAPES = [ShapeSpec(channels=c, stride=s) for c, s in ((16, 8), (24, 16), (40, 32))]


def build_decoder(shapes=SHAPES):
    torch.manual_seed(0)
    selection = QuerySelection(num_classes=CLASSES, num_queries=QUERIES, dim=DIM)
    widths = DecoderWidths(dim=DIM, num_heads=4, hidden=32, expansion=2, dropout=0.0)
    return MFDecoder(
        input_shape=shapes,
        num_classes=CLASSES,
        num_queries=QUERIES,
        num_blocks=(1, 1, 1),
        widths=widths,
        selection=selection,
    )


def features(height, width, images=2):
    return [
        torch.randn(images, s.channels, -(-height // s.stride), -(-width // s.stride)).double()
        for s in SHAPES
        if s.channels and s.stride
    ]


def test_an_untrained_decoder_returns_what_was_selected():
    decoder = build_decoder()
    with torch.no_grad():
        outputs = decoder([x.float() for x in features(64, 96)])
    proposals = outputs["proposals"]
    scores = proposals.logits[..., :-1].amax(dim=-1)
    sizes = [(2, 3), (4, 6), (8, 12)]  # coarsest first, as the levels
    for image in range(2):
        start, peaks = 0, []
        for height, width in sizes:
            level = scores[image, start : start + height * width].reshape(height, width)
            for row in range(height):
                for column in range(width):
                    around = level[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
                    if level[row, column] >= around.max():
                        peaks.append(start + row * width + column)
            start += height * width
        peaks.sort(key=lambda place: -float(scores[image, place]))
        assert len(peaks) >= QUERIES
        chosen = peaks[:QUERIES]
        assert_close(outputs["pred_logits"][-1, image], proposals.logits[image, chosen])
        assert_close(outputs["pred_boxes"][-1, image], proposals.boxes[image, chosen])


def test_the_decoders_predictions_do_not_train_those_of_the_dense_head():
    decoder = build_decoder()
    outputs = decoder([x.float() for x in features(64, 96)])
    (outputs["pred_logits"].sum() + outputs["pred_boxes"].sum()).backward()
    assert decoder.selection.class_embed.weight.grad is None
    assert decoder.selection.bbox_embed.weight.grad is None


def test_boxes_are_moved_by_shares_of_their_sides():
    deltas = torch.tensor([0.5, -1.0, 0.0, math.log(3)])
    moved = refine_boxes(torch.tensor([0.5, 0.4, 0.2, 0.1]), deltas)
    assert_close(moved, torch.tensor([0.5 + 0.5 * 0.2, 0.4 - 0.1, 0.2, 0.3]))


def assign_as_retinanet(boxes, height, width):
    """Returns the box of each position of an image of ``height`` x ``width`` pixels, or -1.

    Boxes are (M, 4), cxcywh in [0, 1]. The anchors are those of a RetinaNet, in pixels.
    """
    levels = []
    for stride in (32, 16, 8):
        rows = [y + stride / 2 for y in range(0, height, stride)]
        grid = [(x + stride / 2, y) for y in rows for x in range(0, width, stride)]
        centers, side = torch.tensor(grid), torch.tensor([width, height]).clamp(max=4 * stride)
        levels.append(Boxes(torch.cat([centers - side / 2, centers + side / 2], dim=1)))
    scale = torch.tensor([width, height] * 2)
    return AtssAssigner()(levels, Boxes(box_convert(boxes, "cxcywh", "xyxy") * scale))


def assign(boxes, padding):
    """Returns the box of each position (N, P) of a batch, or -1; padded to 96 x 64 pixels."""
    decoder = build_decoder()
    with torch.no_grad():
        proposals = decoder([x.float() for x in features(64, 96)], padding)["proposals"]
    targets = Targets.stack([torch.arange(len(each)) % CLASSES for each in boxes], boxes)
    matches = decoder.selection.assign(proposals, targets)
    found = torch.full(proposals.distinct.shape, -1)
    found[matches.image, matches.query] = matches.target
    return found


@pytest.mark.parametrize("counts", [[2, 0], [3, 1], [0, 0]], ids=str)
def test_positions_get_the_boxes_that_retinanets_anchors_get_in_pixels(counts):
    """Images of 96 x 64 and 64 x 64 pixels in one batch; the assignment is that of each alone."""
    torch.manual_seed(1)
    padding = torch.zeros(2, 1, 8, 12, dtype=torch.bool)
    padding[1, ..., 8:] = True
    boxes = [torch.rand(n, 4) * 0.4 + 0.2 for n in counts]
    found = assign(boxes, padding)
    for image, (height, width) in enumerate([(64, 96), (64, 64)]):
        columns = []
        for stride in (32, 16, 8):
            columns += [x < width for _ in range(0, height, stride) for x in range(0, 96, stride)]
        expected = torch.full_like(found[image], -1)
        expected[torch.tensor(columns)] = assign_as_retinanet(boxes[image], height, width)
        assert torch.equal(found[image], expected)


def test_the_least_distance_of_a_position_from_a_side_is_a_hundredth_of_a_pixel():
    boxes = []
    for distance in (0.005, 0.02):  # of the positions at 28 and 36 pixels from the sides
        corners = torch.tensor([[28 - distance, 24.0, 36 + distance, 40.0]])
        boxes.append(box_convert(corners / torch.tensor([96, 64, 96, 64]), "xyxy", "cxcywh"))
    found = assign(boxes, None)
    expected = torch.stack([assign_as_retinanet(each, 64, 96) for each in boxes])
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], found[1])


def test_boxes_start_as_squares_of_four_strides_and_at_most_the_image():
    decoder = build_decoder()
    decoder.selection.bbox_embed.weight.data.zero_()
    boxes = decoder([x.float() for x in features(64, 96)])["proposals"].boxes
    sides = [(1, 1)] * 6 + [(64 / 96, 1)] * 24 + [(32 / 96, 32 / 64)] * 96  # width and height
    assert_close(boxes[..., 2:], torch.tensor(sides).expand(2, -1, -1))
