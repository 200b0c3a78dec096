# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mappers by name, those of detection beside Detectron2's; views of contrastive pre-training."""

import errno
import random
import re

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import seed_place
from qbheat_det.data import DataError, FixedViews, PretrainingMapper, build_mapper
from qbheat_det.data.mappers import (
    DATASET_MAPPERS,
    DetectionMapper,
    DetrDatasetMapper,
    NamingMapper,
    TwoViewMapper,
    crops,
    find_size,
    number_records,
)
from qbheat_det.modeling.contracts import TILE
from tests.data.pictures import draw, save


class Mine:
    """A mapper of one's own."""

    def __init__(self, cfg, is_train):
        self.is_train = is_train

    def __call__(self, dataset_dict):
        return dataset_dict


@pytest.mark.parametrize("is_train", [True, False])
def test_each_name_builds_its_class(is_train, monkeypatch):
    monkeypatch.setitem(DATASET_MAPPERS, "mine", Mine)
    cfg = get_cfg()
    assert cfg.INPUT.DATASET_MAPPER_NAME == "default"
    for name, class_ in {
        "default": DetectionMapper,
        "detr": DetrDatasetMapper,
        "mine": Mine,
    }.items():
        cfg.INPUT.DATASET_MAPPER_NAME = name
        mapper = build_mapper(cfg, is_train)
        assert type(mapper.mapper) is class_
        assert mapper.mapper.is_train is is_train


BAD = [
    ("dert", "INPUT.DATASET_MAPPER_NAME", "dert"),
    ("detr", "INPUT.DETR_CROP_RANGE", [600, 384]),
    ("detr", "INPUT.DETR_CROP_RANGE", [384]),
    ("detr", "INPUT.DETR_CROP_RESIZE", [400, 0]),
    ("pretrain", "INPUT.PRETRAIN.SIZE", 0),
    *(("pretrain", "INPUT.PRETRAIN.SCALE", v) for v in ([0.0, 1.0], [0.5, 0.2], [0.5, 1.5], [0.5])),
    ("pretrain", "INPUT.RANDOM_FLIP", "diagonal"),
    ("pretrain", "INPUT.FORMAT", "L"),
    *(
        ("classify", "INPUT.CLASSIFY.RAND_AUGMENT", v)
        for v in ([9.0], [9.5, 0.5], [11.0, 0.5], [9.0, -1.0])
    ),
    ("classify", "INPUT.CLASSIFY.RANDOM_ERASING", 1.5),
    *(("classify", "INPUT.CLASSIFY.TEST_CROP", v) for v in (0.0, 1.1)),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD)
def test_values_that_make_no_sense_are_refused_by_key(name, key, value):
    cfg = get_cfg()
    cfg.merge_from_list([key, value, "INPUT.DATASET_MAPPER_NAME", name])
    with pytest.raises(UserError, match=re.escape(key)):
        build_mapper(cfg, True)


@pytest.mark.parametrize(("count", "seed", "key"), [(0, 0, "COUNT"), (1, -1, "SEED")])
def test_fixed_views_without_sense_are_refused(count, seed, key):
    with pytest.raises(UserError, match=rf"INPUT\.FIXED_VIEWS\.{key}"):
        FixedViews(dict, count, seed)


def test_each_view_of_each_image_has_its_own_numbers_whatever_was_drawn_before():
    def augment(record):
        return {**record, "drawn": (random.random(), np.random.rand(), float(torch.rand(())))}

    def draw_all(seed):
        views = FixedViews(augment, 3, seed)
        records = number_records([{"file_name": name} for name in ("a", "b", "c/a", "d/a")])
        return [views.view(one, number)["drawn"] for one in records for number in range(3)]

    found, others = draw_all(5), draw_all(6)
    assert draw_all(5) == found
    for kind in range(3):
        assert len({drawn[kind] for drawn in found + others}) == 24


