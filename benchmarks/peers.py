# Copyright (c) qbheat_det contributors. Apache-2.0.
"""AP on your boxes of what you could train instead, in equal CPU minutes on one thread.

``python -m benchmarks.peers --data train.json --val val.json --images DIR --model MODEL --minutes
30 --output OUT`` writes ``OUT/MODEL.json``. "torchvision_fcos" and "torchvision_retinanet" are
torchvision's classes with its pyramid and heads on EfficientNet-Lite0 with ImageNet weights and
frozen BatchNorm. They train with SGD and flips as in torchvision's reference, but with a cosine
decay, for as many steps as the time of the first ones suggests. The evaluation comes on top.

Detectron2's RetinaNet, with its head, anchors, thresholds and SGD, trains with our trainer:
``qbheat train --config-file coco/Base-RetinaNet.yaml --data train.json --val val.json --images DIR
--image-size 384 --weights qbheat://timm/tf_efficientnet_lite0 SEED 1 SOLVER.IMS_PER_BATCH 4
SOLVER.EPOCHS 2.0 SOLVER.STEP_EPOCHS [] SOLVER.LR_SCHEDULER_NAME WarmupCosineLR
SOLVER.WARMUP_EPOCHS 0.2 MODEL.FPN.TOP_LEVELS 2``, and the other keys of ``MODEL.PIXEL_*``,
``MODEL.FPN`` and ``MODEL.TIMM`` in ``custom/retinanet_lite0_finetune.yaml``.

Ultralytics' YOLO (AGPL) needs a separate environment, and boxes in YOLO's format. Train it, and
pass its weights as the model, which is then only evaluated: ``yolo train model=yolo26n.yaml
data=data.yaml imgsz=512 epochs=10 device=cpu workers=0 val=False seed=1``.
"""

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2 import data
from detectron2.data.datasets import register_coco_instances
from detectron2.data.transforms import RandomFlip
from detectron2.evaluation import inference_on_dataset
from detectron2.structures import Boxes, Instances
from detectron2.utils.env import seed_all_rng
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

from benchmarks.timing import environment, set_threads
from qbheat_det.checkpoint import read_weights
from qbheat_det.core.files import write_atomically
from qbheat_det.evaluation import CocoEvaluator
from qbheat_det.model_zoo.sources import get_checkpoint

TRAIN = "peers_train"
VAL = "peers_val"
BATCH_SIZE = 4
TIMED_STEPS = 9
MODELS = {"torchvision_fcos": FCOS, "torchvision_retinanet": RetinaNet}
Record = dict[str, Any]


class Lite0Pyramid(nn.Module):
    """Takes images (N, 3, H, W), and returns P3 to P7 by name, each with 256 channels."""

    out_channels = 256

    def __init__(self) -> None:
        super().__init__()
        body = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(2, 3, 4))
        weights, _ = read_weights(get_checkpoint("timm/tf_efficientnet_lite0"))
        body.load_state_dict({key.removeprefix("net."): each for key, each in weights.items()})
        self.body = freeze_batch_norm_2d(body)
        self.fpn = FeaturePyramidNetwork(
            body.feature_info.channels(),
            self.out_channels,
            extra_blocks=LastLevelP6P7(self.out_channels, self.out_channels),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(dict(zip("345", self.body(x), strict=True)))


class TorchvisionDetector(nn.Module):
    """A detector of torchvision that takes and returns what Detectron2's detectors do."""

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        # 0.05 is torchvision's threshold for RetinaNet; that for FCOS, 0.2, lowers its AP.
        self.model = MODELS[name](
            Lite0Pyramid(),
            num_classes,
            min_size=384,
            max_size=576,
            score_thresh=0.05,
            image_mean=[127 / 255] * 3,
            image_std=[128 / 255] * 3,
        )

    def forward(self, batch: list[Record]) -> Any:
        """Takes uint8 RGB images. Returns losses, or in evaluation a list of results."""
        images = [entry["image"].float() / 255 for entry in batch]
        if not self.training:
            pairs = zip(batch, self.model(images), strict=True)
            return [as_result(e, r["boxes"], r["scores"], r["labels"]) for e, r in pairs]
        truths = [entry["instances"].get_fields() for entry in batch]
        return self.model(
            images, [{"boxes": t["gt_boxes"].tensor, "labels": t["gt_classes"]} for t in truths]
        )


def as_result(entry: Record, boxes: Tensor, scores: Tensor, classes: Tensor) -> Record:
    """Takes boxes (N, 4), XYXY in pixels, scores (N) and classes (N)."""
    instances = Instances(
        (entry["height"], entry["width"]),
        pred_boxes=Boxes(boxes),
        scores=scores,
        pred_classes=classes,
    )
    return {"instances": instances}


def find_with_yolo(yolo: Any, batch: list[Record]) -> list[Record]:
    """Takes one image; returns what Detectron2's detectors do."""
    entry = batch[0]
    (result,) = yolo.predict(entry["file_name"], imgsz=512, conf=0.001, verbose=False)
    return [as_result(entry, result.boxes.xyxy, result.boxes.conf, result.boxes.cls.long())]


def train(model: nn.Module, seconds: float) -> Record:
    """Trains for a CPU time; returns the number of steps and the minutes that they took."""
    begin = time.process_time()
    mapper = data.DatasetMapper(is_train=True, augmentations=[RandomFlip()], image_format="RGB")
    records = data.get_detection_dataset_dicts(TRAIN)
    batches = iter(
        data.build_detection_train_loader(records, mapper=mapper, total_batch_size=BATCH_SIZE)
    )

    def compute_gradients() -> float:
        start = time.process_time()
        loss = sum(model(next(batches)).values())
        model.zero_grad()
        loss.backward()
        return time.process_time() - start

    _, *timed = [compute_gradients() for _ in range(TIMED_STEPS)]  # the first one is slower
    steps = max(1, round(seconds * len(timed) / sum(timed)) - TIMED_STEPS)
    rate = 0.01 * BATCH_SIZE / 16
    warm_up = max(1, steps // 10)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (1 + math.cos(math.pi * step / steps)) / 2),
    )
    for _ in range(steps):
        compute_gradients()
        optimizer.step()
        schedule.step()
    return {"steps": steps, "minutes": (time.process_time() - begin) / 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--data", "--val", "--images", "--model", "--output"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    set_threads(1)
    seed_all_rng(1)
    register_coco_instances(TRAIN, {}, args.data, args.images)
    register_coco_instances(VAL, {}, args.val, args.images)
    mapper = data.DatasetMapper(is_train=False, augmentations=[], image_format="RGB")
    loader = data.build_detection_test_loader(data.get_detection_dataset_dicts(VAL), mapper=mapper)
    result: Record = {"machine": environment()}
    if args.model in MODELS:
        model = TorchvisionDetector(args.model, len(data.MetadataCatalog.get(VAL).thing_classes))
        result |= train(model, 60 * args.minutes)
    else:
        from ultralytics import YOLO

        model = partial(find_with_yolo, YOLO(args.model))
    metrics = inference_on_dataset(model, loader, CocoEvaluator(VAL, tasks=["bbox"]))["bbox"]
    result |= {key: metrics[key] for key in ("AP", "AP50", "APs")}
    path = Path(args.output) / f"{Path(args.model).stem}.json"
    write_atomically(path, json.dumps(result, indent=2).encode())


if __name__ == "__main__":
    main()
