# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation in a run and of weights: as by hand, image by image, and as prediction with tiles."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, Instances
from torch import nn

from qbheat_det import load
from qbheat_det.checkpoint import ExactCheckpointer, info_of
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, register_coco_json
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.evaluation import Evaluation
from qbheat_det.engine.hooks import SKIPPED_FILE, SkippedImages
from tests.toy_set import draw_toy_set

from .tiny_pretraining import OPTS, RECIPE, make_folder
from .tiny_training import build_config, forget_runs, parse, parse_run, start_run


class Oracle(nn.Module):
    """Finds one object in every image: its first, if any, three pixels too far to the right."""

    def __init__(self, annotations, category_ids):
        super().__init__()
        self.first = {entry["image_id"]: entry for entry in reversed(annotations)}
        self.category_ids = category_ids

    def forward(self, inputs):
        outputs = []
        for record in inputs:
            anything = {"bbox": [8, 8, 16, 16], "category_id": self.category_ids[0]}
            truth = self.first.get(record["image_id"], anything)
            x, y, w, h = truth["bbox"]
            found = Instances((record["height"], record["width"]))
            found.pred_boxes = Boxes(torch.tensor([[x + 3, y, x + w + 3, y + h]]))
            found.scores = torch.tensor([1 / (1 + record["image_id"])])
            found.pred_classes = torch.tensor([self.category_ids.index(truth["category_id"])])
            outputs.append({"instances": found})
        return outputs


def evaluate_all(args):
    """The job of one process: results for each toy set in ``args.folders`` by its name."""
    results = {}
    for name, folder in args.folders.items():
        annotations = Path(folder) / "annotations.json"
        truth = json.loads(annotations.read_text())
        register_coco_json(name, str(annotations), str(Path(folder) / "images"))
        cfg = get_cfg()
        cfg.OUTPUT_DIR = args.output_dir
        cfg.DATASETS.TEST = (name,)
        cfg.DATALOADER.NUM_WORKERS = 0
        cfg.INPUT.MIN_SIZE_TEST = 32
        evaluation = Evaluation(cfg, Trainer.build_test_loader)
        categories = [category["id"] for category in truth["categories"]]
        model = Oracle(truth["annotations"], categories)
        results[name] = [evaluation(model) for _ in range(2)]  # the second reuses loader, evaluator
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    return results


def configure(opts, *flags):
    """Returns the config of QB-Heat that a command line gives, and its arguments."""
    small = {"SOLVER.IMS_PER_BATCH": "4", "SOLVER.ACCUMULATE": "1", "SOLVER.MAX_ITER": "2"}
    args = parse_run(RECIPE, {**OPTS, **small, **opts}, *flags)
    return build_config(args), args


