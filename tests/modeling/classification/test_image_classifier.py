# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an image classifier computes, counts and leaves alone."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from detectron2.modeling import build_model
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.classification import (
    TIMM_NAMES,
    ImageClassifier,
    LinearDecoder,
    TimmMobileFormer,
)
from tests.modeling.tiny_pretraining import SMALL_ARCH, make_tiny_config

TRANSFORMER = {"CLASSIFIER.DECODER": "transformer", "CLASSIFIER.WIDTH": 64}
TOKENS = {"MOBILE_FORMER.OUT_FEATURES": ["s16_expanded", "tokens"]}
RESNET = {
    "BACKBONE.NAME": "timm:resnet18",
    "TIMM.OUT_FEATURES": ["s32"],
    "CLASSIFIER.IN_FEATURE": "s32",
}


def make_model(values: dict[str, Any] | None = None) -> ImageClassifier:
    """With other keys below ``MODEL``."""
    torch.manual_seed(0)
    cfg = make_tiny_config("ImageClassifier")
    for key, value in {"CLASSIFIER.NUM_CLASSES": 5, **(values or {})}.items():
        cfg.merge_from_list([f"MODEL.{key}", value])
    model = build_model(cfg)
    assert isinstance(model, ImageClassifier)
    return model


def make_batch(count: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, 64, 64), generator=generator, dtype=torch.uint8)
    return [
        {"image": image, "label": index % 5, "file_name": f"{index}.png"}
        for index, image in enumerate(images)
    ]


@pytest.mark.parametrize(
    "values",
    [TOKENS, {**TOKENS, **TRANSFORMER}, RESNET],
    ids=["with token", "transformer", "ResNet"],
)
def test_loss_and_scores_are_those_of_images_one_by_one(values: dict[str, Any]) -> None:
    model, batch = make_model(values).eval(), make_batch()
    mean, std = (t.view(3, 1, 1) for t in (model.pixel_mean, model.pixel_std))
    losses, agree = [], []
    with torch.no_grad():
        results = model(batch)
        for entry, result in zip(batch, results, strict=True):
            features = model.backbone(((entry["image"] - mean) / std)[None])
            scores = model.decoder(features)[0].exp()
            scores /= scores.sum()
            assert_close(result["scores"], scores, rtol=1e-4, atol=1e-5)
            losses.append(-scores[entry["label"]].log())
            agree.append(float(scores.argmax() == entry["label"]))
        model.training = True  # BatchNorm goes on with its running statistics
        loss = model(batch)
    assert list(loss) == ["loss_cls"]
    assert_close(loss["loss_cls"], torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)
    assert_close(model.metrics["accuracy"], torch.tensor(100 * np.mean(agree)).float())


@pytest.mark.parametrize("values", [{}, RESNET], ids=["MobileFormer", "ResNet"])
def test_a_frozen_encoder_is_bit_equal_after_training_statistics_too(
    values: dict[str, Any],
) -> None:
    model = make_model({**values, "BACKBONE.FREEZE_AT": 5, "MOBILE_FORMER.DROP_PATH": 0.5})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.decoder.parameters(), lr=0.1)
    model.train()
    for _ in range(3):
        (loss,) = model(make_batch()).values()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name


@pytest.mark.parametrize(
    "opts", [{"MIXUP": 0.8}, {"CUTMIX": 1.0, "LABEL_SMOOTHING": 0.1}, {"LABEL_SMOOTHING": 0.1}]
)
def test_the_loss_in_training_is_against_the_targets_of_what_the_encoder_sees(
    opts: dict[str, float],
) -> None:
    keys = {f"CLASSIFIER.{key}": value for key, value in opts.items()}
    model, batch = make_model(keys).train(), make_batch()
    seen: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    np.random.seed(3)
    loss = model(batch)["loss_cls"]
    np.random.seed(3)
    labels = torch.tensor([entry["label"] for entry in batch])
    images, targets = model.mixing(model.preprocess_image(batch), labels)
    assert_close(seen[0], images)
    # The same statistics of the batch, and no dropout.
    logs = model.classify(images).log_softmax(dim=1)
    assert_close(loss, -(targets * logs).sum(dim=1).mean())
    # Not by chance that of the labels alone.
    hard = -logs[torch.arange(len(batch)), labels].mean()
    assert abs(float((loss - hard).detach())) > 1e-4