@pytest.mark.parametrize("kind", ["missing", "no picture", "truncated", "of another size"])
def test_an_image_that_cannot_be_read_is_an_error_that_names_it(kind, tmp_path):
    path = tmp_path / "a.jpg"
    save(path, draw(60, 40))
    record = {"file_name": str(path), "label": 0, "annotations": []}
    tile = {"height": 40, "width": 60, TILE: (0, 0, 32, 32)}
    if kind == "missing":
        path.unlink()
    elif kind == "no picture":
        path.write_bytes(b"no picture")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cfg = get_cfg()
    cfg.INPUT.FORMAT = "RGB"
    names = ["default", "detr"]
    if kind == "of another size":  # a detector's boxes would not fit
        record |= {"height": 60, "width": 40}
    else:
        names += ["pretrain", "classify", "two_views"]
    for cfg.INPUT.DATASET_MAPPER_NAME in names:
        for is_train in (True, False):
            error = build_mapper(cfg, is_train)(record)
            assert isinstance(error, DataError)
            assert str(path) in error.where
    cfg.INPUT.DATASET_MAPPER_NAME, cfg.INPUT.TILE = "default", 32
    if kind != "of another size":
        assert isinstance(build_mapper(cfg, True)({**record, **tile}), DataError)


@pytest.mark.parametrize("error", [ValueError("a mistake"), OSError(errno.EMFILE, "too many")])
def test_an_error_of_a_mapper_or_of_the_process_is_not_blamed_on_a_whole_image(error, tmp_path):
    path = save(tmp_path / "a.png", draw(60, 40))

    def fail(record):
        raise error

    with pytest.raises(type(error)) as raised:
        NamingMapper(fail)({"file_name": path})
    assert raised.value is error


def make_cfg(**keys):
    cfg = get_cfg()
    cfg.INPUT.FORMAT = "RGB"
    cfg.INPUT.DATASET_MAPPER_NAME = "detr"
    for key, value in keys.items():
        cfg.INPUT[key] = value
    return cfg


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """An image of 500 × 400 pixels with two objects."""
    file = save(tmp_path_factory.mktemp("images") / "boxes.png", draw(500, 400))
    annotations = [
        {"bbox": box, "bbox_mode": 1, "category_id": i, "iscrowd": 0}
        for i, box in enumerate([[40, 60, 150, 220], [260, 30, 330, 90]])
    ]
    return {"file_name": file, "image_id": 1, "height": 400, "width": 500,
            "annotations": annotations}  # fmt: skip


def test_sizes_are_those_of_the_recipe(record):
    np.random.seed(0)
    sizes = (120, 130, 140, 150)
    mapper = build_mapper(make_cfg(MIN_SIZE_TRAIN=sizes, MAX_SIZE_TRAIN=180), True)
    short, kept = set(), 0
    for _ in range(48):
        height, width = mapper(record)["image"].shape[1:]
        assert max(height, width) <= 180
        short.add(min(height, width) if max(height, width) < 180 else 120)
        # Uncropped, the ratio is that of the image, up to a pixel.
        kept += abs(width / height - 1.25) < 0.01
    assert short == set(sizes)
    assert 12 <= kept <= 36


@pytest.mark.parametrize("tile", [None, (20, 30, 300, 200)])
@pytest.mark.parametrize("name", ["default", "detr"])
def test_the_size_is_known_before_the_file_is_read(name, tile, record):
    cfg = make_cfg(MIN_SIZE_TRAIN=(100, 120, 150), MAX_SIZE_TRAIN=180, TILE=300)
    cfg.INPUT.DATASET_MAPPER_NAME = name
    views = FixedViews(build_mapper(cfg, True), 3, seed=1)
    if tile is not None:
        record = {**record, TILE: tile}
    (record,) = number_records([record])
    sizes = set()
    for mapper in (views.mapper, views):
        for place in range(12):
            seed_place(5, place)
            image = mapper(record)["image"]
            seed_place(5, place)
            size = find_size(mapper, {**record, "file_name": "is not read"})
            assert size == tuple(image.shape[1:])
            sizes.add(size)
    assert len(sizes) >= 2


