# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat_det.model_zoo`` as Detectron2's ``model_zoo``: recipes, configs and models by name."""

from pathlib import Path

import pytest
import torch

import qbheat_det.model_zoo as zoo
from qbheat_det.checkpoint import read_weights, save_weights
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError

from .conftest import TinyZoo, UseIndex
from .zoo_cases import BACKBONE, DETECTOR, make_entry


@pytest.mark.parametrize("name", [DETECTOR, BACKBONE])
def test_a_model_by_name_has_its_weights_and_is_in_evaluation_mode(
    tiny: TinyZoo, name: str
) -> None:
    model = zoo.get(name, device="cpu")
    torch.testing.assert_close(model.state_dict(), tiny.states[name], rtol=0, atol=0)
    assert not any(module.training for module in model.modules())


def test_untrained_it_is_the_same_model_with_random_weights(tiny: TinyZoo) -> None:
    found = zoo.get(BACKBONE, trained=False, device="cpu").state_dict()
    shapes = {name: tensor.shape for name, tensor in tiny.states[BACKBONE].items()}
    assert {name: tensor.shape for name, tensor in found.items()} == shapes
    assert any(not torch.equal(found[name], tiny.states[BACKBONE][name]) for name in found)


def test_names_are_listed_by_pattern(tiny: TinyZoo) -> None:
    assert zoo.list() == [BACKBONE, DETECTOR]
    assert zoo.list("retina*") == [DETECTOR]


def test_the_recipe_is_found_without_the_weights(
    tiny: TinyZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QBHEAT_ZOO")
    recipe = "coco/retinanet_285M_finetune.yaml"
    assert zoo.get_config_file(DETECTOR) == get_config_path(recipe)
    assert zoo.get_config(DETECTOR, trained=False).MODEL.RETINANET.NUM_CLASSES == 80
    assert zoo.get_address(DETECTOR) == f"qbheat://{DETECTOR}"


def test_the_trained_config_is_that_inside_the_weights(tiny: TinyZoo) -> None:
    cfg = zoo.get_config(f"qbheat://{DETECTOR}")
    assert cfg.MODEL.WEIGHTS == f"qbheat://{DETECTOR}"
    assert cfg.MODEL.CLASS_NAMES == ["square", "disc", "cross"]
    assert cfg.MODEL.DEVICE == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_checkpoint_is_the_checked_file(tiny: TinyZoo) -> None:
    assert zoo.get_checkpoint(DETECTOR) == str(tiny.folder / "retinanet-tiny.safetensors")


def test_weights_of_another_model_are_refused(
    tiny: TinyZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_index: UseIndex
) -> None:
    path = tmp_path / Path(zoo.get_checkpoint(DETECTOR)).name
    state, info = read_weights(zoo.get_checkpoint(DETECTOR))
    assert info is not None
    del state["head.cls_score.weight"]
    save_weights(str(path), state, info)
    use_index(make_entry(DETECTOR, path.read_bytes()))
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path))
    with pytest.raises(UserError, match="does not fit the model of the config"):
        zoo.get(DETECTOR, device="cpu")
