# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction: weights that fit or are refused, pixels in the right order, results as COCO's."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.engine.predict import (
    Predictions,
    build_predictor,
    find_inputs,
    get_category_id,
    name_outputs,
    predict_images,
)
from tests.engine.tiny_detectors import (
    make_probe_config,
    make_retinanet_config,
    save_run,
)

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
        cfg=cfg,
        score_threshold=score_threshold,
        output_dir=output,
        draw=lambda image, instances: image,
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
    assert [written.read()[1].shape for _ in range(2)] == [(32, 48, 3)] * 2
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


def test_an_image_is_turned_upright_as_its_exif_says(
    probe: tuple[CfgNode, str], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held a quarter turn to the side
    Image.new("RGB", (200, 100), RED).save(tmp_path / "turned.jpg", exif=exif)
    found = _run(*probe, [tmp_path / "turned.jpg"], tmp_path / "out")
    assert found.results[0]["bbox"] == [0.0, 0.0, 50.0, 200.0]
    assert Image.open(tmp_path / "out" / "turned.jpg").size == (100, 200)


def test_broken_files_are_passed_over_and_named(probe: tuple[CfgNode, str], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    whole = _save_image(folder / "whole.jpg", size=(64, 64)).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("not a picture")
    _save_image(folder / "thread.png", size=(3000, 1))
    found = _run(*probe, [folder], tmp_path / "out")
    assert [Path(path).name for path, _ in found.skipped] == [
        "cut.jpg",
        "text.png",
        "thread.png",
    ]
    assert all(reason for _, reason in found.skipped)
    assert [box["file_name"] for box in found.results] == ["whole.jpg"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole.jpg"]


def test_folders_are_searched_and_no_two_outputs_meet(tmp_path: Path) -> None:
    for name in ["in/a.png", "in/a.bmp", "in/A.PNG", "in/deep/a.png", "in/out/old.png", "b/a.png"]:
        _save_image(tmp_path / name)
    (tmp_path / "in" / "notes.txt").write_text("")
    inputs = [str(tmp_path / "in"), str(tmp_path / "in" / "a.png"), str(tmp_path / "b")]
    files = find_inputs(inputs, exclude=tmp_path / "in" / "out")
    assert [file.name for file in files] == ["A.PNG", "a.bmp", "a.png", "deep/a.png", "a.png"]
    names = [path.as_posix() for path in name_outputs(files)]
    assert names == ["A.png", "a-2.png", "a-3.png", "deep/a.png", "a-4.png"]


def test_inputs_that_hold_nothing_are_named(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere.jpg"), str(tmp_path)):
        with pytest.raises(UserError, match=name):
            find_inputs([name])


def test_the_model_holds_the_tensors_of_the_file(tmp_path: Path) -> None:
    cfg = make_retinanet_config()
    cfg.MODEL.WEIGHTS = save_run(cfg, tmp_path / "run", seed=7)
    expected = torch.load(cfg.MODEL.WEIGHTS, weights_only=True)["model"]
    torch.testing.assert_close(build_predictor(cfg).model.state_dict(), expected, rtol=0, atol=0)


def test_classes_without_known_ids_count_from_one() -> None:
    cfg = make_probe_config()
    assert [get_category_id(cfg, i) for i in (0, 1)] == [4, 9]
    cfg.MODEL.CATEGORY_IDS = []
    assert [get_category_id(cfg, i) for i in (0, 1)] == [1, 2]
