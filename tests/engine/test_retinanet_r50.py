# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The RetinaNet on ResNet-50 that others are compared with trains from random weights."""

from pathlib import Path

import pytest
import torch
from detectron2.utils.events import EventStorage

from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import ToySpec, prepare_toy_set, register_coco_json
from qbheat_det.engine import Trainer

CONFIG = get_config_path("custom/retinanet_R50_scratch.yaml")
SAME = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "DETR_CROP_RESIZE", "DETR_CROP_RANGE", "MIN_SIZE_TEST")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Of its recipe, on one picture of 64 pixels."""
    folder = Path(prepare_toy_set(ToySpec("one", num_images=1, image_size=64), tmp_path))
    register_coco_json(f"r50_{tmp_path.name}", folder / "annotations.json", folder / "images")
    cfg = load_config(CONFIG)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (f"r50_{tmp_path.name}",), ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.DETR_CROP_RESIZE = (64,), []
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SEED = 1
    cfg.OUTPUT_DIR = str(tmp_path)
    return Trainer(cfg)


def test_two_steps_change_every_part_of_it(trainer: Trainer) -> None:
    parts = ("bottom_up.stem", "bottom_up.res2", "bottom_up.res5", "fpn_", "top_block", "head.")
    model = trainer.bare_model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(p.requires_grad for p in model.parameters())
    with EventStorage() as storage:
        for trainer.iter in range(2):
            trainer.run_step()
        losses = storage.history("total_loss").values()
    assert len(losses) == 2
    assert all(0 < loss < float("inf") for loss, _ in losses)
    for part in parts:
        names = [name for name in before if part in name]
        assert any(not torch.equal(before[n], model.get_parameter(n)) for n in names), part


def test_it_sees_the_pictures_of_the_light_one_in_batches_as_large() -> None:
    r50, light = (
        load_config(CONFIG),
        load_config(Path(CONFIG).parent / "retinanet_285M_scratch.yaml"),
    )
    for key in SAME:
        assert r50.INPUT[key] == light.INPUT[key], key
    assert r50.SOLVER.IMS_PER_BATCH == light.SOLVER.IMS_PER_BATCH
    assert r50.INPUT.DATASET_MAPPER_NAME == light.INPUT.DATASET_MAPPER_NAME
