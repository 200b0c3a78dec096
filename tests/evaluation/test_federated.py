# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images that are annotated for some classes: against the evaluation of LVIS and a naive one."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, BoxMode, Instances

from qbheat_det.analysis.detection_metrics import (
    choose_threshold,
    count_confusions,
    evaluate_boxes,
    find_errors,
    score_detections,
)
from qbheat_det.data import find_annotated
from qbheat_det.evaluation import CocoEvaluator
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

WIDTH, HEIGHT = 200, 160
IDS = (2, 5, 9, 11)
# Of the package lvis 0.5.3 on ``make_federated()``, in percent.
OF_LVIS = {
    "AP": 30.247501995872544,
    "AP50": 42.33035616312819,
    "AP75": 38.2667991863125,
    "APs": 36.55657351449431,
    "APm": 51.33250825082507,
    "APl": 17.277227722772277,
}
CLASSES_OF_LVIS = [44.44211479971527, 26.18815142761038, 30.3780424584152, 19.981699297749325]


def make_federated(seed=0, num_images=24):
    """Returns a federated set and detections: jittered boxes, inventions, unlabelled objects."""
    rng = np.random.default_rng(seed)
    categories = [{"id": class_id, "name": f"c{class_id}"} for class_id in IDS]
    content = {"images": [], "annotations": [], "categories": categories}
    detections = []

    def detect(image_id, class_id, box):
        score = round(float(rng.random()), 3)
        entry = {"image_id": image_id, "category_id": class_id, "bbox": box, "score": score}
        detections.append(entry)

    for image_id in range(1, num_images + 1):
        image = {"id": image_id, "file_name": f"{image_id}.jpg", "width": WIDTH, "height": HEIGHT}
        image |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}
        content["images"].append(image)
        for class_id in IDS:
            state = rng.integers(4)  # not looked for, absent, exhaustive, not exhaustive
            if state == 1:
                image["neg_category_ids"].append(class_id)
            if state == 3:
                image["not_exhaustive_category_ids"].append(class_id)
            for number in range(int(rng.integers(0, 4))):
                side = float(rng.choice([10, 24, 40, 100]))
                x, y = (float(v) for v in rng.uniform(0, 160 - side, 2).round(1))
                if state in (2, 3) and not (state == 3 and number == 0):
                    new_id = len(content["annotations"]) + 1
                    box = {"id": new_id, "image_id": image_id, "category_id": class_id}
                    box |= {"bbox": [x, y, side, side], "area": side * side, "iscrowd": 0}
                    content["annotations"].append(box)
                if rng.random() < 0.8:
                    dx, dy = (float(v) for v in rng.normal(0, 0.05 * side, 2).round(2))
                    guess = class_id if rng.random() < 0.9 else int(rng.choice(IDS))
                    detect(image_id, guess, [x + dx, y + dy, side, side])
            if rng.random() < 0.5:
                detect(image_id, class_id, [float(v) for v in rng.uniform(1, 90, 4).round(1)])
    return content, detections


def naive_ap(content, detections, class_id, threshold):
    """The rules of arXiv:1908.03195, one detection at a time."""
    scored, num_boxes = [], 0
    for image in content["images"]:
        key = (image["id"], class_id)
        boxes = [a for a in content["annotations"] if (a["image_id"], a["category_id"]) == key]
        found = [d for d in detections if (d["image_id"], d["category_id"]) == key]
        num_boxes += len(boxes)
        if not boxes and class_id not in image["neg_category_ids"]:
            continue
        free = [box["bbox"] for box in boxes]
        for detection in sorted(found, key=lambda d: -d["score"]):
            overlaps = [overlap(box, detection["bbox"]) for box in free]
            if max(overlaps, default=0) >= threshold:
                free.pop(int(np.argmax(overlaps)))
                scored.append((detection["score"], True))
            elif class_id not in image["not_exhaustive_category_ids"]:
                scored.append((detection["score"], False))
    scored.sort(key=lambda pair: -pair[0])
    correct = np.cumsum([is_correct for _, is_correct in scored])
    precision = correct / np.arange(1, len(scored) + 1)
    best_after = np.maximum.accumulate(precision[::-1])[::-1]
    positions = [np.searchsorted(correct / num_boxes, r, "left") for r in np.linspace(0, 1, 101)]
    return np.mean([best_after[p] if p < len(scored) else 0.0 for p in positions])


def overlap(first, second):
    sides = [
        max(0, min(a + wa, b + wb) - max(a, b))
        for a, wa, b, wb in zip(first[:2], first[2:], second[:2], second[2:], strict=True)
    ]
    both = sides[0] * sides[1]
    return both / (first[2] * first[3] + second[2] * second[3] - both)


