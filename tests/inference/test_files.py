# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction: weights that fit or are refused, pixels in the right order, results as COCO's."""

import dataclasses
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from PIL import Image

from qbheat_det.checkpoint import WeightsInfo, load_run_config, save_weights
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.inference.files import name_outputs, predict_images
from qbheat_det.inference.images import find_inputs
from qbheat_det.inference.predict import build_predictor
from qbheat_det.inference.results import Detections, Predictions
from tests.engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run

RED = (255, 0, 0)


def _save_image(path: Path, color: tuple[int, int, int] = RED, size: tuple[int, int] = (40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def _save_video(path: Path, num_frames: int) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (48, 32))
    for _ in range(num_frames):
        writer.write(np.full((32, 48, 3), RED[::-1], np.uint8))
    writer.release()
    return path


def _run(
    cfg: CfgNode,
    weights: str,
    inputs: list[Path],
    output: Path | None = None,
    score_threshold: float = 0.0,
) -> Predictions:
    cfg.MODEL.WEIGHTS = weights
    return predict_images(
        build_predictor(cfg),
        find_inputs([str(path) for path in inputs]),
        cfg,
        score_threshold=score_threshold,
        output_dir=output,
    )


@pytest.fixture
def probe(tmp_path: Path) -> tuple[CfgNode, str]:
    cfg = make_probe_config()
    return cfg, save_run(cfg, tmp_path / "run")


@pytest.mark.parametrize(("pixel_format", "red"), [("RGB", 1.0), ("BGR", 0.0)])
def test_the_model_sees_channels_in_the_order_of_its_config(
    tmp_path: Path, pixel_format: str, red: float
) -> None:
    cfg = make_probe_config()
    cfg.INPUT.FORMAT = pixel_format
    weights = save_run(cfg, tmp_path / "run")
    (box,) = _run(cfg, weights, [_save_image(tmp_path / "red.png")]).results
    assert box["score"] == pytest.approx(red, abs=0.03)


def test_each_frame_of_a_video_is_an_image_of_its_own(
    probe: tuple[CfgNode, str], tmp_path: Path
) -> None:
    inputs = [_save_image(tmp_path / "a.png"), _save_video(tmp_path / "v.avi", 2)]
    (tmp_path / "text.mp4").write_text("no video")
    found = _run(*probe, [*inputs, tmp_path / "text.mp4"], tmp_path / "out")
    frames = [(box["image_id"], box.get("frame")) for box in found.results]
    assert frames == [(1, None), (2, 0), (3, 1)]
    assert [name for name, _ in found.skipped] == [str(tmp_path / "text.mp4")]
    written = cv2.VideoCapture(str(tmp_path / "out" / "v.mp4"))
    assert [written.read()[1].shape for _ in range(2)] == [(384, 576, 3)] * 2
    assert written.get(cv2.CAP_PROP_FPS) == pytest.approx(10)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "v.mp4"]


def test_a_result_has_the_annotation_files_ids_and_pixels_of_the_input(
    probe: tuple[CfgNode, str], tmp_path: Path
) -> None:
    dark = _save_image(tmp_path / "dark.png", (100, 0, 0))
    red = _save_image(tmp_path / "red.png", size=(200, 100))
    found = _run(*probe, [dark, red], score_threshold=0.5)
    assert found.num_images == 2
    (box,) = found.results
    assert box == {
        "image_id": 2,
        "file_name": "red.png",
        "category_id": 9,
        "bbox": [0.0, 0.0, 100.0, 100.0],
        "score": pytest.approx(1.0),
    }


