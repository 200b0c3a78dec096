# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation again and again: by the same workers, which end when they are told to."""

import os
from multiprocessing import active_children
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from qbheat_det.config import get_cfg
from qbheat_det.engine.evaluation import Evaluation


class WhoLoads(Dataset[dict[str, Any]]):
    """Two images, each with the process that loaded it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError
        return {"process": os.getpid()}


class Collect(DatasetEvaluator):
    """Results are the processes that the images came from."""

    def reset(self) -> None:
        self.seen: set[int] = set()

    def process(self, inputs: list[dict[str, Any]], outputs: Any) -> None:
        self.seen |= {entry["process"] for entry in inputs}

    def evaluate(self) -> dict[str, Any]:
        return {"bbox": {"AP": float(next(iter(self.seen))), "workers": float(len(self.seen))}}


def build_loader(_: CfgNode, __: str) -> DataLoader[Any]:
    return DataLoader(WhoLoads(), batch_size=1, num_workers=1, collate_fn=list)


def test_one_worker_serves_every_evaluation_and_ends_with_them() -> None:
    cfg = get_cfg()
    cfg.DATASETS.TEST = ("any",)
    evaluation = Evaluation(
        cfg, build_loader=build_loader, build_evaluator=lambda cfg, name: Collect()
    )
    first, second = (evaluation(nn.Identity())["bbox"] for _ in range(2))
    assert first == second
    worker = int(first["AP"])
    assert worker != os.getpid()
    assert worker in {child.pid for child in active_children()}
    evaluation.close()
    assert worker not in {child.pid for child in active_children()}
