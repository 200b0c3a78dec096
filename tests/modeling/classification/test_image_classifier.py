# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an image classifier computes, counts and leaves alone."""

from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.analysis.complexity import CountingRule, count_madds, count_parameters
from qbheat_det.analysis.paper_tables import classifier_counts
from qbheat_det.config import get_cfg, get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.classification import ImageClassifier, LinearDecoder
from qbheat_det.modeling.classification.image_classifier import BatchMixing
from qbheat_det.solver import build_optimizer, layers_above
from tests.engine.gradient_cases import BLOCKS

SIZE = 32
FROZEN = {"MODEL.BACKBONE.FREEZE_AT": 4}  # of the three stages of BLOCKS, all
TRANSFORMER = {"MODEL.CLASSIFIER.DECODER": "transformer", "MODEL.CLASSIFIER.WIDTH": 64}
TOKENS = {"MODEL.MOBILE_FORMER.OUT_FEATURES": ["s8_expanded", "tokens"]}
RESNET = {
    "MODEL.BACKBONE.NAME": "timm:resnet18",
    "MODEL.TIMM.OUT_FEATURES": ["s32"],
    "MODEL.CLASSIFIER.IN_FEATURE": "s32",
}


def make_config(values: dict[str, Any] | None = None) -> CfgNode:
    cfg = get_cfg()
    defaults = {
        "MODEL.META_ARCHITECTURE": "ImageClassifier",
        "MODEL.DEVICE": "cpu",
        "MODEL.BACKBONE.NAME": "MobileFormer",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.MOBILE_FORMER.VARIANT": "custom",
        "MODEL.MOBILE_FORMER.BLOCKS": BLOCKS[:4],
        "MODEL.MOBILE_FORMER.STEM_CHANNELS": 8,
        "MODEL.MOBILE_FORMER.EXPANDED_CHANNELS": 32,
        "MODEL.MOBILE_FORMER.TOKEN_DIM": 16,
        "MODEL.MOBILE_FORMER.OUT_FEATURES": ["s8_expanded"],
        "MODEL.CLASSIFIER.IN_FEATURE": "s8_expanded",
        "MODEL.CLASSIFIER.NUM_CLASSES": 5,
        "INPUT.PRETRAIN.SIZE": SIZE,
    }
    for key, value in {**defaults, **(values or {})}.items():
        cfg.merge_from_list([key, value])
    return cfg


def make_model(values: dict[str, Any] | None = None) -> ImageClassifier:
    torch.manual_seed(0)
    model = build_model(make_config(values))
    assert isinstance(model, ImageClassifier)
    return model


def make_batch(count: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    shape = (3, SIZE, SIZE)
    return [
        {
            "image": torch.randint(256, shape, generator=generator, dtype=torch.uint8),
            "label": index % 5,
            "file_name": f"{index}.png",
        }
        for index in range(count)
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
    freeze = {"MODEL.BACKBONE.FREEZE_AT": 5} if values else FROZEN
    model = make_model({**values, **freeze, "MODEL.MOBILE_FORMER.DROP_PATH": 0.5})
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
    keys = {f"MODEL.CLASSIFIER.{key}": value for key, value in opts.items()}
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


@pytest.mark.parametrize("values", [TRANSFORMER, RESNET], ids=["transformer", "ResNet"])
def test_layer_decay_groups_cover_all_parameters_once(values: dict[str, Any]) -> None:
    cfg = make_config({**values, "SOLVER.LAYER_DECAY": 0.9, "SOLVER.BASE_LR": 1.0})
    model = build_model(cfg)
    groups = build_optimizer(cfg, model).param_groups
    rates = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    assert len(rates) == len(dict(rates)) == len(list(model.parameters()))
    above = layers_above(model.backbone)
    for name, parameter in model.named_parameters():
        layers = above[name.removeprefix("backbone.")] if name.startswith("backbone.") else 0
        assert dict(rates)[id(parameter)] == pytest.approx(0.9**layers), name
    assert len({rate for _, rate in rates}) > 4
    # The decoder is a layer of its own, as BEiT has it.
    assert {dict(rates)[id(p)] for p in model.decoder.parameters()} == {1.0}
    assert max(dict(rates)[id(p)] for p in model.backbone.parameters()) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("name", "depth", "params"),
    [
        ("linear_285M", 0, 5_859_580),
        ("tran1_285M", 1, 5_915_260),
    ],
)
def test_a_recipes_classifier_has_the_counts_of_the_papers_tables(
    name: str, depth: int, params: int
) -> None:
    cfg = load_config(get_config_path(f"ImageNet-probing/{name}.yaml"), ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    model = build_model(cfg)
    counts = classifier_counts(name.split("_")[1], depth)
    assert count_parameters(model) == counts.params == params
    images = torch.zeros(1, 3, 224, 224)
    model.forward = model.classify  # what is counted: from normalised images to logits
    madds = count_madds(model, images)
    assert madds.total(CountingRule.CORE) == counts.core


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


NUM_CLASSES = 5


def _batch() -> tuple[Tensor, Tensor]:
    images = torch.randn(6, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    return images, torch.tensor([0, 3, 1, 4, 4, 2])


def _one_hot(label: Tensor, smoothing: float) -> Tensor:
    target = torch.full((NUM_CLASSES,), smoothing / NUM_CLASSES)
    target[label] += 1 - smoothing
    return target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_sum_to_one_and_weigh_the_labels_of_a_pair(smoothing: float) -> None:
    shares = {"label_smoothing": smoothing, "mixup": 0.8, "cutmix": 1.0}
    mixing = BatchMixing(num_classes=NUM_CLASSES, **shares)
    for step in range(20):
        np.random.seed(step)
        images, labels = _batch()
        _, targets = mixing(images, labels)
        assert_close(targets.sum(dim=1), torch.ones(6))
        first, last = _one_hot(labels[0], smoothing), _one_hot(labels[5], smoothing)
        share = (targets[0, 0] - last[0]) / (first[0] - last[0])
        for i in range(6):
            own, other = (_one_hot(labels[k], smoothing) for k in (i, 5 - i))
            assert_close(targets[i], share * own + (1 - share) * other)


def test_cutmix_pastes_a_rectangle_whose_area_the_targets_weigh() -> None:
    mixing = BatchMixing(num_classes=NUM_CLASSES, cutmix=1.0)
    np.random.seed(2)
    images, labels = _batch()
    mixed, targets = mixing(images.clone(), labels)
    pasted = (mixed[0] != images[0]).all(dim=0)
    rows, columns = pasted.any(dim=1), pasted.any(dim=0)
    assert torch.equal(pasted, rows[:, None] & columns)
    assert 0 < pasted.sum() < pasted.numel()
    for i in range(6):
        assert torch.equal(mixed[i], torch.where(pasted, images[5 - i], images[i]))
    assert_close(targets[0, labels[0]], 1 - pasted.float().mean())


SHAPE = {"s16_expanded": ShapeSpec(channels=12, stride=16), "tokens": ShapeSpec(channels=8)}


def test_the_linear_decoder_reads_the_pooled_map_and_the_first_token() -> None:
    features = {"s16_expanded": torch.randn(4, 12, 3, 5), "tokens": torch.randn(4, 6, 8)}
    decoder = LinearDecoder(input_shape=SHAPE, num_classes=7)
    logits = decoder(features)
    for image in range(4):
        pooled = [features["s16_expanded"][image, c].mean() for c in range(12)]
        vector = torch.cat([torch.stack(pooled), features["tokens"][image, 0]])
        assert_close(logits[image], decoder.classifier.weight @ vector + decoder.classifier.bias)
