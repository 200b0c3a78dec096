# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One test for every difference between Detectron2 v0.6 and its main branch that can reach us.

Each difference is imitated in both directions, so that the tests say the same on either. The
whole suite passes on both too; these say why. What importing needs, ``test_wheel.py`` tests.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_model

from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import TrainStream
from qbheat_det.engine import Trainer


def small(name: str) -> CfgNode:
    """Returns a shipped config on the CPU with the smallest decoder."""
    cfg = load_config(get_config_path(name), ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    return cfg


@pytest.mark.parametrize(
    "name", ["coco/mf_detr_211_285M_probe.yaml", "coco/retinanet_285M_probe.yaml"]
)
def test_detectors_work_with_and_without_padding_constraints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # main's detectors read this property of the backbone, v0.6 has none.
    batch = [{"image": torch.rand(3, 70, 96) * 255}, {"image": torch.rand(3, 64, 50) * 255}]
    model = build_model(small(name)).eval()
    monkeypatch.delattr(Backbone, "padding_constraints", raising=False)
    with torch.no_grad():
        without = model.preprocess_image(batch).tensor
        outputs = model(batch)
    monkeypatch.setattr(Backbone, "padding_constraints", property(lambda _: {}), raising=False)
    with torch.no_grad():
        torch.testing.assert_close(model.preprocess_image(batch).tensor, without)
        for one, other in zip(model(batch), outputs, strict=True):
            boxes, expected = one["instances"].pred_boxes, other["instances"].pred_boxes
            torch.testing.assert_close(boxes.tensor, expected.tensor)


def tiny_training(output: Path, monkeypatch: pytest.MonkeyPatch) -> CfgNode:
    """Makes ``Trainer`` train one linear layer on no data; returns a config for it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    stream = TrainStream([{}], mapper=lambda entry: entry, batch_size=1)
    monkeypatch.setattr(Trainer, "build_model", classmethod(lambda *_: copy.deepcopy(model)))
    monkeypatch.setattr("qbheat_det.engine.trainer.build_train_stream", lambda _: stream)
    cfg = small("coco/mf_detr_211_285M_finetune.yaml")
    cfg.DATASETS.TEST = ()
    cfg.OUTPUT_DIR = str(output)
    return cfg


def test_a_resumed_run_has_the_optimizers_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # main's DefaultTrainer saves its inner trainer, and with it the optimizer; v0.6's does not.
    cfg = tiny_training(tmp_path, monkeypatch)
    trainer = Trainer(cfg)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer._trainer.optimizer.step()
    trainer._trainer.iter = trainer.iter = 6
    trainer.checkpointer.save("model_0000006", iteration=6)

    resumed = Trainer(cfg)
    resumed.resume_or_load(resume=True)
    assert resumed.start_iter == 7
    saved, loaded = (one._trainer.optimizer.state_dict()["state"] for one in (trainer, resumed))
    assert saved
    torch.testing.assert_close(loaded, saved)


def test_without_detectron2_the_error_names_the_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbheat_det.core.environment import require_detectron2

    require_detectron2()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"tools/install_detectron2\.py.*pip install.*git\+"):
        require_detectron2()
