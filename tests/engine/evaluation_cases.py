# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation of a detector that knows the truth, and of objectives, in one process of several."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, Instances
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.data import register_coco_json
from qbheat_det.engine import Trainer, build_config, evaluate
from qbheat_det.engine.evaluation import Evaluation

from .tiny_pretraining import OPTS, RECIPE
from .tiny_training import parse_run


class Oracle(nn.Module):
    """Finds one object in every image: its first, if any, three pixels too far to the right."""

    def __init__(self, annotations: list[dict[str, Any]], category_ids: list[int]) -> None:
        super().__init__()
        self.first = {entry["image_id"]: entry for entry in reversed(annotations)}
        self.category_ids = category_ids

    def forward(self, inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
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


def evaluate_all(args: argparse.Namespace) -> dict[str, Any]:
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
        evaluation = Evaluation(
            cfg,
            build_loader=Trainer.build_test_loader,
            build_evaluator=Trainer.build_evaluator,
        )
        categories = [category["id"] for category in truth["categories"]]
        model = Oracle(truth["annotations"], categories)
        results[name] = [evaluation(model) for _ in range(2)]  # the second reuses loader, evaluator
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    return results


def configure(opts: dict[str, str], *flags: str) -> tuple[CfgNode, argparse.Namespace]:
    """Returns the config of QB-Heat that a command line gives, and its arguments."""
    small = {"SOLVER.IMS_PER_BATCH": "4", "SOLVER.ACCUMULATE": "1", "SOLVER.MAX_ITER": "2"}
    args = parse_run(RECIPE, {**OPTS, **small, **opts}, *flags)
    return build_config(args), args


def evaluate_weights(args: argparse.Namespace) -> dict[str, Any]:
    """The job of one process: ``--eval-only`` of ``args.weights`` on ``args.images``.

    The classes in its folders vote on themselves.
    """
    flags = ["--eval-only", "--val-images", args.images]
    flags += ["--knn-train-folder", args.images, "--knn-val-folder", args.images]
    cfg, _ = configure({"MODEL.WEIGHTS": args.weights, "OUTPUT_DIR": args.output_dir}, *flags)
    return evaluate(cfg)
