# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class layers of real detectors: a class keeps its outputs by its name; other classes are new."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import Tensor, nn

from qbheat_det.checkpoint.matching import carry_over_rows, compare_classes, fit_weights
from qbheat_det.checkpoint.report import ClassChange
from qbheat_det.core.errors import UserError

OLD = ("cat", "dog", "bird", "fish")
NEW = ("zebra", "bird", "cat", "ant", "dog")
SAME_NUMBER = ("dog", "cat", "zebra", "bird")


def _box_predictor(num_classes: int, *, agnostic: bool = False) -> nn.Module:
    box2box = Box2BoxTransform((1, 1, 1, 1))
    return FastRCNNOutputLayers(
        ShapeSpec(8), box2box_transform=box2box, num_classes=num_classes,
        cls_agnostic_bbox_reg=agnostic,
    )  # fmt: skip


def _mask_head(num_classes: int) -> nn.Module:
    shape = ShapeSpec(channels=8, width=7, height=7)
    return MaskRCNNConvUpsampleHead(shape, num_classes=num_classes, conv_dims=[8, 8])


# By the name of the layers in a detector: a builder, an input, and per-class outputs (…, K, X) with
# those of no class.
Outputs = Callable[[Any, Tensor, int], tuple[Tensor, Tensor]]
EMPTY = torch.zeros(0)
CASES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], Outputs]] = {
    "decoder.class_embed": (
        lambda k: nn.Linear(8, k + 1),
        (7, 8),
        lambda layer, x, k: (layer(x)[:, :-1, None], layer(x)[:, -1]),
    ),
    "head": (
        lambda k: RetinaNetHead(
            input_shape=[ShapeSpec(8, stride=8)], num_classes=k, num_anchors=3, conv_dims=[8]
        ),
        (2, 8, 3, 4),
        lambda head, x, k: (permute_to_N_HWA_K(head([x])[0][0], k)[..., None], EMPTY),
    ),
    "roi_heads.box_predictor": (
        _box_predictor,
        (6, 8),
        lambda head, x, k: (head(x)[1].view(6, k, 4), head(x)[0][:, -1]),
    ),
    "roi_heads.box_predictor.1": (
        lambda k: _box_predictor(k, agnostic=True),
        (6, 8),
        lambda head, x, k: (head(x)[0][:, :-1, None], head(x)[1]),
    ),
    "roi_heads.mask_head": (
        _mask_head,
        (2, 8, 7, 7),
        lambda head, x, k: (head.layers(x).flatten(2), EMPTY),
    ),
}


@pytest.mark.parametrize("prefix", CASES)
def test_outputs_follow_the_names_of_their_classes(prefix: str) -> None:
    build, size, compute = CASES[prefix]
    names = NEW if prefix != "decoder.class_embed" else SAME_NUMBER
    old, new = build(len(OLD)).eval(), build(len(names)).eval()
    for parameter in (*old.parameters(), *new.parameters()):
        nn.init.normal_(parameter)
    # Layers below the class layers are the same, so that outputs can be compared.
    shared = {k: v for k, v in old.state_dict().items() if "subnet" in k or "mask_fcn" in k or
              "deconv" in k}  # fmt: skip
    new.load_state_dict(shared, strict=False)
    x = torch.randn(size)
    (before, other), (fresh, _) = compute(old, x, len(OLD)), compute(new, x, len(names))
    stored, state = (
        {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
        for module in (old, new)
    )
    fitting, report = fit_weights(stored, state, file="w.pth", old_classes=OLD, classes=names)
    assert report.find_errors(new_parts=False) == []
    new.load_state_dict({key.removeprefix(f"{prefix}."): t for key, t in fitting.items()})
    after, other_after = compute(new, x, len(names))
    torch.testing.assert_close(other_after, other)
    for index, name in enumerate(names):
        expected = before[..., OLD.index(name), :] if name in OLD else fresh[..., index, :]
        torch.testing.assert_close(after[..., index, :], expected)


def test_other_numbers_of_rows_do_not_fit_and_ambiguous_names_are_refused() -> None:
    change = compare_classes(OLD, NEW, file="w.pth")
    for name, stored, fresh in (
        ("decoder.class_embed.weight", (81, 8), (6, 8)),  # rows of other classes than named
        ("decoder.class_embed.weight", (5, 8), (6, 9)),
        ("head.cls_score.weight", (12, 8, 3, 3), (10, 8, 3, 3)),  # three anchors, and two
        ("head.cls_score.weight", (13, 8, 3, 3), (15, 8, 3, 3)),
        ("decoder.bbox_embed.weight", (5, 8), (6, 8)),  # no class layer
    ):
        assert carry_over_rows(name, torch.ones(stored), torch.ones(fresh), change) is None
    only = ClassChange(("cat",), ("dog",))  # whose rows are not shared
    for name, rows in (("box_predictor.bbox_pred.weight", 4), ("mask_head.predictor.bias", 1)):
        taken = carry_over_rows(name, torch.ones(rows, 2), torch.zeros(rows, 2), only)
        torch.testing.assert_close(taken, torch.zeros(rows, 2))

    assert compare_classes(OLD, OLD, file="w.pth") is compare_classes((), NEW, file="w.pth") is None
    with pytest.raises(UserError, match="'cat'"):
        compare_classes(("cat", "dog", "cat"), NEW, file="w.pth")
