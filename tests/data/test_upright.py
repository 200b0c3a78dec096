# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every place that reads pixels gives them upright, whatever the format and EXIF orientation."""

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.structures import BoxMode
from PIL import Image

from qbheat_det.analysis import detections
from qbheat_det.app import uploads
from qbheat_det.data import PretrainingMapper, find_image_errors
from qbheat_det.data.images import open_image, read_image, read_sizes
from qbheat_det.data.mappers import DetectionMapper, UprightMapper
from qbheat_det.data.unlabelled import hash_pixels
from qbheat_det.inference.images import decode_image, open_images, read_rgb
from qbheat_det.labelling.sheet import draw_image
from tests.data.pictures import draw, save

WIDTH, HEIGHT = 90, 60

# From the stored pixels to the upright ones, as the TIFF standard defines each orientation.
TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


FORMATS = {
    "jpg": ("a.jpg", {}),
    "png": ("a.png", {}),
    "webp": ("a.webp", {"lossless": True}),
    "tif": ("a.tif", {}),
    "tif, lzw": ("a.tif", {"compression": "tiff_lzw"}),  # libtiff decodes it
    "tif, pages": ("a.tif", {"save_all": True, "append_images": [Image.new("RGB", (8, 9))]}),
}


@pytest.fixture(params=TURNS, ids=str)
def orientation(request):
    return request.param


@pytest.fixture(params=FORMATS)
def kind(request):
    return request.param


@pytest.fixture
def picture(kind, orientation, tmp_path):
    """A file with an orientation, and its upright pixels (H, W, 3)."""
    name, options = FORMATS[kind]
    with Image.open(save(tmp_path / f"plain_{name}", draw(WIDTH, HEIGHT), **options)) as image:
        stored = np.array(image)
    path = save(tmp_path / name, draw(WIDTH, HEIGHT), orientation=orientation, **options)
    return path, np.ascontiguousarray(TURNS[orientation](stored))


def _map(path, *augmentations, **options):
    options = {"image_format": "RGB", "augmentations": augmentations, **options}
    return DetectionMapper(**options)({"file_name": path})["image"].permute(1, 2, 0)


def _read_loaded(path):
    with Image.open(path) as image:
        image.load()
        return read_rgb(image)


def _read_from_pillow(path):
    with Image.open(path) as image:
        return read_rgb(image)


def _decode(path):
    with open(path, "rb") as file:
        return decode_image(file, path)


def _open(path):
    with open_image(path) as image:
        assert (image.height, image.width) in ((HEIGHT, WIDTH), (WIDTH, HEIGHT))
        return image.decode()


READERS = {
    "open_image": _open,
    "read_image": lambda path: read_image(path, "RGB"),
    "read_image, BGR": lambda path: read_image(path, "BGR")[..., ::-1],
    "detection mapper, training": lambda path: _map(path, is_train=True),
    "detection mapper, other augmentation": lambda path: _map(
        path, T.RandomRotation([0.0, 0.0]), is_train=True
    ),
    "detection mapper, inference": lambda path: _map(path, is_train=False),
    "a file": read_rgb,
    "Pillow's image": _read_from_pillow,
    "Pillow's decoded image": _read_loaded,
    "prediction": lambda path: next(open_images(path)).image,
    "an open file": _decode,
    "the figure of detections": lambda path: detections._read_image(
        SimpleNamespace(image_root=Path()), {"file_name": path}
    ),
    "contact sheet": lambda path: np.array(draw_image(SimpleNamespace(boxes={}), path, side=99)),
}


def test_every_reader_turns_an_image_once(picture):
    path, upright = picture
    for name, read in READERS.items():
        np.testing.assert_array_equal(np.asarray(read(path)), upright, err_msg=name)
    # The page refuses TIFF.
    if not path.endswith(".tif"):
        np.testing.assert_array_equal(uploads.open_image(Path(path)), upright)


def test_sizes_crops_and_digests_are_of_the_upright_image(picture, tmp_path):
    path, upright = picture
    height, width = upright.shape[:2]
    assert list(read_sizes([path])) == [(width, height)]
    record = {"file_name": path, "width": width, "height": height}
    assert find_image_errors([record]) == []
    assert len(find_image_errors([{**record, "width": height, "height": width}])) == 1
    top, left = (height - HEIGHT) // 2, (width - HEIGHT) // 2
    square = PretrainingMapper(size=HEIGHT, is_train=False)({"file_name": path})["image"]
    expected = upright[top : top + HEIGHT, left : left + HEIGHT]
    np.testing.assert_array_equal(square.permute(1, 2, 0), expected)
    plain = save(tmp_path / "upright.png", upright)
    assert hash_pixels(path, 1333) == hash_pixels(plain, 1333)


@pytest.mark.parametrize("is_train", [True, False])
def test_the_mapper_is_otherwise_detectron2s(is_train, tmp_path):
    path = save(tmp_path / "a.png", draw(WIDTH, HEIGHT))
    labels = save(tmp_path / "labels.png", draw(WIDTH, HEIGHT, seed=1)[..., 0], mode="L")
    box = {"bbox": [5, 6, 30, 40], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1}
    record = {
        "file_name": path, "sem_seg_file_name": labels, "width": WIDTH, "height": HEIGHT,
        "annotations": [box], "proposal_boxes": np.array([[1.0, 2.0, 50.0, 60.0]]),
        "proposal_objectness_logits": np.array([2.0]), "proposal_bbox_mode": BoxMode.XYXY_ABS,
    }  # fmt: skip
    options = {
        "is_train": is_train, "image_format": "BGR", "precomputed_proposal_topk": 2,
        "augmentations": [T.Resize((40, 50)), T.RandomFlip(1.0)],
    }  # fmt: skip
    given = copy.deepcopy(record)
    found, expected = (each(**options)(given) for each in (UprightMapper, DatasetMapper))
    assert str(given) == str(record)
    assert found.keys() == expected.keys()
    assert torch.equal(found["image"], expected["image"])
    assert torch.equal(found["sem_seg"], expected["sem_seg"])
    for name in {"instances", "proposals"} & found.keys():
        mine, theirs = found[name].get_fields(), expected[name].get_fields()
        assert mine.keys() == theirs.keys()
        for key, values in mine.items():
            assert torch.equal(getattr(values, "tensor", values),
                               getattr(theirs[key], "tensor", theirs[key]))  # fmt: skip
    assert ("instances" in found) == is_train


def test_labels_of_pixels_are_turned_like_their_image(tmp_path):
    pixels = draw(WIDTH, HEIGHT)
    image = save(tmp_path / "image.tif", pixels, orientation=6)
    labels = save(tmp_path / "labels.tif", pixels[..., 0], mode="L", orientation=6)
    mapper = DetectionMapper(is_train=True, augmentations=[], image_format="RGB")
    found = mapper({"file_name": image, "sem_seg_file_name": labels})
    np.testing.assert_array_equal(found["image"].permute(1, 2, 0), TURNS[6](pixels))
    np.testing.assert_array_equal(found["sem_seg"], TURNS[6](pixels[..., 0]))


# An EXIF block whose orientation is the text "6".
TEXT = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\x006\0\0\0\0\0\0\0"


@pytest.mark.parametrize("options", [{"orientation": 0}, {"orientation": 9}, {"exif": TEXT}])
def test_an_orientation_that_is_no_number_from_1_to_8_is_upright(options, tmp_path):
    pixels = draw(WIDTH, HEIGHT)
    path = save(tmp_path / "a.png", pixels, **options)
    for name, read in READERS.items():
        np.testing.assert_array_equal(np.asarray(read(path)), pixels, err_msg=name)
