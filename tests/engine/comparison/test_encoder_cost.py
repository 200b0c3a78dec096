# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The encoder's cost in training, counted from what it is called with."""

from pathlib import Path
from typing import Any

import pytest
from detectron2.config import CfgNode

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.comparison.encoder_cost import count_encoder_madds, count_training_madds
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from tests.data.pictures import draw, save


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    found = []
    for i in range(3):
        save(tmp_path / f"{i}.png", draw(40, 48, seed=i))
        record = {"file_name": str(tmp_path / f"{i}.png"), "image_id": i, "label": i % 2}
        found.append(record)
    return found


def make(name: str, *opts: str) -> CfgNode:
    """A small convolutional encoder, whose cost is that of its positions."""
    small = ["MODEL.BACKBONE.NAME", "timm:resnet10t", "INPUT.PRETRAIN.SIZE", "128"]
    small += ["SOLVER.IMS_PER_BATCH", "8", *opts]
    return load_config(get_config_path(f"objectives/{name}.yaml"), small)


def test_qb_heat_costs_a_quarter_of_a_whole_image(records: list[dict[str, Any]]) -> None:
    cfg = make("qb_heat", "MODEL.QB_HEAT.IN_FEATURE", "s16")
    whole = count_encoder_madds(build_bare_backbone(cfg).cpu(), 128, 128)
    assert count_training_madds(cfg, records) == whole / 4


def test_moco_costs_two_whole_images(records: list[dict[str, Any]]) -> None:
    cfg = make("moco_v2", "MODEL.MOCO.QUEUE_SIZE", "16", "MODEL.MOCO.IN_FEATURE", "s16")
    whole = count_encoder_madds(build_bare_backbone(cfg).cpu(), 128, 128)
    assert count_training_madds(cfg, records) == 2 * whole


def test_images_that_cannot_be_read_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no image")
    broken = [{"file_name": str(tmp_path / "x.png"), "image_id": 0}]
    with pytest.raises(UserError, match="no image can be read"):
        count_training_madds(make("qb_heat"), broken)
