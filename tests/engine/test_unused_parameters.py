# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Several processes look for parameters without gradients only where a model can have some."""

from typing import Any

import numpy as np
import pytest
import torch
from detectron2.modeling import META_ARCH_REGISTRY, build_model
from detectron2.utils.events import EventStorage

from qbheat_det.engine.launch import _may_have_unused_parameters
from qbheat_det.modeling.image_model import ImageModel
from tests.modeling.tiny_pretraining import make_inputs, make_tiny_config

MAP = "s16_expanded"
READS_TOKENS = {"ImageClassifier", "MoCo", "WassersteinDependency"}
READS_THE_MAP = {"QBHeat", "InterpolatedMasking", "MaskTokenMasking"}


def make_model(arch: str, outputs: list[str], **opts: Any) -> Any:
    cfg = make_tiny_config(arch, IN_FEATURE=MAP)
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = outputs
    cfg.MODEL.MOCO.QUEUE_SIZE = cfg.SOLVER.IMS_PER_BATCH = 4
    for node in ("CLASSIFIER", "MOCO", "WASSERSTEIN"):
        cfg.MODEL[node].IN_FEATURE = MAP
    cfg.MODEL.CLASSIFIER.WIDTH = 64
    cfg.merge_from_list([item for pair in opts.items() for item in pair])
    torch.manual_seed(0)
    return build_model(cfg).train()


def names_without_gradient(model: Any) -> list[str]:
    np.random.seed(0)
    batch = [
        {**entry, "image_key": entry["image"].flip(2), "label": label}
        for label, entry in enumerate(make_inputs(4))
    ]
    with EventStorage():
        sum(model(batch).values()).backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in trained if p.grad is None]


def test_every_model_of_square_images_is_known_here() -> None:
    archs = {name for name, kind in META_ARCH_REGISTRY if issubclass(kind, ImageModel)}
    assert {name for name in archs if name[0] != "_"} == READS_TOKENS | READS_THE_MAP


@pytest.mark.parametrize("outputs", [[MAP], [MAP, "tokens"]], ids=["map", "map and tokens"])
@pytest.mark.parametrize("arch", sorted(READS_TOKENS))
def test_heads_that_read_all_outputs_leave_no_parameter_out(arch: str, outputs: list[str]) -> None:
    model = make_model(arch, outputs)
    assert set(model.head_in_features) == set(outputs)
    assert not _may_have_unused_parameters(model)
    assert names_without_gradient(model) == []


@pytest.mark.parametrize("outputs", [[MAP, "tokens"], [MAP, "s4"]], ids=["tokens", "another map"])
@pytest.mark.parametrize("arch", sorted(READS_THE_MAP))
def test_an_output_that_no_head_reads_is_looked_for(arch: str, outputs: list[str]) -> None:
    model = make_model(arch, outputs)
    assert model.head_in_features == [MAP]
    assert _may_have_unused_parameters(model)
    assert not _may_have_unused_parameters(make_model(arch, [MAP]))


def test_a_transformer_decoder_reads_tokens_too() -> None:
    model = make_model(
        "ImageClassifier", [MAP, "tokens"], **{"MODEL.CLASSIFIER.DECODER": "transformer"}
    )
    assert not _may_have_unused_parameters(model)
    assert names_without_gradient(model) == []
