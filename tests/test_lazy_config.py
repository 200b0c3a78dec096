# Copyright (c) qbheat_det contributors. Apache-2.0.
"""LazyConfig: docs/interop.md's files are trained as Detectron2's lazyconfig_train_net does."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, LazyConfig, instantiate
from detectron2.engine import AMPTrainer, SimpleTrainer, default_writers, hooks
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import inference_on_dataset
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone

from qbheat_det import get_cfg
from qbheat_det.checkpoint import read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import (
    MOBILE_FORMER_ARCHS,
    MobileFormer,
    MobileFormerArch,
    MobileFormerFPN,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "interop.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## LazyConfig")[2]
RETINANET, MF_DETR = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
ARCH = MOBILE_FORMER_ARCHS["285M"]
SMALL_RUN = [
    *("train.max_iter=3", "train.log_period=1", "train.eval_period=3", "train.device=cpu"),
    *("train.checkpointer.period=3", "lr_multiplier.warmup_length=0.5", "optimizer.lr=0.001"),
    "dataloader.train.dataset.names=cells_sample_train",
    "dataloader.train.mapper.augmentations.0.short_edge_length=[64]",
    *("dataloader.train.total_batch_size=2", "dataloader.train.num_workers=0"),
    "dataloader.test.dataset.names=cells_sample_val",
    "dataloader.test.mapper.augmentations.0.short_edge_length=64",
    *("dataloader.test.num_workers=0", "dataloader.evaluator.use_fast_impl=False"),
]


def do_train(cfg, resume=False):
    """Trains a config as tools/lazyconfig_train_net.py does."""
    model = instantiate(cfg.model)
    model.to(cfg.train.device)
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    train_loader = instantiate(cfg.dataloader.train)
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer_class = AMPTrainer if cfg.train.amp.enabled else SimpleTrainer
    trainer = trainer_class(model, train_loader, optimizer)
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)

    def do_test():
        test_loader = instantiate(cfg.dataloader.test)
        return inference_on_dataset(model, test_loader, instantiate(cfg.dataloader.evaluator))

    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer),
            hooks.EvalHook(cfg.train.eval_period, do_test),
            hooks.PeriodicWriter(writers, period=cfg.train.log_period),
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    start_iter = 0
    if resume and checkpointer.has_checkpoint():
        start_iter = trainer.iter + 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train(start_iter, cfg.train.max_iter)
    return trainer, before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "classes"),
    [
        pytest.param(RETINANET, "model.num_classes=3", id="retinanet"),
        pytest.param(RETINANET + MF_DETR, "model.decoder.num_classes=3", id="mf_detr"),
    ],
)
def test_the_configs_of_the_page_train_as_detectron2_does(text, classes, tmp_path):
    (tmp_path / "config.py").write_text(text, encoding="utf-8")
    cfg = LazyConfig.load(str(tmp_path / "config.py"))
    cfg = LazyConfig.apply_overrides(cfg, [*SMALL_RUN, classes, f"train.output_dir={tmp_path}"])
    LazyConfig.save(cfg, str(tmp_path / "config.yaml"))
    trainer, before = do_train(cfg)
    assert (tmp_path / "model_final.pth").is_file()
    losses = trainer.storage.histories()["total_loss"].values()
    assert len(losses) == 3
    assert torch.tensor([value for value, _ in losses]).isfinite().all()
    # The training started from the encoder of the zoo.
    encoder, _ = read_weights("qbheat://distill/285M")
    for name, value in before.items():
        if ".stages." in name:
            short = name.removeprefix("backbone.").removeprefix("bottom_up.")
            assert torch.equal(value, encoder[f"backbone.{short}"].float()), name


@pytest.mark.parametrize(
    "arch",
    [
        "285M",
        ARCH,
        LazyCall(MobileFormerArch)(**dataclasses.asdict(ARCH)),
        dataclasses.asdict(ARCH),
    ],
    ids=["name", "dataclass", "call", "fields"],
)
def test_a_mobile_former_from_a_lazy_config_is_that_of_a_config(arch):
    out_features = ["s8", "s16_expanded"]
    lazy = LazyCall(MobileFormer)(arch=arch, out_features=out_features)
    torch.manual_seed(0)
    found = instantiate(lazy)
    torch.manual_seed(0)
    expected = MobileFormer(arch=ARCH, out_features=out_features)
    assert found.output_shape() == expected.output_shape()
    assert_equal_weights(found, expected)


def test_a_pyramid_from_a_lazy_config_is_that_of_a_config():
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.BACKBONE.FREEZE_AT = 1
    cfg.MODEL.FPN.IN_FEATURES = ["s4", "s8", "s16"]
    cfg.MODEL.FPN.TOP_LEVELS = 2
    cfg.MODEL.FPN.NORM = "GN"
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    torch.manual_seed(0)
    expected = build_backbone(cfg, ShapeSpec(channels=3))
    lazy = LazyCall(MobileFormerFPN)(
        arch="285M",
        in_features=["s4", "s8", "s16"],
        out_channels=32,
        top_levels=2,
        norm="GN",
        freeze_at=1,
    )
    torch.manual_seed(0)
    found = instantiate(lazy)
    assert found.output_shape() == expected.output_shape()
    assert_equal_weights(found, expected)
    frozen = [not parameter.requires_grad for parameter in found.parameters()]
    assert frozen == [not parameter.requires_grad for parameter in expected.parameters()]
    image = torch.rand(1, 3, 64, 96)
    for name, value in expected.eval()(image).items():
        assert torch.equal(found.eval()(image)[name], value)


def assert_equal_weights(found, expected):
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_an_unknown_name_of_widths_is_refused_with_the_names_that_exist():
    with pytest.raises(UserError, match=r"285M.*not '86M'"):
        instantiate(LazyCall(MobileFormerFPN)(arch="86M"))