def test_broken_files_are_passed_over_and_named(probe: tuple[CfgNode, str], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    whole = _save_image(folder / "whole.jpg", size=(64, 64)).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("not a picture")
    _save_image(folder / "thread.png", size=(3000, 1))
    found = _run(*probe, [folder], tmp_path / "out")
    assert [Path(path).name for path, _ in found.skipped] == ["cut.jpg", "text.png", "thread.png"]
    assert all(reason for _, reason in found.skipped)
    assert [box["file_name"] for box in found.results] == ["whole.jpg"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole.jpg"]


def test_folders_are_searched_empty_ones_named_and_no_two_outputs_meet(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere.jpg"), str(tmp_path)):
        with pytest.raises(UserError, match=name):
            find_inputs([name])

    for name in ["in/a.png", "in/a.bmp", "in/A.PNG", "in/deep/a.png", "in/out/old.png", "b/a.png"]:
        _save_image(tmp_path / name)
    (tmp_path / "in" / "notes.txt").write_text("")
    inputs = [str(tmp_path / "in"), str(tmp_path / "in" / "a.png"), str(tmp_path / "b")]
    files = find_inputs(inputs, exclude=tmp_path / "in" / "out")
    assert [file.name for file in files] == ["A.PNG", "a.bmp", "a.png", "deep/a.png", "a.png"]
    names = [path.as_posix() for path in name_outputs(files)]
    assert names == ["A.png", "a-2.png", "a-3.png", "deep/a.png", "a-4.png"]


def _save_alone(path: Path, cfg: CfgNode, config: str | None = None) -> str:
    """Writes weights that hold all that prediction needs; ``config`` replaces what they say."""
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    info = dataclasses.replace(info, config=info.config if config is None else config)
    save_weights(str(path), build_model(cfg).state_dict(), info)
    return str(path)


def test_safetensors_alone_are_enough_to_predict_and_unknown_ids_count_from_one(
    tmp_path: Path,
) -> None:
    trained = make_probe_config()
    trained.OUTPUT_DIR = "a folder of whoever trained them"
    weights = _save_alone(tmp_path / "w.safetensors", trained)
    (tmp_path / "config.yaml").write_text("of other weights: true")
    cfg = load_run_config(weights, device="cpu", opts=["INPUT.MIN_SIZE_TEST", "48"])
    assert cfg.MODEL.CLASS_NAMES == ["square", "disc"]
    assert cfg.INPUT.MIN_SIZE_TEST == 48
    assert cfg.OUTPUT_DIR == get_cfg().OUTPUT_DIR
    red = np.full((100, 200, 3), (0, 0, 255), np.uint8)  # BGR, where the model wants RGB
    found = build_predictor(cfg)(red)["instances"]
    assert found.scores.item() == pytest.approx(1)
    for ids, expected in ((cfg.MODEL.CATEGORY_IDS, 9), ([], 2)):
        assert Detections(found, ["square", "disc"], ids, red).label_ids == [expected]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("MODEL: {DEVICE: [", ""),
        ("MODEL: {CLASS_NAME: [a]}", "MODEL.CLASS_NAMES"),
        ("a: !!python/object/apply:os.system [touch ran]", ""),
        ("_BASE_: /etc/hostname", ""),
        ("[" * 1000, ""),
        ("MODEL: {LOAD_PROPOSALS: true}", "MODEL.LOAD_PROPOSALS"),
        ("DATASETS: {PROPOSAL_FILES_TEST: ['http://a/p.pkl']}", "DATASETS.PROPOSAL_FILES_TEST"),
    ],
)
def test_a_strangers_config_inside_weights_is_read_with_care(
    tmp_path: Path, config: str, named: str
) -> None:
    weights = _save_alone(tmp_path / "w.safetensors", make_probe_config(), config)
    with pytest.raises(UserError, match=f"{weights}.*{named}"):
        load_run_config(weights)


def test_a_config_beside_weights_makes_nothing_unpickled_unless_it_is_asked_for(
    tmp_path: Path,
) -> None:
    torch.save({"model": {}}, tmp_path / "w.pth")
    (tmp_path / "config.yaml").write_text("DATASETS: {PROPOSAL_FILES_TRAIN: [p.pkl]}")
    weights = f"{tmp_path}/w.pth"
    with pytest.raises(UserError, match=r"config\.yaml.*PROPOSAL_FILES"):
        load_run_config(weights)
    own = load_run_config(weights, f"{tmp_path}/config.yaml")
    assert own.DATASETS.PROPOSAL_FILES_TRAIN == ("p.pkl",)
    cfg = load_run_config(weights, opts=["DATASETS.PROPOSAL_FILES_TRAIN", "()"])
    assert cfg.DATASETS.PROPOSAL_FILES_TRAIN == ()


def test_weights_of_other_classes_than_the_configs_do_not_predict(tmp_path: Path) -> None:
    weights = _save_alone(tmp_path / "w.safetensors", make_retinanet_config())
    cfg = load_run_config(weights, device="cpu")
    build_predictor(cfg)
    named = make_retinanet_config()
    named.MODEL.CLASS_NAMES = ["a", "b", "c"]
    cfg.MODEL.WEIGHTS = _save_alone(tmp_path / "named.safetensors", named)
    cfg.MODEL.CLASS_NAMES = ["a", "c", "b"]
    with pytest.raises(UserError, match=r"\['a', 'b', 'c'\]"):
        build_predictor(cfg)
