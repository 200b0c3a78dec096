# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models around which pre- and post-processing were built, before any format: a batch of images
gives what Detectron2's predictor gives of each."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from torch import Tensor
from torchvision.ops import nms

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.exporting import ExportInfo, to_instances
from qbheat_det.engine.exporting.agreement import build_reference
from qbheat_det.engine.exporting.deployable import build_deployable
from qbheat_det.engine.exporting.detector_heads import NOTHING
from qbheat_det.engine.exporting.suppression import suppress
from qbheat_det.engine.predict import build_predictor
from tests.engine.exporting.split_cases import build, make_config, save

_FCOS: dict[str, Any] = {
    "MODEL__META_ARCHITECTURE": "SyncFCOS",
    "MODEL__FCOS__NUM_CLASSES": 3,
    "MODEL__FCOS__NUM_CONVS": 1,
    "MODEL__FCOS__IN_FEATURES": ["p3", "p4"],
    "MODEL__FCOS__NORM": "",
    "MODEL__FCOS__PRIOR_PROB": 0.5,
}


def _noise(number: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("kind", "pixel_format"), [("retinanet", "BGR"), ("mf_detr", "RGB")])
def test_a_batch_gives_what_the_predictor_finds_in_each_image(
    tmp_path: Path, kind: str, pixel_format: str
) -> None:
    cfg = make_config(kind, INPUT__FORMAT=pixel_format)
    cfg.MODEL.WEIGHTS = save(tmp_path / "run", kind)
    predictor = build_predictor(cfg)
    deployable = build_deployable(predictor.model, cfg)
    assert str(tmp_path) not in deployable.info.config
    images = _noise(3, 75, 90)
    with torch.no_grad():
        outputs = deployable(torch.from_numpy(images))
    named = {name: x.numpy() for name, x in zip(deployable.info.outputs, outputs, strict=True)}
    for found, image in zip(to_instances(named, (75, 90)), images, strict=True):
        bgr = image if pixel_format == "BGR" else image[:, :, ::-1]
        wanted = predictor(bgr)["instances"]
        wanted = wanted[wanted.scores.argsort(descending=True)]
        assert len(found) == len(wanted) > 5
        torch.testing.assert_close(found.scores, wanted.scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found.pred_boxes.tensor, wanted.pred_boxes.tensor, rtol=0, atol=2e-3
        )
        torch.testing.assert_close(found.pred_classes, wanted.pred_classes)


def test_fcos_is_read_as_detectron2_reads_it() -> None:
    cfg = make_config("two_maps", **_FCOS)
    model = build(cfg)
    images = _noise(2, 64, 80)  # of the test's size, so that nothing is resized
    with torch.no_grad():
        boxes, scores, labels, counts = build_deployable(model, cfg)(torch.from_numpy(images))
        for index, image in enumerate(images):
            pixels = torch.from_numpy(image).permute(2, 0, 1)
            wanted = model([{"image": pixels}])[0]["instances"]
            count = int(counts[index])
            assert count == len(wanted) > 5
            torch.testing.assert_close(scores[index, :count], wanted.scores)
            torch.testing.assert_close(boxes[index, :count], wanted.pred_boxes.tensor)
            torch.testing.assert_close(labels[index, :count], wanted.pred_classes)


def test_a_backbone_that_wants_padded_images_serves_mf_detr() -> None:
    cfg = make_config("mf_detr", MODEL__BACKBONE__NAME="TwoMaps")
    cfg.MODEL.MF_DETR.IN_FEATURES = ["s8", "s16"]
    model = build(cfg)
    type(model.backbone).size_divisibility = 32  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            images = _noise(2, 64, 75)
            boxes, scores, _, _ = build_deployable(model, cfg)(torch.from_numpy(images))
            entry = {"image": torch.from_numpy(images[1]).permute(2, 0, 1)}
            wanted = model([entry])[0]["instances"]
    finally:
        del type(model.backbone).size_divisibility
    order = wanted.scores.argsort(descending=True)
    torch.testing.assert_close(scores[1], wanted.scores[order])
    torch.testing.assert_close(boxes[1], wanted.pred_boxes.tensor[order], rtol=1e-5, atol=1e-4)


def _suppress_naively(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float) -> Tensor:
    result = torch.full_like(scores, NOTHING)
    for image in range(len(boxes)):
        for label in range(3):
            of_class = ((labels[image] == label) & (scores[image] > NOTHING)).nonzero()[:, 0]
            kept = of_class[nms(boxes[image, of_class], scores[image, of_class], overlap)]
            result[image, kept] = scores[image, kept]
    return result


