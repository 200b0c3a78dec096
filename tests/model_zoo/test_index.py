# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The index and its page, and recipes, configs, files and models by name."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from detectron2.utils.file_io import PathManager

import qbheat_det.model_zoo as zoo
from qbheat_det.checkpoint import (
    check_weights_file,
    class_names_of,
    info_of,
    load_embedded_config,
    load_run_config,
    read_weights,
)
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import index, sources
from qbheat_det.model_zoo.sources import _write_pytorch

from .conftest import BACKBONE, DETECTOR

ROOT = Path(__file__).resolve().parents[2]
TABLE = runpy.run_path(str(ROOT / "docs" / "write_zoo_table.py"))


def test_the_file_of_the_repository_has_the_entries_of_the_package(monkeypatch):
    package = Path(index.__file__).parent
    monkeypatch.setattr(sources, "SHIPPED", package / "weights")
    monkeypatch.setattr(index, "INDEX_FILE", package / "index.json")
    text = (ROOT / "MODEL_ZOO.md").read_text(encoding="utf-8")
    assert text == TABLE["update"](text), "run: python -m docs.write_zoo_table"
    links = re.findall(r"\]\(configs/([^)]+)\)", text)
    assert links
    for link in links:
        get_config_path(link)


ADDRESS = f"qbheat://{DETECTOR}"


@pytest.fixture
def _tiny_zoo(ship, detector, backbone):
    _write_pytorch.cache_clear()
    ship(DETECTOR, detector.path.read_bytes())
    ship(BACKBONE, backbone.path.read_bytes())


def test_the_configs_inside_the_weights_of_the_package_have_only_known_keys():
    files = sorted((Path(index.__file__).parent / "weights").glob("*.safetensors"))
    assert files
    for file in files:
        load_embedded_config(info_of(str(file)).config, file.name)


@pytest.mark.usefixtures("_tiny_zoo")
def test_names_recipes_and_files(detector, shipped):
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


@pytest.mark.usefixtures("_tiny_zoo")
@pytest.mark.parametrize("name", [DETECTOR, BACKBONE])
def test_a_model_has_its_weights_and_is_in_evaluation_mode(name, detector, backbone):
    expected = (detector if name == DETECTOR else backbone).state
    model = zoo.get(name, device="cpu")
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    assert not any(module.training for module in model.modules())
    random = zoo.get(name, trained=False, device="cpu").state_dict()
    assert {k: t.shape for k, t in random.items()} == {k: t.shape for k, t in expected.items()}
    assert any(not torch.equal(random[key], expected[key]) for key in expected)


@pytest.mark.usefixtures("_tiny_zoo")
def test_the_package_s_own_readers_take_the_address(detector):
    check_weights_file(ADDRESS)
    found, info = read_weights(ADDRESS)
    torch.testing.assert_close(found, detector.state, rtol=0, atol=0)
    assert info == info_of(ADDRESS)
    assert (info.iteration, info.category_ids) == (7, (4, 9, 11))
    assert class_names_of(ADDRESS) == ("square", "disc", "cross")
    own = load_run_config(ADDRESS, device="cpu")
    assert (own.MODEL.WEIGHTS, own.MODEL.RESNETS) == (ADDRESS, detector.cfg.MODEL.RESNETS)
    for read in (read_weights, info_of, check_weights_file, load_run_config):
        with pytest.raises(UserError, match="'no/such'"):
            read("qbheat://no/such")


@pytest.mark.usefixtures("_tiny_zoo")
def test_the_path_manager_s_file_is_written_once_and_a_damaged_one_again(detector, shipped):
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
