# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO evaluation: both libraries against each other and against pycocotools called by hand."""

import contextlib
import copy
import io
import json
import logging
import math

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Boxes, Instances
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from qbheat_det.analysis.detection_metrics import evaluate_boxes, find_errors, score_detections
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import (
    CocoEvaluator,
    FastMatching,
    choose_max_detections,
    complete_annotations,
    count_most_objects,
)
from qbheat_det.tasks import DETECTION

SIZE = 256
CATEGORY_IDS = (3, 7, 20)  # with holes, as in COCO itself
NAMES = ["square", "disc", "star"]
LIBRARIES = {"pycocotools": False, "faster-coco-eval": True}


@pytest.fixture
def register(tmp_path):
    """Registers a COCO dict under a fresh name, the way Detectron2's loader leaves it."""
    names = [f"made_up_{i}" for i in range(9)]
    free = iter(names)

    def register(dataset):
        name = next(free)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(dataset))
        MetadataCatalog.get(name).set(
            json_file=str(path),
            evaluator_type="coco",
            thing_classes=NAMES,
            thing_dataset_id_to_contiguous_id={c: i for i, c in enumerate(CATEGORY_IDS)},
        )
        return name

    yield register
    for name in names:
        MetadataCatalog.pop(name, None)


def _ellipse(x0, y0, x1, y1):
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5
    radius_x, radius_y = max((x1 - x0) / 2, 1), max((y1 - y0) / 2, 1)
    return ((x - (x0 + x1) / 2) / radius_x) ** 2 + ((y - (y0 + y1) / 2) / radius_y) ** 2 <= 1


def _make_dataset(rng):
    images = [{"id": 5 * i + 2, "height": SIZE, "width": SIZE} for i in range(12)]
    annotations = []
    for image in images[1:]:  # the first image is empty
        for _ in range(rng.integers(1, 9)):
            side = float(rng.choice([12, 24, 60, 120, 180]))  # small, medium and large
            x, y = rng.uniform(0, SIZE - side, 2).tolist()
            mask = _ellipse(x, y, x + side, y + side)
            rle = mask_util.encode(np.asfortranarray(mask.astype(np.uint8)))
            annotations.append(
                {
                    "id": len(annotations),  # the first id is 0, on purpose
                    "image_id": image["id"],
                    "category_id": int(rng.choice(CATEGORY_IDS)),
                    "bbox": [x, y, side, side],
                    "area": float(mask.sum()),
                    "iscrowd": int(rng.random() < 0.15),
                    "segmentation": {**rle, "counts": rle["counts"].decode()},
                }
            )
    categories = [{"id": c, "name": n} for c, n in zip(CATEGORY_IDS, NAMES, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _predict(rng, dataset, masks):
    """Jittered ground truth, some of it missed or of the wrong class, and a few inventions."""
    predictions = []
    for image in dataset["images"]:
        boxes, classes = [], []
        for annotation in dataset["annotations"]:
            if annotation["image_id"] == image["id"] and rng.random() > 0.15:
                x, y, w, h = annotation["bbox"]
                dx, dy = rng.normal(0, 0.06 * w, 2)
                boxes.append([x + dx, y + dy, x + w + dx, y + h + dy])
                right = CATEGORY_IDS.index(annotation["category_id"])
                classes.append(right if rng.random() > 0.1 else int(rng.integers(3)))
        for _ in range(3):
            x, y = rng.uniform(0, 200, 2)
            boxes.append([x, y, x + 40, y + 50])
            classes.append(int(rng.integers(3)))
        instances = Instances((SIZE, SIZE))
        instances.pred_boxes = Boxes(torch.tensor(boxes))
        instances.pred_classes = torch.tensor(classes)
        instances.scores = torch.from_numpy(rng.uniform(0.05, 1, len(boxes)).round(2))
        if masks:
            instances.pred_masks = torch.from_numpy(np.stack([_ellipse(*box) for box in boxes]))
        predictions.append(instances)
    return predictions


def _evaluate(name, dataset, predictions, library, **kwargs):
    fast = LIBRARIES[library]
    evaluator = CocoEvaluator(name, use_fast_impl=fast, distributed=False, **kwargs)
    evaluator.reset()
    for image, instances in zip(dataset["images"], predictions, strict=True):
        evaluator.process([{"image_id": image["id"]}], [{"instances": instances}])
    return evaluator.evaluate()


def _by_hand(dataset, results_file, task):
    ground_truth = copy.deepcopy(dataset)
    for annotation in ground_truth["annotations"]:
        annotation["id"] += 1  # pycocotools would count a match with id 0 as none
    results = json.loads(results_file.read_text())
    if task == "segm":
        results = [{k: v for k, v in r.items() if k != "bbox"} for r in results]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"info": {}, **ground_truth}
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), task)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * value for value in evaluation.stats[:6]]