def test_overlaps_are_suppressed_image_by_image_and_class_by_class() -> None:
    corners = 1300 * torch.rand(3, 200, 2)
    boxes = torch.cat([corners, corners + 300 * torch.rand(3, 200, 2)], dim=2)
    scores, labels = torch.rand(3, 200), torch.randint(3, (3, 200))
    scores[torch.rand(3, 200) < 0.2] = NOTHING
    wanted = _suppress_naively(boxes, scores, labels, 0.3)
    assert 0 < (wanted > NOTHING).sum() < (scores > NOTHING).sum()
    torch.testing.assert_close(suppress(boxes, scores, labels, 3, 0.3), wanted)
    nothing = torch.full_like(scores, NOTHING)
    torch.testing.assert_close(suppress(boxes, nothing, labels, 3, 0.3), nothing)


@pytest.mark.parametrize("task", ["classification", "features"])
def test_classifiers_and_backbones_give_what_the_package_computes(task: str) -> None:
    cfg = make_config(
        "mf_detr",
        **({"MODEL__META_ARCHITECTURE": "ImageClassifier"} if task == "classification" else {}),
        MODEL__MOBILE_FORMER__OUT_FEATURES=["s16_expanded", "tokens"],
        MODEL__CLASSIFIER__NUM_CLASSES=4,
        INPUT__PRETRAIN__SIZE=32,
        INPUT__CLASSIFY__TEST_CROP=0.875,
    )
    if task == "features":
        cfg = load_config(
            get_config_path("demo/toy_qb_heat.yaml"),
            [w for k in ("BLOCKS", "STEM_CHANNELS", "EXPANDED_CHANNELS", "NUM_TOKENS", "TOKEN_DIM")
             for w in (f"MODEL.MOBILE_FORMER.{k}", str(cfg.MODEL.MOBILE_FORMER[k]))]
            + ["MODEL.MOBILE_FORMER.VARIANT", "custom", "MODEL.DEVICE", "cpu"],
        )  # fmt: skip
        cfg.INPUT.MIN_SIZE_TEST = 48
    model = build_model(cfg).eval()
    deployable = build_deployable(model, cfg)
    assert deployable.info.task == task
    images = _noise(2, 50, 70)

    class Predictor:  # of Detectron2, as far as it is asked
        pass

    predictor = Predictor()
    predictor.model = model  # type: ignore[attr-defined]
    reference = build_reference(predictor, cfg, task)  # type: ignore[arg-type]
    with torch.no_grad():
        outputs = deployable(torch.from_numpy(images))
    for name, values in zip(deployable.info.outputs, outputs, strict=True):
        for index in range(2):
            wanted = torch.from_numpy(reference(images[index])[name])
            torch.testing.assert_close(values[index : index + 1], wanted, rtol=1e-4, atol=1e-5)


def test_a_detector_of_two_stages_is_refused_with_what_can_be_exported() -> None:
    cfg = load_config(get_config_path("quick_schedules/faster_rcnn_285M_toy.yaml"), [])
    cfg.MODEL.DEVICE = "cpu"
    model = torch.nn.Module()
    model.backbone = torch.nn.Identity()
    with pytest.raises(UserError, match=r"GeneralizedRCNN cannot be exported.*MF-DETR, RetinaNet"):
        build_deployable(model, cfg)


def test_a_description_comes_back_from_a_file_or_is_refused() -> None:
    outputs = ("boxes", "scores", "labels", "counts")
    info = ExportInfo("detection", outputs, "RGB", ("cat",), (17,), 0.05, "MFDETR", "A: 1")
    assert ExportInfo.from_json(info.to_json(), "x.onnx") == info
    other = dataclasses.asdict(info) | {"format": 1}
    changes: list[dict[str, Any]] = [
        {"task": "poetry"},
        {"task": "classification"},
        {"outputs": "boxes"},
        {"outputs": ["boxes"]},
        {"config": 5},
        {"class_names": "cat"},
        {"category_ids": [True]},
        {"score_threshold": "low"},
        {"format": True},
    ]
    for text in ("", "[]", "{}", *(json.dumps(other | change) for change in changes)):
        with pytest.raises(UserError, match=r"'x.onnx' does not say what its outputs are"):
            ExportInfo.from_json(text, "x.onnx")
    with pytest.raises(UserError, match="exported by a later qbheat_det"):
        ExportInfo.from_json(info.to_json().replace('"format": 1', '"format": 2'), "x.onnx")
