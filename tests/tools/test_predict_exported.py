# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/predict.py with an exported file: boxes and classes as with weights, and sentences."""

import json
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from qbheat_det.engine.exporting.export_info import METADATA_FILE, ExportInfo
from torch import Tensor, nn

from qbheat_det.config import dump_config, get_cfg
from tests.tool_modules import load_tool


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    return load_tool("predict")


class _LeftHalf(nn.Module):
    """Finds the left half of every image twice, scored by the first channel, and half of that."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        box = torch.tensor([0.0, 0.0, images.shape[2] / 2, float(images.shape[1])])
        boxes = box.expand(images.shape[0], 3, 4)
        score = images[..., 0].float().mean(dim=(1, 2)) / 255
        scores = torch.stack([score, score / 2, score], dim=1)
        labels = torch.ones(scores.shape, dtype=torch.int64)
        return boxes, scores, labels, torch.full((images.shape[0],), 2)


class _Brightness(nn.Module):
    """Scores of three classes: the means of the channels, as parts of their sum."""

    def forward(self, images: Tensor) -> tuple[Tensor]:
        means = images.float().mean(dim=(1, 2)) + 1
        return (means / means.sum(dim=1, keepdim=True),)


def save_script(module: nn.Module, path: Path, info: ExportInfo) -> str:
    """Writes what tools/export.py --format torchscript does, of any module."""
    files = {METADATA_FILE: info.to_json()}
    torch.jit.save(torch.jit.script(module), str(path), _extra_files=files)
    return str(path)


def _detector_info(pixel_format: str) -> ExportInfo:
    return ExportInfo(
        task="detection",
        outputs=("boxes", "scores", "labels", "counts"),
        pixel_format=pixel_format,
        class_names=("square", "disc"),
        category_ids=(4, 9),
        config=dump_config(get_cfg()),
    )


def _save_image(path: Path, color: tuple[int, int, int] = (255, 0, 0)) -> str:
    Image.new("RGB", (200, 100), color).save(path)
    return str(path)


@pytest.mark.parametrize(("pixel_format", "red"), [("RGB", 1.0), ("BGR", 0.0)])
def test_an_exported_detector_sees_its_pixel_format_and_gives_the_annotation_files_ids(
    predict: ModuleType, tmp_path: Path, pixel_format: str, red: float
) -> None:
    weights = save_script(_LeftHalf(), tmp_path / "m.ts", _detector_info(pixel_format))
    arguments = ["--weights", weights, "--input", _save_image(tmp_path / "red.png")]
    arguments += ["--json", str(tmp_path / "r.json"), "--score-threshold", "0", "--device", "cpu"]
    assert predict.main(arguments) == 0
    box = {"image_id": 1, "file_name": "red.png", "category_id": 9}
    box["bbox"] = [0.0, 0.0, 100.0, 100.0]
    assert json.loads((tmp_path / "r.json").read_text()) == [
        {**box, "score": pytest.approx(red)},
        {**box, "score": pytest.approx(red / 2)},
    ]


def test_pictures_and_videos_are_drawn_and_the_threshold_holds(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_script(_LeftHalf(), tmp_path / "m.torchscript", _detector_info("RGB"))
    writer = cv2.VideoWriter(str(tmp_path / "v.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (48, 32))
    for _ in range(2):
        writer.write(np.full((32, 48, 3), (0, 0, 255), np.uint8))
    writer.release()
    arguments = ["--weights", weights, "--input", _save_image(tmp_path / "red.png")]
    arguments += [str(tmp_path / "v.mp4"), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert predict.main([*arguments, "--score-threshold", "0.6"]) == 0
    assert "3 boxes with a score of 0.6 or more on 1 images and 2 video" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["red.png", "v.mp4"]
    drawn = np.asarray(Image.open(tmp_path / "out" / "red.png"))
    assert (drawn != (255, 0, 0)).any()


def test_an_exported_classifier_names_the_likeliest_classes(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = "classify"
    info = ExportInfo(
        task="classification",
        outputs=("scores",),
        pixel_format="RGB",
        class_names=("red", "green", "blue"),
        config=dump_config(cfg),
    )
    weights = save_script(_Brightness(), tmp_path / "m.ts", info)
    (tmp_path / "in").mkdir()
    _save_image(tmp_path / "in" / "a.png", (10, 49, 138))
    (tmp_path / "in" / "b.png").write_text("no picture")
    (tmp_path / "in" / "c.mp4").write_text("no film")
    arguments = ["--weights", weights, "--input", str(tmp_path / "in"), "--device", "cpu"]
    assert predict.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().err
    assert "b.png: not an image" in said
    assert "c.mp4: a classifier takes images, and no videos" in said
    (found,) = json.loads((tmp_path / "r.json").read_text())
    assert found["file_name"] == "a.png"
    names = [entry["name"] for entry in found["classes"]]
    assert names == ["blue", "green", "red"]
    scores = [entry["score"] for entry in found["classes"]]
    np.testing.assert_allclose(scores, [139 / 200, 50 / 200, 11 / 200], rtol=1e-6)


def test_what_an_exported_file_cannot_do_is_a_sentence(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = _save_image(tmp_path / "a.png")
    detector = save_script(_LeftHalf(), tmp_path / "m.ts", _detector_info("RGB"))
    features = ExportInfo(
        task="features", outputs=("s8",), pixel_format="RGB", config=dump_config(get_cfg())
    )
    backbone = save_script(_Brightness(), tmp_path / "b.ts", features)
    (tmp_path / "broken.onnx").write_text("no file of onnx")
    (tmp_path / "broken.pt2").write_text("no archive")
    cases = [
        ([detector, "INPUT.MIN_SIZE_TEST", "48"], "exported with its config inside"),
        ([backbone], "is an exported backbone, which finds no boxes"),
        ([str(tmp_path / "none.onnx")], "does not exist"),
        ([str(tmp_path / "broken.onnx")], "cannot be opened"),
        ([str(tmp_path / "broken.pt2")], "cannot be opened"),
    ]
    for (weights, *opts), reason in cases:
        arguments = ["--weights", weights, "--input", image, "--json", str(tmp_path / "r.json")]
        with pytest.raises(SystemExit, match="2"):
            predict.main([*arguments, "--device", "cpu", *opts])
        assert reason in capsys.readouterr().err
