# Copyright (c) qbheat_det contributors. Apache-2.0.
"""qbheat:// wherever weights are named: in Detectron2's own code and in the package's."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager
from torch import nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    SafeCheckpointer,
    check_weights_file,
    class_names_of,
    info_of,
    load_run_config,
    read_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.subject import Subject, open_subjects
from qbheat_det.export import export_backbone
from qbheat_det.model_zoo import addresses
from qbheat_det.modeling.backbone.bare import build_bare_backbone

from .conftest import TinyZoo
from .zoo_cases import BACKBONE, DETECTOR

ADDRESS = f"qbheat://{DETECTOR}"


def test_detectron2s_own_checkpointer_loads_float32(tiny: TinyZoo) -> None:
    cfg, state = tiny.configs[DETECTOR], tiny.states[DETECTOR]
    model = build_model(cfg)
    rest = DetectionCheckpointer(model).load(ADDRESS)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert rest["info"]["class_names"] == ["square", "disc", "cross"]


def test_detectron2s_own_predictor_predicts(tiny: TinyZoo) -> None:
    cfg, state = tiny.configs[DETECTOR], tiny.states[DETECTOR]
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0  # random weights score low
    expected = DefaultPredictor(cfg)
    expected.model.load_state_dict(state)
    cfg.MODEL.WEIGHTS = ADDRESS
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    boxes = [
        predictor(image)["instances"].pred_boxes.tensor
        for predictor in (DefaultPredictor(cfg), expected)
    ]
    assert len(boxes[0])
    torch.testing.assert_close(boxes[0], boxes[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [SafeCheckpointer, ExactCheckpointer])
def test_the_packages_checkpointers_load_it(tiny: TinyZoo, kind: type[SafeCheckpointer]) -> None:
    cfg, state = tiny.configs[DETECTOR], tiny.states[DETECTOR]
    model = build_model(cfg)
    kind(model, class_names=cfg.MODEL.CLASS_NAMES).load(ADDRESS)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_whatever_reads_a_file_reads_the_address(tiny: TinyZoo) -> None:
    cfg, state = tiny.configs[DETECTOR], tiny.states[DETECTOR]
    check_weights_file(ADDRESS)
    found, info = read_weights(ADDRESS)
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    assert info == info_of(ADDRESS)
    assert info is not None
    assert (info.iteration, info.commit, info.category_ids) == (7, "c0ffee", (4, 9, 11))
    assert class_names_of(ADDRESS) == ("square", "disc", "cross")
    own = load_run_config(ADDRESS, device="cpu")
    assert own.MODEL.WEIGHTS == ADDRESS
    assert own.MODEL.RESNETS == cfg.MODEL.RESNETS


def test_its_backbone_is_exported(tiny: TinyZoo, tmp_path: Path) -> None:
    state = tiny.states[DETECTOR]
    num_tensors, _ = export_backbone(ADDRESS, tmp_path / "b.safetensors")
    prefix = "backbone.bottom_up."
    expected = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    assert num_tensors == len(expected)
    torch.testing.assert_close(read_weights(f"{tmp_path}/b.safetensors")[0], expected)


def test_it_is_something_to_look_at(tiny: TinyZoo) -> None:
    subject = Subject.open(ADDRESS, device="cpu")
    assert (subject.label, subject.kind) == (DETECTOR, "detector")
    torch.testing.assert_close(subject.model.state_dict(), tiny.states[DETECTOR], rtol=0, atol=0)
    assert [one.label for one in open_subjects([f"ours={ADDRESS}", ADDRESS])] == ["ours", DETECTOR]


def test_a_bare_backbone_fills_that_of_a_model(tiny: TinyZoo) -> None:
    model = nn.Module()
    model.backbone = build_bare_backbone(tiny.configs[BACKBONE])
    model.head = nn.Linear(2, 2)
    checkpointer = SafeCheckpointer(model)
    checkpointer.load(f"qbheat://{BACKBONE}")
    assert checkpointer.report is not None
    assert checkpointer.report.groups["backbone"].is_full
    expected = tiny.states[BACKBONE]
    torch.testing.assert_close(model.backbone.state_dict(), expected, rtol=0, atol=0)


def test_the_file_is_made_once_and_never_believed(
    tiny: TinyZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(PathManager.get_local_path(ADDRESS))
    made, content = path.stat().st_mtime_ns, path.read_bytes()
    addresses._proved.clear()  # as of another process
    assert PathManager.get_local_path(ADDRESS) == str(path)
    assert path.stat().st_mtime_ns == made
    for wrong in (content[:-7], content.replace(b"disc", b"dish")):
        path.write_bytes(wrong)
        assert PathManager.get_local_path(ADDRESS) == str(path)
        assert path.read_bytes() == content
    # The file that it is made of is looked at each time.
    source = shutil.copy(tiny.folder / tiny.entries[0].file, tmp_path)
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path))
    Path(source).write_bytes(Path(source).read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="is refused, it is not the file that the index means"):
        read_weights(ADDRESS)


def test_the_path_manager_opens_it_and_knows_whether_it_is_there(tiny: TinyZoo) -> None:
    assert PathManager.exists(ADDRESS)
    assert PathManager.isfile(ADDRESS)
    assert not PathManager.exists("qbheat://no/such")
    with PathManager.open(ADDRESS, "rb") as stream:
        content = torch.load(stream, weights_only=True)
    torch.testing.assert_close(content["model"], tiny.states[DETECTOR], rtol=0, atol=0)
    with pytest.raises(UserError, match="can only be read"):
        PathManager.open(ADDRESS, "wb")


@pytest.mark.parametrize("read", [read_weights, info_of, check_weights_file, load_run_config])
def test_an_unknown_name_is_one_sentence_wherever_it_is_given(read: object) -> None:
    assert callable(read)
    with pytest.raises(UserError, match="the model zoo has no 'no/such'"):
        read("qbheat://no/such")
