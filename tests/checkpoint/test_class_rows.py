# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class layers carried over by name, against a loop over the classes of real detectors."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import Tensor, nn

from qbheat_det.checkpoint.class_rows import carry_over_rows, compare_classes
from qbheat_det.checkpoint.matching import fit_weights
from qbheat_det.core.errors import UserError

OLD = ("cat", "dog", "bird", "fish")
NEW = ("zebra", "bird", "cat", "ant", "dog")
SAME_NUMBER = ("dog", "cat", "zebra", "bird")


def _carry(old_module: nn.Module, new_module: nn.Module, name: str, new: tuple[str, ...]) -> None:
    """Fills ``new_module`` through the package, under the names of the whole detector."""
    old = {f"{name}.{key}": value for key, value in old_module.state_dict().items()}
    state = {f"{name}.{key}": value for key, value in new_module.state_dict().items()}
    fitting, report = fit_weights(old, state, file="w.pth", old_classes=OLD, classes=new)
    assert report.find_errors(new_parts=False) == []
    assert report.class_change is not None
    new_module.load_state_dict({key[len(name) + 1 :]: value for key, value in fitting.items()})


def _randomise(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.eval()


def _check_columns(old: Tensor, new: Tensor, fresh: Tensor, names: tuple[str, ...]) -> None:
    """Compares outputs (…, K, …), classes last but one, class by class."""
    for index, name in enumerate(names):
        expected = old[..., OLD.index(name), :] if name in OLD else fresh[..., index, :]
        torch.testing.assert_close(new[..., index, :], expected)


@pytest.mark.parametrize("names", [NEW, SAME_NUMBER])
def test_mf_detrs_logits_follow_their_names_and_no_object_stays_last(
    names: tuple[str, ...],
) -> None:
    x = torch.randn(7, 16)
    old = _randomise(nn.Linear(16, len(OLD) + 1))
    new = _randomise(nn.Linear(16, len(names) + 1))
    fresh = new(x)
    _carry(old, new, "decoder.class_embed", names)
    _check_columns(old(x)[:, :-1, None], new(x)[:, :-1, None], fresh[:, :-1, None], names)
    torch.testing.assert_close(new(x)[:, -1], old(x)[:, -1])


@pytest.mark.parametrize("names", [NEW, SAME_NUMBER])
def test_an_image_classifiers_logits_follow_their_names(names: tuple[str, ...]) -> None:
    x = torch.randn(7, 16)
    old = _randomise(nn.Linear(16, len(OLD)))
    new = _randomise(nn.Linear(16, len(names)))
    fresh = new(x)
    _carry(old, new, "decoder.classifier", names)
    _check_columns(old(x)[..., None], new(x)[..., None], fresh[..., None], names)


@pytest.mark.parametrize("names", [NEW, SAME_NUMBER])
def test_retinanets_scores_follow_their_names_at_every_anchor(names: tuple[str, ...]) -> None:
    def build(num_classes: int) -> nn.Module:
        shape = [ShapeSpec(channels=8, stride=8)]
        return _randomise(
            RetinaNetHead(input_shape=shape, num_classes=num_classes, num_anchors=3, conv_dims=[8])
        )

    def scores(head: nn.Module, num_classes: int) -> Tensor:
        logits, _ = head([x])
        return permute_to_N_HWA_K(logits[0], num_classes)[..., None]

    x = torch.randn(2, 8, 3, 4)
    old, new = build(len(OLD)), build(len(names))
    new.cls_subnet.load_state_dict(old.cls_subnet.state_dict())
    fresh = scores(new, len(names))
    _carry(old, new, "head", names)
    _check_columns(scores(old, len(OLD)), scores(new, len(names)), fresh, names)


@pytest.mark.parametrize("names", [NEW, SAME_NUMBER])
@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("place", ["box_predictor", "box_predictor.2"])
def test_faster_rcnns_scores_and_boxes_follow_their_names(
    names: tuple[str, ...], agnostic: bool, place: str
) -> None:
    def build(num_classes: int) -> nn.Module:
        layers = FastRCNNOutputLayers(
            ShapeSpec(channels=8),
            box2box_transform=Box2BoxTransform((1, 1, 1, 1)),
            num_classes=num_classes,
            cls_agnostic_bbox_reg=agnostic,
        )
        return _randomise(layers)

    x = torch.randn(6, 8)
    old, new = build(len(OLD)), build(len(names))
    fresh_scores, fresh_boxes = new(x)
    _carry(old, new, f"roi_heads.{place}", names)
    (old_scores, old_boxes), (scores, boxes) = old(x), new(x)
    _check_columns(
        old_scores[:, :-1, None], scores[:, :-1, None], fresh_scores[:, :-1, None], names
    )
    torch.testing.assert_close(scores[:, -1], old_scores[:, -1])  # background
    if agnostic:
        torch.testing.assert_close(boxes, old_boxes)
    else:
        _check_columns(*(t.view(6, -1, 4) for t in (old_boxes, boxes, fresh_boxes)), names)


@pytest.mark.parametrize("names", [NEW, SAME_NUMBER])
@pytest.mark.parametrize("agnostic", [False, True])
def test_mask_rcnns_masks_follow_their_names(names: tuple[str, ...], agnostic: bool) -> None:
    def build(num_classes: int) -> nn.Module:
        num_masks = 1 if agnostic else num_classes
        shape = ShapeSpec(channels=4, width=7, height=7)
        return _randomise(MaskRCNNConvUpsampleHead(shape, num_classes=num_masks, conv_dims=[4, 4]))

    x = torch.randn(2, 4, 7, 7)
    old, new = build(len(OLD)), build(len(names))
    fresh = {key: value.clone() for key, value in new.state_dict().items()}
    _carry(old, new, "roi_heads.mask_head", names)
    if agnostic:
        torch.testing.assert_close(new.layers(x), old.layers(x))
        return
    fresh_head = build(len(names))
    fresh_head.load_state_dict({**new.state_dict(), **{
        key: value for key, value in fresh.items() if key.startswith("predictor")
    }})  # fmt: skip
    masks = [head.layers(x).flatten(2) for head in (old, new, fresh_head)]
    _check_columns(*masks, names)


def test_the_rows_of_one_class_only_are_its_own() -> None:
    change = compare_classes(("cat",), ("dog",), file="w.pth")
    assert change is not None
    stored, fresh = torch.ones(4, 2), torch.zeros(4, 2)
    for name in ("roi_heads.box_predictor.bbox_pred.weight",):
        torch.testing.assert_close(carry_over_rows(name, stored, fresh, change), fresh)
    name = "roi_heads.mask_head.predictor.bias"
    torch.testing.assert_close(
        carry_over_rows(name, torch.ones(1), torch.zeros(1), change), torch.zeros(1)
    )


@pytest.mark.parametrize(
    ("name", "stored", "fresh"),
    [
        ("decoder.class_embed.weight", (81, 8), (6, 8)),  # the file has not the rows it names
        ("decoder.class_embed.weight", (5, 8), (81, 8)),
        ("decoder.class_embed.weight", (5, 8), (6, 9)),
        ("head.cls_score.weight", (12, 8, 3, 3), (10, 8, 3, 3)),  # three anchors, and two
        ("head.cls_score.weight", (13, 8, 3, 3), (15, 8, 3, 3)),
        ("decoder.bbox_embed.weight", (5, 8), (6, 8)),  # no class layer
    ],
)
def test_rows_that_are_not_those_of_the_classes_do_not_fit(
    name: str, stored: tuple[int, ...], fresh: tuple[int, ...]
) -> None:
    change = compare_classes(OLD, NEW, file="w.pth")
    assert change is not None
    assert carry_over_rows(name, torch.ones(stored), torch.ones(fresh), change) is None


def test_a_change_of_classes_lists_each_of_them() -> None:
    assert str(compare_classes(OLD, NEW, file="w.pth")) == (
        "classes kept by name (3): bird, cat, dog; new (2): zebra, ant; dropped (1): fish"
    )
    assert compare_classes(OLD, OLD, file="w.pth") is None
    assert compare_classes((), NEW, file="w.pth") is None
    assert compare_classes(OLD, (), file="w.pth") is None


def test_two_classes_of_one_name_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match=r"'w\.pth' has two classes named 'cat'"):
        compare_classes(("cat", "dog", "cat"), NEW, file="w.pth")
    with pytest.raises(UserError, match="the data has two classes named 'ant'"):
        compare_classes(OLD, ("ant", "ant"), file="w.pth")
    assert compare_classes(("cat", "cat"), ("cat", "cat"), file="w.pth") is None
