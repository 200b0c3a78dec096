# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every shipped YAML builds, carries its card, and its schedule is what the card says."""

import re
from pathlib import Path

import pytest
from detectron2.modeling import build_model

from qbheat_det.config import load_config
from qbheat_det.data import build_mapper
from qbheat_det.solver import build_optimizer

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if not path.name.startswith("Base-"))
COCO_TRAIN_IMAGES = 118287


def _name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def _card(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#") for line in lines if line.startswith("#")]
    return " ".join(" ".join(comments).split())


def test_every_recipe_of_the_paper_has_its_file() -> None:
    sizes, kinds = ("285M", "1.0G", "3.7G"), ("probe", "finetune")
    expected = {f"coco/retinanet_{size}_{kind}.yaml" for size in sizes for kind in kinds}
    expected |= {
        f"coco/mf_detr_{decoder}_{size}_{kind}.yaml"
        for decoder in ("522", "211")
        for size in sizes
        for kind in kinds
    }
    assert expected <= {_name(path) for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=_name)
def test_a_recipe_builds_and_carries_its_card(path: Path) -> None:
    cfg = load_config(path, ["MODEL.DEVICE", "cpu"])
    card = _card(path)
    assert "Command:" in card
    assert "Schedule:" in card
    assert f"configs/{_name(path)}" in card or "make demo" in card
    assert cfg.INPUT.FORMAT == "RGB"
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trainable)
    assert any(name.startswith("backbone.") for name in trainable) != (
        cfg.MODEL.BACKBONE.FREEZE_AT == 5 and cfg.MODEL.BACKBONE.NAME == "MobileFormer"
    )
    build_mapper(cfg, is_train=True)


@pytest.mark.parametrize("path", RECIPES, ids=_name)
def test_steps_in_the_file_are_those_of_the_card(path: Path) -> None:
    cfg = load_config(path)
    card = _card(path)
    for steps in re.findall(r"([\d,]+) steps", card):
        assert int(steps.replace(",", "")) == cfg.SOLVER.MAX_ITER
    for epochs, images, batch, steps in re.findall(
        r"(\d+) epochs x ([\d,]+) images / (\d+) = ([\d,]+) steps", card
    ):
        assert int(images.replace(",", "")) == COCO_TRAIN_IMAGES
        assert int(batch) == cfg.SOLVER.IMS_PER_BATCH
        exact = int(epochs) * COCO_TRAIN_IMAGES / int(batch)
        assert abs(exact - int(steps.replace(",", ""))) <= 0.5
    drop = re.search(r"rate / 10 after (\d+) \(([\d,]+)\)", card)
    if drop:
        exact = int(drop[1]) * COCO_TRAIN_IMAGES / cfg.SOLVER.IMS_PER_BATCH
        assert abs(exact - int(drop[2].replace(",", ""))) <= 0.5
        assert list(cfg.SOLVER.STEPS) == [int(drop[2].replace(",", ""))]


def test_probing_and_fine_tuning_follow_the_papers_setup() -> None:
    probe = load_config(CONFIGS / "coco/mf_detr_522_3.7G_probe.yaml").SOLVER
    finetune = load_config(CONFIGS / "coco/mf_detr_522_3.7G_finetune.yaml").SOLVER
    assert (probe.OPTIMIZER, probe.BASE_LR, probe.WEIGHT_DECAY) == ("ADAMW", 1e-4, 1e-4)
    assert (finetune.BASE_LR, finetune.GAMMA) == (1e-5, 0.1)
    assert probe.IMS_PER_BATCH == finetune.IMS_PER_BATCH == 8 * 2
