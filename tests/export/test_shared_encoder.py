# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models taken apart behind a shared backbone: the parts give what the whole models give."""

from typing import Any

import pytest
import torch
from qbheat_det.engine.exporting.deployable import DeployableModel, build_deployable
from qbheat_det.engine.exporting.split import SplitParts, split_models
from qbheat_det.engine.exporting.split_export import name_heads
from torch import Tensor

from qbheat_det.core.errors import UserError
from tests.export.tiny_models import build, make_config


def _deployable(kind: str, seeds: dict[str, int] | None = None, **changes: Any) -> DeployableModel:
    cfg = make_config(kind, **changes)
    return build_deployable(build(cfg, **(seeds or {})), cfg)


def _images(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8)


def _assert_equal(parts: SplitParts, whole: dict[str, DeployableModel], images: Tensor) -> None:
    with torch.no_grad():
        *maps, sizes = parts.encoder(images)
        features = dict(zip(parts.encoder.names, maps, strict=True))
        for name, model in whole.items():
            head = parts.heads[name]
            outputs = head([features[read] for read in head.names], sizes)
            torch.testing.assert_close(outputs, model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["retinanet", "mf_detr"])
def test_heads_of_one_kind_share_an_encoder_on_images_of_any_size(kind: str) -> None:
    whole = {name: _deployable(kind, {"head_seed": seed}) for seed, name in enumerate("ab")}
    parts = split_models(whole)
    assert parts.multiple_of == 0
    _assert_equal(parts, whole, _images(75, 90))


def test_heads_of_two_kinds_share_one_where_no_image_is_padded() -> None:
    whole = {kind: _deployable(kind) for kind in ("retinanet", "mf_detr")}
    parts = split_models(whole)
    # Neither backbone alone gives all three: the pyramid's ends at s16, MF-DETR's has no s16.
    assert parts.encoder_info.outputs == ("s8", "s16", "s16_expanded", "sizes")
    assert parts.multiple_of == 16
    _assert_equal(parts, whole, _images(96, 120))  # 64 x 80 after the resize


def test_the_encoder_is_known_again_by_its_weights_and_pixels_alone() -> None:
    one, two, other = (
        split_models({"a": _deployable("two_maps", seeds)}).identity
        for seeds in ({"head_seed": 1}, {"head_seed": 2}, {"backbone_seed": 5})
    )
    assert one == two
    assert one != other
    changed = _deployable("two_maps", {"head_seed": 1}, INPUT__MIN_SIZE_TEST=80)
    assert split_models({"a": changed}).identity != one


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"seeds": {"backbone_seed": 5}}, "tensors differ, such as"),
        ({"INPUT__MIN_SIZE_TEST": 80}, "the size of test images is 64 to 112 pixels there and 80"),
        ({"MODEL__PIXEL_MEAN": [1.0, 2.0, 3.0]}, "MODEL.PIXEL_MEAN is"),
        ({"INPUT__FORMAT": "BGR"}, "INPUT.FORMAT is RGB there and BGR here"),
    ],
    ids=["weights", "size", "mean", "format"],
)
def test_models_that_do_not_share_an_encoder_are_refused(
    other: dict[str, Any], reason: str
) -> None:
    models = {"fish": _deployable("two_classes"), "boats": _deployable("two_maps", **other)}
    with pytest.raises(UserError, match=f"'fish' and 'boats' cannot share .*{reason}"):
        split_models(models)


def test_backbones_of_two_kinds_are_refused() -> None:
    models = {"a": _deployable("retinanet"), "b": _deployable("two_maps")}
    with pytest.raises(UserError, match="they are MobileFormer and TwoMaps"):
        split_models(models)


def test_heads_are_called_as_asked_or_after_their_file_or_their_run() -> None:
    words = ["a=x/model_final.pth", "runs/fish/model_final.safetensors", "runs/boats.pth"]
    assert list(name_heads(words).items()) == [
        ("a", "x/model_final.pth"),
        ("fish", "runs/fish/model_final.safetensors"),
        ("boats", "runs/boats.pth"),
    ]
    assert list(name_heads(["qbheat://retinanet/285M_aquarium"])) == ["285M_aquarium"]
    with pytest.raises(UserError, match="two heads are called 'fish'"):
        name_heads(["fish/model_final.pth", "fish/model_best.pth"])
    with pytest.raises(UserError, match="is no name for a head"):
        name_heads(["a b=fish.pth"])
