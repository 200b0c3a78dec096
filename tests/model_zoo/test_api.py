# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recipes, configs, files and models by name, and ``qbheat://`` wherever weights are taken."""

from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

import qbheat_det.model_zoo as zoo
from qbheat_det.checkpoint import (
    check_weights_file,
    class_names_of,
    info_of,
    load_run_config,
    read_weights,
)
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo.sources import _write_pytorch

from .conftest import BACKBONE, DETECTOR, MakeEntry, Trained

ADDRESS = f"qbheat://{DETECTOR}"


@pytest.fixture(autouse=True)
def _tiny_zoo(ship: MakeEntry, detector: Trained, backbone: Trained) -> None:
    _write_pytorch.cache_clear()
    ship(DETECTOR, detector.path.read_bytes())
    ship(BACKBONE, backbone.path.read_bytes())


def test_names_recipes_and_files(detector: Trained, shipped: Path) -> None:
    assert zoo.list() == [BACKBONE, DETECTOR]
    assert zoo.list("retina*") == [DETECTOR]
    recipe = "coco/retinanet_285M_finetune.yaml"
    assert zoo.get_config_file(DETECTOR) == get_config_path(recipe)
    assert zoo.get_config(DETECTOR, trained=False).MODEL.RETINANET.NUM_CLASSES == 80
    assert zoo.get_address(DETECTOR) == ADDRESS
    assert zoo.get_checkpoint(DETECTOR) == f"{shipped}/retinanet-tiny.safetensors"
    cfg = zoo.get_config(ADDRESS)
    assert (cfg.MODEL.WEIGHTS, cfg.MODEL.CLASS_NAMES) == (ADDRESS, ["square", "disc", "cross"])
    assert cfg.MODEL.DEVICE == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", [DETECTOR, BACKBONE])
def test_a_model_has_its_weights_and_is_in_evaluation_mode(
    name: str, detector: Trained, backbone: Trained
) -> None:
    expected = (detector if name == DETECTOR else backbone).state
    model = zoo.get(name, device="cpu")
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    assert not any(module.training for module in model.modules())
    random = zoo.get(name, trained=False, device="cpu").state_dict()
    assert {k: t.shape for k, t in random.items()} == {k: t.shape for k, t in expected.items()}
    assert any(not torch.equal(random[key], expected[key]) for key in expected)


def test_detectron2_s_own_checkpointer_and_predictor_take_the_address(detector: Trained) -> None:
    cfg = detector.cfg.clone()
    model = build_model(cfg)
    rest = DetectionCheckpointer(model).load(ADDRESS)
    torch.testing.assert_close(dict(model.state_dict()), detector.state, rtol=0, atol=0)
    assert rest["info"]["class_names"] == ["square", "disc", "cross"]

    cfg.MODEL.WEIGHTS, cfg.MODEL.RETINANET.SCORE_THRESH_TEST = ADDRESS, 0.0
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    predictor = DefaultPredictor(cfg)
    boxes = predictor(image)["instances"].pred_boxes.tensor
    predictor.model.load_state_dict(detector.state)
    assert len(boxes)
    expected = predictor(image)["instances"].pred_boxes.tensor
    torch.testing.assert_close(boxes, expected, rtol=0, atol=0)


def test_the_package_s_own_readers_take_the_address(detector: Trained) -> None:
    check_weights_file(ADDRESS)
    found, info = read_weights(ADDRESS)
    torch.testing.assert_close(found, detector.state, rtol=0, atol=0)
    assert info == info_of(ADDRESS)
    assert info is not None
    assert (info.iteration, info.category_ids) == (7, (4, 9, 11))
    assert class_names_of(ADDRESS) == ("square", "disc", "cross")
    own = load_run_config(ADDRESS, device="cpu")
    assert (own.MODEL.WEIGHTS, own.MODEL.RESNETS) == (ADDRESS, detector.cfg.MODEL.RESNETS)
    for read in (read_weights, info_of, check_weights_file, load_run_config):
        with pytest.raises(UserError, match="'no/such'"):
            read("qbheat://no/such")


def test_the_path_manager_s_file_is_written_once_and_a_damaged_one_again(
    detector: Trained, shipped: Path
) -> None:
    path = Path(PathManager.get_local_path(ADDRESS))
    written, content = path.stat().st_mtime_ns, path.read_bytes()
    _write_pytorch.cache_clear()  # as in another process
    assert PathManager.get_local_path(ADDRESS) == str(path)
    assert path.stat().st_mtime_ns == written
    _write_pytorch.cache_clear()
    path.write_bytes(content.replace(b"disc", b"dish"))
    assert Path(PathManager.get_local_path(ADDRESS)).read_bytes() == content
    # The hash of the weights is checked each time.
    source = shipped / "retinanet-tiny.safetensors"
    source.write_bytes(source.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"retinanet-tiny\.safetensors"):
        read_weights(ADDRESS)
