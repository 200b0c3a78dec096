# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two steps of small models on few images, as one of several processes or as the only one."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import cut
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer

SIZE = 64
NUM_BOXES = (3, 1, 2, 4, 2, 0, 0, 0)  # of image 0, 1, …
BLOCKS = [
    ["lite", 16, 8, 0],
    ["down", 16, 8, 16], ["plain", 16, 8, 0],
    ["down", 16, 16, 32],
    ["down", 32, 16, 32], ["plain", 32, 16, 0],
]  # fmt: skip
RETINANET, MF_DETR = "coco/Base-RetinaNet.yaml", "coco/Base-MFDETR.yaml"
CLASSIFIER, MOCO = "ImageNet-finetune/Base-finetune.yaml", "ImageNet-MoCo/Base-MoCo.yaml"
# configs/Base-FastMFDETR.yaml but for the noise, which each image draws in its own process or part.
FAST_WITHOUT_NOISE = (
    "MODEL.MF_DETR.CLASSIFICATION", "varifocal", "MODEL.MF_DETR.CLASS_WEIGHT", 2.0,
    "MODEL.MF_DETR.DENOISING.GROUPS", 5,
    "MODEL.MF_DETR.DENOISING.BOX_NOISE", 0.0, "MODEL.MF_DETR.DENOISING.LABEL_NOISE", 0.0,
)  # fmt: skip
Batch = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model, the images of its steps, and what is special about it."""

    config: str
    batches: tuple[Batch, ...] = ((0, 1, 2, 3), (4, 3, 1, 0))
    opts: tuple[Any, ...] = ()
    accumulate: int = 1
    batch_statistics: bool = False  # else BatchNorm uses its running ones


def make_case_config(case: Case, device: str) -> CfgNode:
    cfg = load_config(get_config_path(case.config))
    cfg.MODEL.DEVICE = device
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    mobile_former = cfg.MODEL.MOBILE_FORMER
    mobile_former.VARIANT, mobile_former.BLOCKS = "custom", BLOCKS
    mobile_former.STEM_CHANNELS, mobile_former.EXPANDED_CHANNELS = 8, 32
    mobile_former.NUM_TOKENS, mobile_former.TOKEN_DIM = 2, 16
    cfg.MODEL.FPN.OUT_CHANNELS, cfg.MODEL.FPN.TOP_LEVELS = 16, 0
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[12], [24]]
    cfg.MODEL.RETINANET.IN_FEATURES = ["p3", "p4"]
    cfg.MODEL.RETINANET.NUM_CLASSES = cfg.MODEL.MF_DETR.NUM_CLASSES = 3
    cfg.MODEL.RETINANET.NUM_CONVS = 1
    decoder = cfg.MODEL.MF_DETR
    decoder.NUM_BLOCKS, decoder.HIDDEN_DIM, decoder.NHEADS = [1, 1, 1], 16, 2
    decoder.DIM_FEEDFORWARD, decoder.EXPANSION, decoder.DROPOUT = 16, 2, 0.0
    decoder.NUM_OBJECT_QUERIES = 7
    cfg.INPUT.PRETRAIN.SIZE = SIZE
    classifier = cfg.MODEL.CLASSIFIER
    classifier.NUM_CLASSES, classifier.WIDTH, classifier.DROPOUT = 3, 64, 0.0
    moco, cfg.SOLVER.IMS_PER_BATCH = cfg.MODEL.MOCO, len(case.batches[0])
    # Of two batches, so that the second step compares with keys of the first.
    moco.QUEUE_SIZE, moco.HIDDEN_DIM, moco.DIM = 2 * cfg.SOLVER.IMS_PER_BATCH, 16, 8
    cfg.merge_from_list(list(case.opts))
    return cfg


def make_image(index: int) -> dict[str, Any]:
    """Returns what a mapper gives for an image: noise, boxes and label are its number's."""
    generator = torch.Generator().manual_seed(index)
    count = NUM_BOXES[index]
    corner = torch.rand(count, 2, generator=generator) * 32
    instances = Instances((SIZE, SIZE))
    size = 8 + torch.rand(count, 2, generator=generator) * 24
    instances.gt_boxes = Boxes(torch.cat([corner, corner + size], dim=1))
    instances.gt_classes = torch.randint(3, (count,), generator=generator)
    image = torch.randint(256, (3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    other = torch.randint(256, (3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    return {"image": image, "image_key": other, "instances": instances, "label": index % 3}


def run_case(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Returns the gradients of the last step, and its mean loss under "total_loss"."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = build_model(make_case_config(case, device))
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # else early gradients vanish in so small a network
            nn.init.uniform_(module.weight, 0.5, 1.5)
    for name, parameter in model.named_parameters():
        if name.endswith("bbox_embed.last.weight"):  # zero at first: all boxes alike
            nn.init.normal_(parameter, std=0.3)
    world_size, rank = comm.get_world_size(), comm.get_rank()
    shares = [
        [make_image(index) for index in cut(batch, world_size)[rank]] for batch in case.batches
    ]
    trainer = StepTrainer(
        distribute(model) if world_size > 1 else model,
        shares,
        torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=len(case.batches[0]),
        accumulate=case.accumulate,
    )
    if not case.batch_statistics:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    with EventStorage() as storage:
        trainer._data_loader_iter_obj = iter(shares)
        for trainer.iter in range(len(shares)):
            trainer.run_step()
            storage.step()
        total = storage.history("total_loss").latest()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return {**gradients, "total_loss": torch.tensor(total)}


def run_cases(args: argparse.Namespace) -> dict[str, dict[str, Tensor]]:
    """The job of one process: ``args.cases`` by name, on ``args.device``."""
    return {name: run_case(case, args.device) for name, case in args.cases.items()}