def test_labels_and_sizes_that_do_not_fit_are_named() -> None:
    model = make_model()
    batch = make_batch()
    batch[2]["label"] = 5
    with pytest.raises(UserError, match="2\\.png"):
        model(batch)
    del batch[2]["label"]
    with pytest.raises(UserError, match="2\\.png"):
        model(batch)
    batch[1]["image"] = batch[1]["image"][:, :-1]
    with pytest.raises(UserError, match="1\\.png"):
        model(batch)


def _tiny(**kwargs: Any) -> TimmMobileFormer:
    return TimmMobileFormer(**{"arch": SMALL_ARCH, "num_classes": 5, **kwargs}).eval()


def _images(size: int = 64, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size)


@pytest.mark.parametrize(("size", "name"), TIMM_NAMES.items())
def test_timm_lists_all_sizes_and_describes_them(size: str, name: str) -> None:
    assert name in timm.list_models("mobile_former*")
    arch = MOBILE_FORMER_ARCHS[size]
    with torch.device("meta"):
        model = timm.create_model(name)
        features = timm.create_model(name, features_only=True)
    cfg = model.default_cfg
    assert cfg["architecture"] == name
    assert cfg["num_classes"] == model.num_classes == model.get_classifier().out_features == 1000
    for key in ("crop_pct", "interpolation", "mean", "std", "input_size", "pool_size", "license"):
        assert cfg[key]
    names = model.state_dict()
    assert {f"{cfg['classifier']}.weight", f"{cfg['first_conv']}.weight"} <= set(names)
    assert model.num_features == arch.expanded + arch.token_dim
    assert model.head_hidden_size == (arch.head_dim or model.num_features)
    *maps, _, _ = arch.output_shapes().values()
    assert features.feature_info.reduction() == [shape.stride for shape in maps]
    assert features.feature_info.channels() == [shape.channels for shape in maps]


def test_names_outputs_and_scores_are_those_of_backbone_and_linear_decoder() -> None:
    model = _tiny()
    outputs = ["s2", "s4", "s8", "s16", "s16_expanded", "tokens"]
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=outputs).eval()
    state = model.state_dict()
    assert set(state) - set(backbone.state_dict()) == {"classifier.weight", "classifier.bias"}
    backbone.load_state_dict({key: state[key] for key in backbone.state_dict()})
    x = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        expected = backbone(x)
        last, maps = model.forward_intermediates(x)
    torch.testing.assert_close(maps, [expected[key] for key in outputs[:4]], rtol=0, atol=0)
    torch.testing.assert_close(last[:, :40], expected["s16_expanded"], rtol=0, atol=0)
    token = expected["tokens"][:, 0]
    for row in range(last.shape[2]):
        torch.testing.assert_close(last[:, 40:, row, 0], token, rtol=0, atol=0)

    model = _tiny()
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=["s16_expanded", "tokens"]).eval()
    decoder = LinearDecoder(input_shape=backbone.output_shape(), num_classes=5)
    state = model.state_dict()
    backbone.load_state_dict({key: state[key] for key in backbone.state_dict()})
    decoder.classifier.load_state_dict(model.get_classifier().state_dict())
    x = _images()
    with torch.no_grad():
        torch.testing.assert_close(model(x), decoder(backbone(x)))


@pytest.mark.parametrize("indices", [None, 2, (-1, 1)])
def test_stages_asked_for_are_the_same_with_the_rest_cut_off(indices: Any) -> None:
    model, x = _tiny(), _images(48)
    with torch.no_grad():
        everything = model.forward_intermediates(x, intermediates_only=True)
        numbers = {None: [0, 1, 2, 3], 2: [2, 3], (-1, 1): [1, 3]}[indices]
        expected = [everything[number] for number in numbers]
        last, found = model.forward_intermediates(x, indices)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(last, model.forward_features(x), rtol=0, atol=0)
        whole = len(model.state_dict())
        taken = model.prune_intermediate_layers(indices, prune_norm=True)
        assert sorted(taken) == numbers
        assert len(model.stages) == max(numbers) + 1
        assert len(model.state_dict()) < whole
        found = model.forward_intermediates(x, taken, intermediates_only=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