def evaluate_weights(args):
    """The job of one process: ``--eval-only`` of ``args.weights`` on ``args.images``."""
    flags = ["--eval-only", "--val-images", args.images]
    cfg, _ = configure({"MODEL.WEIGHTS": args.weights, "OUTPUT_DIR": args.output_dir}, *flags)
    return evaluate(cfg)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Images to train on, and held-out ones; one is broken in each."""
    root = tmp_path_factory.mktemp("images")
    make_folder(root / "train", 7)
    make_folder(root / "val", 5, first=50)
    for folder in ("val", "train"):
        (root / folder / "x.jpg").write_text("no image")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """A run that evaluates the held-out loss as it trains."""
    output = tmp_path_factory.mktemp("run")
    flags = ["--images", folders["train"], "--val-images", folders["val"]]
    opts = {"TEST.EVAL_EPOCHS": "0.5", "OUTPUT_DIR": str(output)}
    _, args = configure(opts, *flags)
    trainer = start_run(args)
    trainer.train()
    args.resume = True
    forget_runs()
    resumed = start_run(args).find_hook(SkippedImages)
    assert [error.where.rpartition("/")[2] for error in resumed.errors.values()] == ["x.jpg'"]
    return output


def lines(run, key):
    entries = map(json.loads, (run / "metrics.json").read_text().splitlines())
    return {entry["iteration"]: entry[key] for entry in entries if key in entry}


def test_a_run_logs_its_evaluations_and_keeps_the_lowest_loss_as_the_best(run):
    found = lines(run, "reconstruction/loss")
    assert sorted(found) == [0, 1]  # half an epoch of 8 images is one step of 4
    best = info_of(str(run / "model_best.safetensors"))
    assert best.iteration == min(found, key=found.__getitem__)
    log = (run / "log.txt").read_text()
    assert log.count("The evaluation on") == 1
    # Broken training images did not end the run.
    assert "1 of 8 images were skipped so far" in log
    (line,) = (run / SKIPPED_FILE).read_text().splitlines()
    assert Path(line.split("'")[1]).name == "x.jpg"


def test_the_held_out_loss_is_that_of_one_image_and_view_at_a_time(run, folders):
    weights = str(run / "model_final.safetensors")
    flags = ["--eval-only", "--val-images", folders["val"]]
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, *flags)
    model = Trainer.build_model(cfg).eval()
    ExactCheckpointer(model).load(weights)
    views, mapper = model.views, build_mapper(cfg, is_train=False)
    expected = {f"loss_{name}": [] for name in views}
    for i, record in enumerate(DatasetCatalog.get("custom_val_images")):
        if record["file_name"].endswith("x.jpg"):
            continue
        for name, quarters in views.items():
            with torch.no_grad():
                (output,) = model([mapper(record)], [quarters[i % len(quarters)]])
            expected[f"loss_{name}"].append(float(output["loss_reconstruction"]))
    means = {key: sum(values) / len(values) for key, values in expected.items()}
    means["loss"] = sum(means.values()) / len(means)
    last = {key: lines(run, f"reconstruction/{key}")[1] for key in means}
    assert last == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("num_broken", [2, 4])
def test_ap_is_that_of_the_readable_images_which_are_at_least_half(num_broken, tmp_path, caplog):
    whole = draw_toy_set(tmp_path, 6)
    rest = tmp_path / "rest"
    shutil.copytree(whole, rest)
    broken = [f"{number:06d}.jpg" for number in range(1, 1 + num_broken)]
    for name in broken:
        (whole / "images" / name).write_bytes(b"no picture")
    content = json.loads((rest / "annotations.json").read_text())
    content["images"] = [one for one in content["images"] if one["file_name"] not in broken]
    ids = {image["id"] for image in content["images"]}
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] in ids]
    (rest / "annotations.json").write_text(json.dumps(content))
    args = SimpleNamespace(folders={"rest_set": rest}, output_dir=str(tmp_path))
    expected = evaluate_all(args)["rest_set"]
    assert 0 < expected[0]["bbox"]["AP"] < 100
    args.folders = {"broken_set": whole}
    if num_broken == 4:
        with pytest.raises(UserError, match="4 of 6"):
            evaluate_all(args)
        return
    assert str(evaluate_all(args)["broken_set"]) == str(expected)
    named = [message for message in caplog.messages if "skips 2 images" in message]
    assert len(named) == 1  # not at each evaluation
    assert all(name in named[0] for name in broken)


TILED = {
    "INPUT.TILE": "40",
    "MODEL.RETINANET.SCORE_THRESH_TEST": "0.001",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.CHECKPOINT_PERIOD": "2",
}


def test_a_run_with_tiles_remembers_them(tmp_path, tiny_data):
    trainer = start_run(parse(tmp_path / "run", tiny_data, TILED))
    assert trainer.data_loader.num_images > 12
    trainer.train()
    (stored,) = (tmp_path / "run" / "inference").rglob("coco_instances_results.json")
    results = json.loads(stored.read_text())
    content = json.loads((tiny_data / "annotations.json").read_text())
    detector = load(str(tmp_path / "run" / "model_final.safetensors"), device="cpu")
    image = content["images"][0]
    path = tiny_data / "images" / image["file_name"]
    found = detector.predict(path, threshold=0.0)
    evaluated = [one["score"] for one in results if one["image_id"] == image["id"]]
    whole = detector.predict(path, threshold=0.0, tile=0)
    assert len(found.scores) != len(whole.scores)
    expected = np.sort(evaluated)[::-1]
    np.testing.assert_allclose(np.sort(np.array(found.scores))[::-1], expected, atol=1e-4)