def test_both_libraries_give_the_figures_of_pycocotools_called_by_hand(register, tmp_path):
    rng = np.random.default_rng(0)
    dataset = _make_dataset(rng)
    predictions = _predict(rng, dataset, masks=True)
    name = register(dataset)
    found = {}
    for library in LIBRARIES:
        output = tmp_path / library
        found[library] = _evaluate(name, dataset, predictions, library, output_dir=str(output))
        for task in ("bbox", "segm"):
            keys = ["AP", "AP50", "AP75", "APs", "APm", "APl"]
            expected = _by_hand(dataset, output / "coco_instances_results.json", task)
            actual = [found[library][task][key] for key in keys]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
            assert all(0 < value < 100 for value in expected), "a test on trivial figures"
    one, other = found.values()
    assert one.keys() == other.keys()
    for task, metrics in one.items():
        assert {"AP-square", "AP-disc", "AP-star"} <= metrics.keys()
        assert metrics == pytest.approx(other[task], rel=0, abs=1e-6)


def test_annotations_are_completed_and_numbered_from_1():
    # People's own files leave "iscrowd" and "area" out; the area is then the box's.
    dataset = {"annotations": [{"id": 0, "bbox": [1, 2, 3, 4]}, {"id": 0}]}
    complete_annotations(dataset)
    assert dataset["annotations"] == [
        {"id": 1, "bbox": [1, 2, 3, 4], "iscrowd": 0, "area": 12},
        {"id": 2, "iscrowd": 0},
    ]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("empty", ["annotations", "predictions"])
def test_without_annotations_ap_is_nan_and_without_predictions_zero_with_a_warning(
    register, library, empty, caplog, tmp_path
):
    rng = np.random.default_rng(0)
    dataset = _make_dataset(rng)
    predictions = _predict(rng, dataset, masks=False)
    expected = _evaluate(register(dataset), dataset, predictions, library)["bbox"]
    if empty == "annotations":
        dataset["annotations"] = []
    else:
        predictions = [instances[:0] for instances in predictions]
    name = register(dataset)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        results = _evaluate(name, dataset, predictions, library, output_dir=str(tmp_path))["bbox"]
    written = json.loads((tmp_path / "coco_instances_results.json").read_text())
    assert bool(written) == (empty == "annotations")  # without a box that nobody predicted
    named = MetadataCatalog.get(name).json_file if empty == "annotations" else "12 images"
    assert named in caplog.text
    assert results.keys() == expected.keys()
    for metric, value in results.items():  # some are nan for the whole set, too
        is_nan = empty == "annotations" or math.isnan(expected[metric])
        assert math.isnan(value) if is_nan else value == 0


def test_a_class_that_the_dataset_lacks_and_unknown_sets_are_named(register, tmp_path):
    rng = np.random.default_rng(0)
    dataset = _make_dataset(rng)
    predictions = _predict(rng, dataset, masks=False)
    predictions[0].pred_classes[:] = 79
    with pytest.raises(UserError, match=r"79.*NUM_CLASSES"):
        _evaluate(register(dataset), dataset, predictions, "pycocotools")

    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(tmp_path)
    name = register(_make_dataset(np.random.default_rng(0)))
    evaluator = DETECTION.build_evaluator(cfg, name)
    assert isinstance(evaluator, CocoEvaluator)
    assert evaluator._use_fast_impl  # the library is installed here
    with pytest.raises(UserError, match="never_registered"):
        DETECTION.build_evaluator(cfg, "never_registered")
    MetadataCatalog.pop("never_registered")


