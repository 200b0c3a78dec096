# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A backbone without its encoder: features from the images, and the encoder's weights by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import CachedBackbone, MobileFormer, arch_of_rows
from qbheat_det.modeling.image_model import find_cached_images

ARCH = arch_of_rows(
    num_tokens=2, token_dim=32, stem=8, blocks=[("lite", 8, 8), ("down", 16, 8, 16)], expanded=12
)
OUTPUTS = ["s4", "tokens"]


class Model(nn.Module):
    """Returns what its backbone gives."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(1, 1)

    def forward(self, batched_inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        cached = find_cached_images(batched_inputs, 0, torch.device("cpu"))
        if cached is None:
            images = torch.stack([entry["image"] for entry in batched_inputs])
        features: dict[str, Tensor] = self.backbone(images if cached is None else cached.tensor)
        return features


def make_encoder(seed: int = 0) -> MobileFormer:
    torch.manual_seed(seed)
    return MobileFormer(arch=ARCH, out_features=OUTPUTS, freeze_at=3)


def make_cached(seed: int = 0, **kwargs: Any) -> tuple[Model, CachedBackbone]:
    cached = CachedBackbone(encoder=make_encoder(seed), outputs=OUTPUTS, **kwargs)
    model = Model(cached)
    return model, cached


def entries_of(features: dict[str, Tensor], size: tuple[int, int]) -> list[dict[str, Any]]:
    """Entries of images that need no memory."""
    image = torch.zeros(()).expand(3, *size)
    return [
        {"image": image, "features": {name: value[i] for name, value in features.items()}}
        for i in range(len(features["s4"]))
    ]


def random_entries(rows: int = 2) -> list[dict[str, Any]]:
    features = {"s4": torch.rand(1, 8, rows, 2), "tokens": torch.rand(1, 2, 32)}
    return entries_of(features, (8, 8))


@pytest.mark.parametrize("channels_last", [False, True])
def test_features_come_back_as_they_were_encoded(channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    online = Model(make_encoder()).to(memory_format=layout)
    model, cached = make_cached(channels_last=channels_last)
    cached.encoder.to(memory_format=layout)
    images = torch.rand(2, 3, 18, 22)
    expected = online([{"image": image} for image in images])
    with cached.encoding(torch.device("cpu")):
        encoded = cached.encode(model, [{"image": image} for image in images])
    cached.trust()
    found = model(batched_inputs=entries_of(encoded, (18, 22)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found["s4"].is_contiguous(memory_format=layout)


def test_smaller_images_are_filled_up_with_zeros_and_half_precision_becomes_single() -> None:
    model, cached = make_cached()
    cached.trust()
    small, large = torch.rand(8, 2, 3).half(), torch.rand(8, 5, 4).half()
    tokens = torch.rand(2, 32).half()
    image = torch.zeros(()).expand(3, 17, 16)
    found = model(
        [{"image": image, "features": {"s4": s4, "tokens": tokens}} for s4 in (small, large)]
    )
    expected = torch.zeros(2, 8, 5, 4)
    expected[0, :, :2, :3], expected[1] = small, large
    torch.testing.assert_close(found["s4"], expected, rtol=0, atol=0)
    torch.testing.assert_close(found["tokens"], torch.stack([tokens, tokens]).float())


def test_state_has_the_names_and_values_of_the_encoder_and_nothing_is_a_parameter() -> None:
    online, (model, cached) = Model(make_encoder()), make_cached()
    online.head = model.head
    assert list(model.state_dict()) == list(online.state_dict())
    torch.testing.assert_close(model.state_dict(), online.state_dict(), rtol=0, atol=0)
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert cached.output_shape() == online.backbone.output_shape()
    assert cached.size_divisibility == online.backbone.size_divisibility


def test_loading_fills_the_encoder_refuses_a_part_and_says_what_is_not_known() -> None:
    model, cached = make_cached()
    wanted = Model(make_encoder(1)).state_dict()
    part = {name: value for name, value in wanted.items() if name != "backbone.tokens"}
    with pytest.raises(UserError, match="tokens"):
        model.load_state_dict(part, strict=False)
    found = model.load_state_dict({**wanted, "backbone.other": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["backbone.other"]
    model.load_state_dict(wanted)
    torch.testing.assert_close(
        dict(cached.encoder.state_dict()), dict(make_encoder(1).state_dict()), rtol=0, atol=0
    )
    with pytest.raises(RuntimeError):
        model.load_state_dict({**wanted, "backbone.tokens": torch.zeros(1, 1)})


def test_features_are_refused_before_they_are_trusted_and_after_other_weights_are_loaded() -> None:
    model, cached = make_cached()
    entries = random_entries()
    with pytest.raises(UserError):
        model(entries)
    cached.trust()
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same
    model(entries)
    model.load_state_dict({**model.state_dict(), "backbone.tokens": torch.ones(2, 32)})
    with pytest.raises(UserError):
        model(entries)


def test_a_copy_of_the_model_reads_its_own_entries_and_shares_the_encoder() -> None:
    model, cached = make_cached()
    cached.trust()
    other = copy.deepcopy(model)
    first, second = random_entries(), random_entries()
    for it, entries in ((model, first), (other, second), (model, second)):
        torch.testing.assert_close(it(entries)["s4"][0], entries[0]["features"]["s4"])
    assert isinstance(other.backbone, CachedBackbone)
    assert other.backbone is not cached
    assert other.backbone.encoder is cached.encoder


def test_images_without_features_or_with_those_of_another_image_are_refused() -> None:
    model, cached = make_cached()
    cached.trust()
    with pytest.raises(UserError):
        model([{"image": torch.zeros(3, 8, 8)}])
    with pytest.raises(UserError):
        model(random_entries(rows=9))
