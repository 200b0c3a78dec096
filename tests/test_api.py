# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat_det.load``: the same boxes as the tool's, and the same maps as the model's."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

import qbheat_det
from qbheat_det.api import predict_files, read_rgb
from qbheat_det.core.errors import UserError
from tests.data.pictures import draw, save

NAME = "retinanet/285M_bccd"


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "image.png"
    save(path, draw(120, 160, seed=1))
    return path


def test_boxes_are_those_of_the_tool_for_every_kind_of_image(picture: Path) -> None:
    detector = qbheat_det.load(NAME, device="cpu")
    expected = predict_files(f"qbheat://{NAME}", [str(picture)], score_threshold=0.01, device="cpu")
    assert expected.results
    image = PIL.Image.open(picture).convert("RGB")
    found = detector.predict([picture, str(picture), image, np.asarray(image)], threshold=0.01)
    for detections in found:
        plain = [{k: v for k, v in box.items() if k != "file_name"} for box in expected.results]
        assert detections.to_coco() == plain
    one = detector.predict(picture, threshold=0.01)
    assert len(one) == len(plain) == len(one.labels) == len(one.scores)
    assert set(one.labels) <= set(detector.cfg.MODEL.CLASS_NAMES)
    one.save(picture.with_name("drawn.png"))
    with PIL.Image.open(picture.with_name("drawn.png")) as drawn:
        assert drawn.width / drawn.height == pytest.approx(image.width / image.height)


def test_an_encoders_maps_are_its_backbones(picture: Path) -> None:
    encoder = qbheat_det.load("qb_heat/285M_caltech101", device="cpu")
    outputs = encoder(picture)
    pixels = torch.from_numpy(np.asarray(PIL.Image.open(picture).convert("RGB")).copy())
    mean, std = (torch.tensor(encoder.cfg.MODEL[key]) for key in ("PIXEL_MEAN", "PIXEL_STD"))
    with torch.no_grad():
        x = ((pixels - mean) / std).permute(2, 0, 1)[None]
        expected = encoder.model(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert len(encoder([picture, picture])["s16_expanded"]) == 2


@pytest.mark.parametrize("weights", ["retinanet/285M_nothing", "nowhere.safetensors"])
def test_what_is_not_there_is_named(weights: str) -> None:
    with pytest.raises(UserError, match=weights):
        qbheat_det.load(weights)


def test_arguments_that_make_no_sense_are_refused(picture: Path) -> None:
    with pytest.raises(UserError, match="threshold"):
        qbheat_det.load(NAME, device="cpu").predict(picture, threshold=50)
    with pytest.raises(UserError, match="empty"):
        qbheat_det.load("qb_heat/285M_caltech101", device="cpu")([])


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.jpg"):
        qbheat_det.load(NAME, device="cpu").predict(tmp_path / "broken.jpg")


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        None,
    ],
    ids=["float", "grey", "empty", "none"],
)
def test_what_is_no_image_is_refused(image: np.ndarray) -> None:
    with pytest.raises(UserError, match="uint8"):
        read_rgb(image)


def test_a_turned_photo_is_upright_however_it_is_given(tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(np.zeros((10, 30, 3), np.uint8)).save(tmp_path / "t.jpg", exif=exif)
    assert read_rgb(tmp_path / "t.jpg").shape == (30, 10, 3)
    assert read_rgb(PIL.Image.open(tmp_path / "t.jpg")).shape == (30, 10, 3)