def test_sizes_that_cannot_be_known_are_refused_by_key(record):
    key = r"DATALOADER\.SIZE_GROUPING"
    with pytest.raises(UserError, match=rf"{key}.*INPUT\.DATASET_MAPPER_NAME"):
        find_size(PretrainingMapper(size=32), record)
    colours = DetectionMapper(is_train=True, augmentations=[T.RandomContrast(0.5, 2)],
                              image_format="RGB")  # fmt: skip
    with pytest.raises(UserError, match=f"{key}.*resize, crop and flip"):
        find_size(colours, record)


def test_boxes_that_the_crop_loses_are_dropped_and_the_image_stays(record):
    np.random.seed(0)
    small = {**record, "annotations": record["annotations"][1:]}
    mapper = build_mapper(
        make_cfg(DETR_CROP_RESIZE=[400], DETR_CROP_RANGE=[120, 160], MIN_SIZE_TRAIN=(160,)), True
    )
    counts = [len(mapper(small)["instances"]) for _ in range(60)]
    assert set(counts) == {0, 1}


@pytest.mark.parametrize("pixel_format", ["RGB", "BGR"])
@pytest.mark.parametrize("name", ["default", "detr"])
def test_detection_mapper_equals_detectron2(name, pixel_format, tmp_path):
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME, cfg.INPUT.FORMAT = name, pixel_format
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.DETR_CROP_RANGE = (120, 200), (60, 90)
    cfg.INPUT.DETR_CROP_RESIZE = (100, 130)
    ours = build_mapper(cfg, True).mapper
    theirs = DatasetMapper(**type(ours).from_config(cfg, True))
    kinds = [("a.jpg", None), ("b.png", None), ("c.jpg", 6)]
    files = [save(tmp_path / end, draw(160, 150), orientation=turn) for end, turn in kinds]
    boxes = [[10.3, 20.0, 50.0, 60.7], [0.0, 0.0, 149.0, 150.0], [140.0, 140.0, 30.0, 40.0]]
    annotations = [
        {"bbox": box, "bbox_mode": 1, "category_id": number, "iscrowd": int(number == 3)}
        for number, box in enumerate([*boxes, boxes[0]])
    ]
    for seed, file in enumerate(4 * files):
        found = []
        for mapper in (ours, theirs):
            np.random.seed(seed)
            found.append(mapper({"file_name": file, "annotations": annotations}))
        a, b = (entry["instances"] for entry in found)
        assert torch.equal(a.gt_boxes.tensor, b.gt_boxes.tensor)
        assert torch.equal(a.gt_classes, b.gt_classes)
        assert a.image_size == b.image_size
        image, expected = (entry["image"].int() for entry in found)
        assert image.shape == expected.shape
        assert (image - expected).abs().max() <= 2


def test_large_jpeg_is_decoded_at_reduced_size_and_boxes_stay(tmp_path):
    cfg = get_cfg()
    cfg.INPUT.MIN_SIZE_TRAIN = (120,)
    cfg.INPUT.RANDOM_FLIP = "none"
    ours = build_mapper(cfg, True).mapper
    y, x = np.mgrid[:480, :640]
    square = np.where((x >= 160) & (x < 320) & (y >= 80) & (y < 240), 255, 0)
    file = save(tmp_path / "a.jpg", np.stack(3 * [square.astype(np.uint8)], -1), quality=95)
    annotation = {"bbox": [160, 80, 160, 160], "bbox_mode": 1, "category_id": 0}
    entry = ours({"file_name": file, "annotations": [annotation]})
    assert entry["image"].shape == (3, 120, 160)  # a quarter, which a draft gives
    left, top, right, bottom = map(int, entry["instances"].gt_boxes.tensor[0])
    assert (left, top, right, bottom) == (40, 20, 80, 60)
    bright = entry["image"][0] > 127
    assert bright[top:bottom, left:right].all()
    assert bright.sum() == 40 * 40


