# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention of tokens and of queries, of real files of weights beside each other."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from detectron2.config import CfgNode
from PIL import Image

from qbheat_det.analysis.attention import find_mobile_former, measure_likeness, read_bridges
from qbheat_det.analysis.exhibit import write_exhibit
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.attention import see_attention
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.queries import see_queries
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.same_pictures import batch_images, crop_squares
from qbheat_det.engine.seeing.subject import Subject
from tests.modeling.tiny_pretraining import make_tiny_config

from .encoder_subjects import cut_short, make_pictures, make_subject, pretraining_config


def mf_detr_config() -> CfgNode:
    cfg = make_tiny_config("MFDETR")
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16_expanded"]
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    cfg.MODEL.MF_DETR.HIDDEN_DIM = cfg.MODEL.MF_DETR.DIM_FEEDFORWARD = 16
    cfg.MODEL.MF_DETR.NUM_CLASSES = 3
    cfg.MODEL.MF_DETR.NUM_OBJECT_QUERIES = 5
    cfg.MODEL.CLASS_NAMES = ["cat", "dog", "bird"]
    cfg.INPUT.DATASET_MAPPER_NAME = "detr"
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    return cfg


def resnet_config() -> CfgNode:
    cfg = pretraining_config("ImageClassifier")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 8
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3"]
    cfg.MODEL.CLASSIFIER.IN_FEATURE = "res3"
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 3
    cfg.MODEL.CLASS_NAMES = ["cat", "dog", "bird"]
    cfg.INPUT.DATASET_MAPPER_NAME = "classify"
    return cfg


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("weights")
    made = [
        make_subject(folder, pretraining_config(), "trained"),
        make_subject(folder, mf_detr_config(), "detector"),
        make_subject(folder, mf_detr_config(), "another", seed=1),
        make_subject(folder, resnet_config(), "resnet"),
    ]
    return {subject.label: subject for subject in made}


def test_attention_of_a_pre_training_and_of_a_detector_stands_in_the_same_pictures(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    extra = {"attention_images": 3, "attention_size": 48}
    options = SightOptions(images=pictures, num_images=1, extra=extra)
    cut = cut_short(subjects["trained"], tmp_path)
    exhibit = see_attention(
        [cut, *(subjects[n] for n in ("trained", "resnet", "detector"))], options
    )
    assert list(exhibit.pictures) == [
        "to_former_blocks", "to_former_1", "to_mobile_blocks", "to_mobile_1",
    ]  # fmt: skip
    figures = json.loads(write_exhibit(exhibit, tmp_path)[0].read_text())["figures"]
    assert figures["left_out"][0].startswith("'cut': ")
    assert "'resnet' has no Mobile-Former" in figures["left_out"][1]
    assert [Path(name).name for name in figures["images"]] == ["0.png", "1.png", "2.png"]
    assert [row["number"] for row in figures["subjects"]["detector"]] == [2, 3, 4]
    # By itself: the mean over the three images.
    subject = subjects["trained"]
    entries = crop_squares(subject.cfg, figures["images"], 48)
    (images,) = batch_images(subject.model, entries)
    backbone = find_mobile_former(subject.model)
    assert backbone is not None
    (block,) = read_bridges(backbone, images, numbers=[3])
    found = figures["subjects"]["trained"][1]["to_former"]
    assert found["likeness"] == pytest.approx(float(measure_likeness(block.to_former).mean()))
    # What is drawn of the first image: of six tokens each, all maps are small enough to be listed.
    alone = figures["drawn"]["trained"][0]
    (one,) = read_bridges(backbone, images[:1], numbers=[3])
    found = alone["blocks"][1]["to_former"]["likeness"]
    assert found == pytest.approx(float(measure_likeness(one.to_former).mean()))
    row = next(row for row in alone["rows"]["to_mobile"] if row["label"].startswith("block 3"))
    np.testing.assert_allclose(row["maps"], one.to_mobile[0].mean(dim=0).numpy(), rtol=1e-3)
    tokens = len(row["maps"])
    assert row["top_of_scale"] == pytest.approx(2 / tokens)  # evenly shared is its middle
    assert exhibit.table is not None
    assert [row[0] for row in exhibit.table.rows] == [
        "trained, likeness", "trained, spread", "detector, likeness", "detector, spread",
    ]  # fmt: skip


def test_heads_stand_apart_on_request_and_only_the_blocks_asked_for(
    subjects: dict[str, Subject], pictures: Path
) -> None:
    extra = {"attention_images": 1, "attention_blocks": [4], "attention_heads": "apart"}
    options = SightOptions(images=pictures, num_images=1, extra=extra)
    picture = see_attention([subjects["trained"]], options).pictures["to_former_1"]
    _, height = Image.open(io.BytesIO(picture.content)).size
    assert height == (104 + 4) + 24 + 2 * (104 + 4)  # the image, titles of columns, two heads
    options = SightOptions(images=pictures, extra={"attention_blocks": [1]})
    with pytest.raises(UserError, match=r"block 1 of 'trained' does not exist .*: there are 2, 3"):
        see_attention([subjects["trained"]], options)


def test_queries_of_two_detectors_stand_in_one_picture_an_image(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    options = SightOptions(images=pictures, num_images=2, extra={"query_boxes": 2})
    cut = cut_short(subjects["detector"], tmp_path)
    exhibit = see_queries(
        [subjects[n] for n in ("trained", "detector", "another")] + [cut], options
    )
    figures = json.loads(write_exhibit(exhibit, tmp_path)[0].read_text())["figures"]
    assert list(exhibit.pictures) == ["image_1", "image_2"]
    reason, fault = figures["left_out"]
    assert reason == "'trained' is of architecture QBHeat, and object queries are MF-DETR's"
    assert fault.startswith("'cut': ")
    for images in figures["subjects"].values():
        assert [len(boxes) for boxes in images] == [2, 2]
        for box in (box for boxes in images for box in boxes):
            assert box["class"] in ("cat", "dog", "bird")
            for stride in ("32", "16", "8"):
                assert 0 <= box["attention_inside"][stride] <= 1
                assert 0 < box["attention_spread"][stride] <= 1 + 1e-6
    assert exhibit.table is not None
    assert [row[0] for row in exhibit.table.rows] == ["detector", "another"]


def test_what_has_neither_tokens_nor_queries_says_so(
    subjects: dict[str, Subject], pictures: Path
) -> None:
    options = SightOptions(images=pictures)
    with pytest.raises(NothingToSee, match="no attention of tokens: 'resnet' has no Mobile-Former"):
        see_attention([subjects["resnet"]], options)
    with pytest.raises(
        NothingToSee, match="no object queries: 'resnet' is of architecture ImageClassifier"
    ):
        see_queries([subjects["resnet"]], options)