def test_figures_are_those_of_lvis_and_of_a_naive_evaluation():
    content, detections = make_federated()
    scores = score_detections(evaluate_boxes(content, detections))
    assert scores.summary == pytest.approx(OF_LVIS, abs=1e-10)
    assert scores.class_ap == pytest.approx(CLASSES_OF_LVIS, abs=1e-10)
    for seed in (1, 2):
        content, detections = make_federated(seed)
        expected = [
            100 * np.mean([naive_ap(content, detections, one, t / 100) for t in range(50, 100, 5)])
            for one in IDS
        ]
        scores = score_detections(evaluate_boxes(content, detections))
        assert scores.class_ap == pytest.approx(expected, abs=1e-10)


def register(content, path):
    """Registers a COCO dict, or its records if ``path`` is None. Returns the name."""
    name = "federated"
    MetadataCatalog.pop(name, None)
    metadata = MetadataCatalog.get(name)
    metadata.thing_classes = [entry["name"] for entry in content["categories"]]
    indices = {class_id: index for index, class_id in enumerate(IDS)}
    metadata.thing_dataset_id_to_contiguous_id = indices
    if path:
        path.write_text(json.dumps(content))
        metadata.json_file = str(path)
        return name
    annotated = find_annotated(content)
    records = []
    for image in content["images"]:
        boxes = []
        for box in content["annotations"]:
            if box["image_id"] == image["id"]:
                index = indices[box["category_id"]]
                boxes.append({**box, "bbox_mode": BoxMode.XYWH_ABS, "category_id": index})
        record = {"file_name": image["file_name"], "width": WIDTH, "height": HEIGHT}
        record |= {"image_id": image["id"], "annotations": boxes}
        if image["id"] in annotated:
            record[ANNOTATED_CLASSES] = [indices[id_] for id_ in annotated[image["id"]]]
        records.append(record)
    DatasetCatalog.register(name, lambda: records)
    return name


@pytest.mark.parametrize("library", ["pycocotools", "faster-coco-eval"])
@pytest.mark.parametrize("has_file", [True, False])
def test_evaluation_of_a_run_gives_the_same_figures(library, has_file, tmp_path):
    content, detections = make_federated()
    name = register(content, tmp_path / "set.json" if has_file else None)
    for _ in range(2):  # the second evaluator reads what the first has written
        evaluator = CocoEvaluator(
            name,
            tasks=("bbox",),
            distributed=False,
            output_dir=str(tmp_path),
            use_fast_impl=library == "faster-coco-eval",
        )
        evaluator.reset()
        for image in content["images"]:
            found = [d for d in detections if d["image_id"] == image["id"]]
            xywh = torch.tensor([d["bbox"] for d in found], dtype=torch.float64).reshape(-1, 4)
            instances = Instances((HEIGHT, WIDTH))
            corners = torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1)
            instances.pred_boxes = Boxes(corners)
            instances.scores = torch.tensor([d["score"] for d in found])
            instances.pred_classes = torch.tensor([IDS.index(d["category_id"]) for d in found])
            evaluator.process([{"image_id": image["id"]}], [{"instances": instances}])
        results = evaluator.evaluate()["bbox"]
        by_class = [results.pop(f"AP-c{class_id}") for class_id in IDS]
        assert results == pytest.approx(OF_LVIS, abs=1e-4)  # scores and boxes are rounded
        assert by_class == pytest.approx(CLASSES_OF_LVIS, abs=1e-4)
    written = json.loads((tmp_path / "coco_instances_results.json").read_text())
    assert len(written) == len(detections)  # ignored ones too


def test_nothing_changes_if_all_classes_are_annotated():
    content, detections = make_federated()
    plain = copy.deepcopy(content)
    for image, other in zip(content["images"], plain["images"], strict=True):
        for one, key in itertools.product((image, other), ("neg", "not_exhaustive")):
            del one[f"{key}_category_ids"]
        image["annotated_category_ids"] = list(IDS)
    results = [evaluate_boxes(one, detections) for one in (content, plain)]
    precisions = [result.eval["precision"] for result in results]
    assert np.array_equal(*precisions)
    assert len(results[0].cocoGt.anns) == len(content["annotations"])


def test_errors_of_the_report_leave_out_classes_that_are_not_annotated():
    content, detections = make_federated()
    annotated = find_annotated(content)
    errors = find_errors(evaluate_boxes(content, detections))
    found = errors.detections
    is_annotated = np.array(
        [
            IDS[class_index] in annotated.get(image_id, IDS)
            for image_id, class_index in zip(found.image_ids, found.classes, strict=True)
        ]
    )
    assert len(detections) == len(is_annotated)
    assert not errors.wrong[~is_annotated].any()
    assert errors.correct[~is_annotated].any()
    assert (errors.wrong ^ errors.correct)[is_annotated].all()
    counts = count_confusions(errors, choose_threshold(errors), len(IDS))
    assert counts[:-1].sum() == len(content["annotations"])