def test_a_jpeg_whose_sides_are_no_multiples_is_decoded_whole(tmp_path):
    cfg = get_cfg()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.RANDOM_FLIP = (60,), "none"
    ours = build_mapper(cfg, True).mapper
    theirs = DatasetMapper(**type(ours).from_config(cfg, True))
    file = save(tmp_path / "a.jpg", draw(301, 243), quality=95)
    image, expected = (mapper({"file_name": file})["image"].int() for mapper in (ours, theirs))
    assert (image - expected).abs().max() <= 2


PROBABILITIES = ("_JITTER_PROBABILITY", "_GREY_PROBABILITY", "_BLUR_PROBABILITY")


def mapped(mapper, path, seed=0, **fields):
    torch.manual_seed(seed)
    return mapper({"file_name": path, "image_id": 5, **fields})


def two_views(**crop):
    return TwoViewMapper(crop=PretrainingMapper(**{"size": 32, **crop}))


def alone(monkeypatch, **probability):
    """One augmentation, and neither crop nor flip."""
    for name in PROBABILITIES:
        monkeypatch.setattr(crops, name, probability.get(name, 0.0))
    return two_views(scale=(1.0, 1.0), flip="none")


def blur_naively(image, sigma):
    """A Gaussian over the image (H, W) and its mirror image beyond the border, as one sum."""
    reach = 12
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights /= weights.sum()
    wide = np.pad(image.astype(np.float64), reach, mode="reflect")
    rows = sum(w * wide[i : i + image.shape[0]] for i, w in enumerate(weights))
    return np.asarray(sum(w * rows[:, i : i + image.shape[1]] for i, w in enumerate(weights)))


def test_without_augmentation_the_views_are_two_draws_of_the_pre_training_mapper(
    tmp_path, monkeypatch
):
    path = save(tmp_path / "a.png", draw(150, 110))
    alone(monkeypatch)
    single = PretrainingMapper(size=32)
    for seed in range(4):
        both = mapped(two_views(), path, seed)
        first = mapped(single, path, seed)
        second = single({"file_name": path})
        torch.testing.assert_close(both["image"], first["image"], rtol=0, atol=0)
        torch.testing.assert_close(both["image_key"], second["image"], rtol=0, atol=0)
        assert not torch.equal(both["image"], both["image_key"])


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_a_gaussian_of_that_width(sigma, tmp_path, monkeypatch):
    pixels = draw(32, 32)
    monkeypatch.setattr(crops, "BLUR_SIGMA", (sigma, sigma))
    mapper = alone(monkeypatch, _BLUR_PROBABILITY=1.0)
    view = mapped(mapper, save(tmp_path / "a.png", pixels))["image"]
    for channel in range(3):
        expected = torch.from_numpy(blur_naively(pixels[..., channel], sigma))
        torch.testing.assert_close(view[channel].double(), expected, rtol=0, atol=1.0)


def test_each_augmentation_has_its_probability(tmp_path, monkeypatch):
    pixels = draw(32, 32)
    path = save(tmp_path / "a.png", pixels)
    for name in PROBABILITIES:
        mapper = alone(monkeypatch, **{name: 0.5})
        views = [mapped(mapper, path, seed)["image_key"] for seed in range(24)]
        same = [torch.equal(view, torch.from_numpy(pixels).permute(2, 0, 1)) for view in views]
        assert 4 <= sum(same) <= 20
        grey = [torch.equal(view[0], view[1]) and torch.equal(view[0], view[2]) for view in views]
        assert any(grey) == (name == "_GREY_PROBABILITY")


def test_channels_in_reverse_are_augmented_the_same(tmp_path):
    path = save(tmp_path / "a.png", draw(60, 60))
    rgb, bgr = (two_views(pixel_format=order) for order in ("RGB", "BGR"))
    for seed in range(6):
        for key in ("image", "image_key"):
            expected = mapped(rgb, path, seed)[key].flip(0)
            torch.testing.assert_close(mapped(bgr, path, seed)[key], expected, rtol=0, atol=0)
            assert not torch.equal(mapped(rgb, path, seed + 100)[key].flip(0), expected)