def _crowd_image(count):
    """A data set of one image with ``count`` distinct boxes, and perfect predictions."""
    corners = [(12 * (i % 48), 12 * (i // 48)) for i in range(count)]
    annotations = [
        {
            "id": index,
            "image_id": 1,
            "category_id": CATEGORY_IDS[0],
            "bbox": [x, y, 10, 10],
            "iscrowd": 0,
        }
        for index, (x, y) in enumerate(corners)
    ]
    categories = [{"id": c, "name": n} for c, n in zip(CATEGORY_IDS, NAMES, strict=True)]
    images = [{"id": 1, "height": 600, "width": 600}]
    dataset = {"images": images, "annotations": annotations, "categories": categories}
    found = Instances((600, 600))
    found.pred_boxes = Boxes(torch.tensor([[x, y, x + 10, y + 10] for x, y in corners]))
    found.scores = torch.linspace(0.9, 0.1, count)
    found.pred_classes = torch.zeros(count, dtype=torch.long)
    return dataset, found


@pytest.mark.parametrize("library", LIBRARIES)
def test_perfect_predictions_of_1728_boxes_in_an_image_have_an_ap_of_100(library, register):
    dataset, found = _crowd_image(1728)
    assert _evaluate(register(dataset), dataset, [found], library)["bbox"]["AP"] == 100
    # COCO's 100 detections reach a recall of 100 / 1728, and so the first 6 of 101 recalls.
    limited = _evaluate(register(dataset), dataset, [found], library, max_dets_per_image=100)
    assert limited["bbox"]["AP"] == pytest.approx(100 * 6 / 101)
    results = instances_to_coco_json(found, 1)
    for result in results:
        result["category_id"] = CATEGORY_IDS[0]
    evaluator = evaluate_boxes(dataset, results)
    assert score_detections(evaluator).summary["AP"] == 100
    assert find_errors(evaluator).correct.all()


def test_the_number_of_detections_is_cocos_for_up_to_100_objects():
    numbers = {0: 100, 100: 100, 101: 200, 199: 200, 200: 300, 1728: 1800, 1999: 2000, 5000: 2000}
    assert {most: choose_max_detections(most) for most in numbers} == numbers
    annotations = [{"image_id": i % 3, "iscrowd": int(i > 6)} for i in range(30)]
    assert count_most_objects(annotations) == 3  # images 0, 0, 0 of numbers 0 to 6
    assert count_most_objects([]) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_classes", [1, 0])
def test_fast_matching_is_that_of_pycocotools(seed, has_classes):
    rng = np.random.default_rng(seed)
    images = [{"id": index, "height": 99, "width": 99} for index in range(6)]

    def draw(count, **fields):
        """Draws boxes on a coarse grid, so that many IoUs are equal."""
        entries = []
        for index in range(count):
            x, y, w, h = (float(v) for v in 8 * rng.integers(0, (7, 7, 6, 6)) + (0, 0, 8, 8))
            image, label = int(rng.integers(6) ** 2 // 5), int(rng.integers(1, 3))
            entry = {"id": index + 1, "image_id": image, "category_id": label, "area": w * h}
            own = {key: draw_value() for key, draw_value in fields.items()}
            entries.append({**entry, "bbox": [x, y, w, h], "iscrowd": 0, **own})
        return entries

    truth = COCO()
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"}]
    annotations = draw(120, iscrowd=lambda: int(rng.random() < 0.2))
    truth.dataset = {"images": images, "annotations": annotations, "categories": categories}
    results = draw(200, score=lambda: float(rng.integers(10)) / 10)
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found = truth.loadRes(results)
        evaluators = []
        for kind in (COCOeval, FastMatching):
            evaluator = kind(copy.deepcopy(truth), copy.deepcopy(found), "bbox")
            evaluator.params.useCats = has_classes
            evaluator.params.maxDets = [1, 10, 15]
            evaluator.params.areaRng = [[0, 1e10], [0, 300], [300, 900], [900, 1e10]]
            evaluator.evaluate()
            evaluator.accumulate()
            evaluators.append(evaluator)
    expected, fast = evaluators
    assert sum(one is not None for one in expected.evalImgs) >= 16
    for one, other in zip(fast.evalImgs, expected.evalImgs, strict=True):
        assert (one is None) == (other is None)
        for key in other or ():
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    for key in ("precision", "recall", "scores"):
        np.testing.assert_array_equal(fast.eval[key], expected.eval[key])
