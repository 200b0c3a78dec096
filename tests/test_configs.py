# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every shipped YAML builds, carries its card, and its schedule is what the card says."""

import re
from functools import reduce
from pathlib import Path

import pytest
import torch
import yaml
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.config import find_unread, load_config
from qbheat_det.config.loading import list_leaves
from qbheat_det.data import build_mapper
from qbheat_det.modeling import distillation_teacher
from qbheat_det.solver import build_optimizer, resolve_schedule

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if not path.name.startswith("Base-"))
COCO_TRAIN_IMAGES = 118287
COCO_TRAIN_WITH_BOXES = 117266
IMAGENET_TRAIN_IMAGES = 1281167
VARIANTS = ("285M", "1.0G", "3.7G")
_BUILD_TEACHER = distillation_teacher.build_teacher_backbone
_teachers = {}


def _name(path):
    return str(path.relative_to(CONFIGS))


def _card(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#") for line in lines if line.startswith("#")]
    card = " ".join(" ".join(comments).split())
    base = re.search(r"Schedule: that of (\S+\.yaml)", card)
    return f"{card} {_card(path.parent / base[1])}" if base else card


@pytest.fixture(autouse=True)
def _no_values(monkeypatch):
    """Leaves out the initial values of tensors on "meta", and builds each teacher once."""
    for name in (name for name in dir(nn.init) if name.endswith("_") and name[0] != "_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(distillation_teacher, "build_teacher_backbone", _find_teacher)


def _find_teacher(cfg):
    key = str(cfg.MODEL.TEACHER)
    _teachers[key] = _teachers.get(key) or _BUILD_TEACHER(cfg)
    return _teachers[key]


def _number(digits):
    return int(digits.replace(",", ""))


@pytest.mark.parametrize("path", RECIPES, ids=_name)
def test_a_recipe_sets_no_key_that_its_model_does_not_read(path):
    keys = [key for key, _ in list_leaves(yaml.safe_load(path.read_text(encoding="utf-8")))]
    assert find_unread(load_config(path), keys) == {}


@pytest.mark.parametrize("path", RECIPES, ids=_name)
def test_a_recipe_builds_and_its_schedule_is_what_its_card_says(path):
    cfg, card = load_config(path, ["MODEL.DEVICE", "meta"]), _card(path)
    assert "Command:" in card
    assert "Schedule:" in card
    assert f"configs/{_name(path)}" in card
    _check_keys(cfg, card)
    is_detectron2 = "_r50_coco" in path.stem  # on weights of its zoo, which take BGR
    assert cfg.INPUT.FORMAT == ("BGR" if is_detectron2 else "RGB")
    with torch.device("meta"):
        model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trainable)
    assert any(name.startswith("backbone.") for name in trainable) != (
        cfg.MODEL.BACKBONE.FREEZE_AT == 5 and "fpn" not in cfg.MODEL.BACKBONE.NAME
    )
    build_mapper(cfg, is_train=True)
    _check_schedule(path, cfg, card)
    _check_rate(path, cfg)


def _check_keys(cfg, card):
    listed = re.search(r"Keys: (.*?) Schedule:", card)
    assert listed
    for item in listed[1].split(", "):
        key, value = item.split(" ")
        assert str(reduce(lambda node, part: node[part], key.split("."), cfg)) == value


def _check_schedule(path, cfg, card):
    epochs = re.search(r"([\d,]+) epochs x ([\d,]+) images( with boxes)? / (\d+) = ([\d,]+)", card)
    if not epochs:
        assert _name(path).startswith("quick_schedules/")
        assert cfg.SOLVER.EPOCHS == 0
        assert f"{cfg.SOLVER.MAX_ITER:,} steps" in card
        return
    resolved = resolve_schedule(cfg, num_images=_number(epochs[2]))
    assert cfg.SOLVER.EPOCHS == _number(epochs[1])
    assert cfg.SOLVER.IMS_PER_BATCH == _number(epochs[4])
    assert {_number(steps) for steps in re.findall(r"([\d,]+) steps", card)} == {
        resolved.SOLVER.MAX_ITER
    }
    drops = re.search(r"rate / 10 after (.*?)\.(?: |$)", card)
    pairs = re.findall(r"(\d+) \(([\d,]+)\)", drops[1] if drops else "")
    assert [_number(after) for after, _ in pairs] == list(cfg.SOLVER.STEP_EPOCHS)
    assert bool(pairs) == (cfg.SOLVER.LR_SCHEDULER_NAME == "WarmupMultiStepLR")
    if pairs:
        assert tuple(_number(step) for _, step in pairs) == resolved.SOLVER.STEPS
    if path.parent.name == "coco":
        # Detectron2 leaves out images without boxes, unless told not to.
        filtered = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
        assert _number(epochs[2]) == (COCO_TRAIN_WITH_BOXES if filtered else COCO_TRAIN_IMAGES)
        assert bool(epochs[3]) == filtered
    if path.parent.name.startswith("ImageNet-"):
        assert _number(epochs[2]) == IMAGENET_TRAIN_IMAGES
    if path.parent.name == "ImageNet-QBHeat":
        assert f"_{epochs[1]}ep" in path.name


def _check_rate(path, cfg):
    solver, on_imagenet = cfg.SOLVER, path.parent.name.startswith("ImageNet-")
    if path.parent.name == "ImageNet-QBHeat":
        assert (solver.IMS_PER_BATCH, solver.REFERENCE_BATCH_SIZE) == (1024, 256)
    elif on_imagenet:  # papers give their rates for 256 images
        assert solver.REFERENCE_BATCH_SIZE == 256
    elif path.parent.name == "quick_schedules":  # some scale the rate of their base down
        assert solver.IMS_PER_BATCH <= solver.REFERENCE_BATCH_SIZE
    else:
        assert solver.IMS_PER_BATCH == solver.REFERENCE_BATCH_SIZE


def _resolve(name):
    cfg = load_config(CONFIGS / f"{name}.yaml")
    return resolve_schedule(cfg, num_images=IMAGENET_TRAIN_IMAGES)


def test_detection_follows_the_papers_setup():
    for size in VARIANTS:
        for decoder in ("522", "211"):
            probe = load_config(CONFIGS / f"coco/mf_detr_{decoder}_{size}_probe.yaml").SOLVER
            tune = load_config(CONFIGS / f"coco/mf_detr_{decoder}_{size}_finetune.yaml").SOLVER
            assert (probe.OPTIMIZER, probe.BASE_LR, probe.WEIGHT_DECAY) == ("ADAMW", 1e-4, 1e-4)
            assert (tune.BASE_LR, tune.GAMMA) == (1e-5, 0.1)
            assert probe.IMS_PER_BATCH == tune.IMS_PER_BATCH == 8 * 2


def test_pre_training_follows_the_papers_setup():
    cfg = _resolve("ImageNet-QBHeat/qb_heat_3.7G_400ep")
    solver = cfg.SOLVER
    assert (solver.OPTIMIZER, solver.WEIGHT_DECAY) == ("ADAMW", 0.1)  # Table 9
    assert solver.BASE_LR == pytest.approx(6e-4)  # 1.5e-4 x 1024 / 256
    assert solver.WARMUP_ITERS == 12512  # 10 epochs of 1,251.14 steps
    assert cfg.INPUT.PRETRAIN.SIZE == 256
    heat = cfg.MODEL.QB_HEAT  # Sec. 4.2 and the grey rows of Table 2
    assert (heat.VISIBLE, heat.NUM_MODELS) == ("both", 8)
    assert (heat.FEATURE_DIM, heat.DECODER_DEPTH, heat.DECODER_DIM) == (512, 6, 512)


@pytest.mark.parametrize("size", VARIANTS)
def test_classification_follows_the_papers_setup(size):
    cfg = _resolve(f"ImageNet-finetune/tran1_{size}")  # Table 12
    solver, classifier, images = cfg.SOLVER, cfg.MODEL.CLASSIFIER, cfg.INPUT.CLASSIFY
    assert (solver.OPTIMIZER, solver.WEIGHT_DECAY) == ("ADAMW", 0.05)
    assert solver.BASE_LR == pytest.approx(5e-4 * 512 / 256)
    assert (solver.IMS_PER_BATCH, solver.WARMUP_EPOCHS) == (512, 5)
    assert solver.EPOCHS == {"285M": 200, "1.0G": 150, "3.7G": 100}[size]
    assert solver.LAYER_DECAY == {"3.7G": 0.85}.get(size, 0.9)
    assert classifier.MIXUP == {"285M": 0, "1.0G": 0.2, "3.7G": 0.8}[size]
    assert classifier.CUTMIX == {"285M": 0, "1.0G": 0.25, "3.7G": 1.0}[size]
    assert (classifier.DROPOUT, classifier.LABEL_SMOOTHING) == (0.2, 0.1)
    assert (images.RAND_AUGMENT, images.RANDOM_ERASING) == ([9, 0.5], 0.25)

    cfg = _resolve(f"ImageNet-probing/tran1_{size}")  # Table 11
    solver, classifier, images = cfg.SOLVER, cfg.MODEL.CLASSIFIER, cfg.INPUT.CLASSIFY
    assert (solver.OPTIMIZER, solver.WEIGHT_DECAY, solver.EPOCHS) == ("ADAMW", 0.1, 200)
    assert solver.BASE_LR == pytest.approx(5e-4 * 4096 / 256)
    assert (solver.IMS_PER_BATCH, solver.WARMUP_EPOCHS) == (4096, 10)
    assert (classifier.DECODER, classifier.DEPTH) == ("transformer", 1)
    assert classifier.WIDTH == {"285M": 192, "1.0G": 384, "3.7G": 768}[size]
    assert classifier.DROPOUT == {"285M": 0.1}.get(size, 0.2)
    assert (classifier.LABEL_SMOOTHING, classifier.MIXUP, classifier.CUTMIX) == (0.1, 0, 0)
    assert images.RAND_AUGMENT == [9, 0.5]
    assert images.RANDOM_ERASING == {"3.7G": 0.25}.get(size, 0)
