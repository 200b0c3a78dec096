# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an image classifier computes, counts and leaves alone."""

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.classification import ImageClassifier
from tests.modeling.tiny_pretraining import make_tiny_config

TRANSFORMER = {"CLASSIFIER.DECODER": "transformer", "CLASSIFIER.WIDTH": 64}
TOKENS = {"MOBILE_FORMER.OUT_FEATURES": ["s16_expanded", "tokens"]}
RESNET = {
    "BACKBONE.NAME": "timm:resnet18",
    "TIMM.OUT_FEATURES": ["s32"],
    "CLASSIFIER.IN_FEATURE": "s32",
}


def make_model(values=None):
    """With other keys below ``MODEL``."""
    torch.manual_seed(0)
    cfg = make_tiny_config("ImageClassifier")
    for key, value in {"CLASSIFIER.NUM_CLASSES": 5, **(values or {})}.items():
        cfg.merge_from_list([f"MODEL.{key}", value])
    model = build_model(cfg)
    assert isinstance(model, ImageClassifier)
    return model


def make_batch(count=6):
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
def test_loss_and_scores_are_those_of_images_one_by_one(values):
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


@pytest.mark.parametrize(
    "opts", [{"MIXUP": 0.8}, {"CUTMIX": 1.0, "LABEL_SMOOTHING": 0.1}, {"LABEL_SMOOTHING": 0.1}]
)
def test_the_loss_in_training_is_against_the_targets_of_what_the_encoder_sees(opts):
    keys = {f"CLASSIFIER.{key}": value for key, value in opts.items()}
    model, batch = make_model(keys).train(), make_batch()
    seen = []
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


def test_labels_and_sizes_that_do_not_fit_are_named():
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
