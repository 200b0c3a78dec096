# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steps of small models on few images, as one of several processes or as the only one."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import cut
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.mean_teacher import MeanTeacher
from qbheat_det.engine.old_detector import OldDetector
from qbheat_det.engine.step import StepTrainer
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, STRONG, UNLABELLED
from qbheat_det.modeling.pretrain import QUADRANTS
from qbheat_det.modeling.pretrain.wasserstein import DependencyDraw
from tests.modeling.tiny_pretraining import make_tiny_config

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
SELECTED_QUERIES = (
    "MODEL.MF_DETR.CLASSIFICATION", "focal", "MODEL.MF_DETR.CLASS_WEIGHT", 2.0,
    "MODEL.MF_DETR.QUERY_SELECTION.ENABLED", True,
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
    is_taught: bool = False  # each image brings one without labels
    is_partly_annotated: bool = False  # each image is annotated for one class
    keeps_classes: bool = False  # the first two of them, from another detector


def on_timm(config, name):
    """Returns the config of a tiny RetinaNet or MF-DETR on a network of timm."""
    own = (
        "MODEL.BACKBONE.NAME",
        f"timm:{name}",
        "MODEL.MF_DETR.IN_FEATURES",
        ["s8", "s16"],
    )
    if config == RETINANET:
        own = ("MODEL.BACKBONE.NAME", "build_fpn_backbone", "MODEL.FPN.BOTTOM_UP", f"timm:{name}")
    return make_case_config(Case(config, opts=own), "cpu")


SMALL = f"""
MODEL.BACKBONE.FREEZE_AT 0 MODEL.MOBILE_FORMER.VARIANT custom MODEL.MOBILE_FORMER.STEM_CHANNELS 8
MODEL.MOBILE_FORMER.EXPANDED_CHANNELS 32 MODEL.MOBILE_FORMER.NUM_TOKENS 2
MODEL.MOBILE_FORMER.TOKEN_DIM 16 MODEL.FPN.OUT_CHANNELS 16 MODEL.FPN.TOP_LEVELS 0
MODEL.ANCHOR_GENERATOR.SIZES [[12],[24]] MODEL.RETINANET.IN_FEATURES ["p3","p4"]
MODEL.RETINANET.NUM_CLASSES 3 MODEL.RETINANET.NUM_CONVS 1 MODEL.MF_DETR.NUM_CLASSES 3
MODEL.MF_DETR.NUM_BLOCKS [1,1,1] MODEL.MF_DETR.HIDDEN_DIM 16 MODEL.MF_DETR.NHEADS 2
MODEL.MF_DETR.DIM_FEEDFORWARD 16 MODEL.MF_DETR.EXPANSION 2 MODEL.MF_DETR.DROPOUT 0.0
MODEL.MF_DETR.NUM_OBJECT_QUERIES 7 INPUT.PRETRAIN.SIZE {SIZE} MODEL.CLASSIFIER.NUM_CLASSES 3
MODEL.CLASSIFIER.WIDTH 64 MODEL.CLASSIFIER.DROPOUT 0.0 MODEL.MOCO.HIDDEN_DIM 16 MODEL.MOCO.DIM 8"""


def make_case_config(case, device):
    cfg = load_config(get_config_path(case.config), [*SMALL.split(), "MODEL.DEVICE", device])
    cfg.MODEL.MOBILE_FORMER.BLOCKS = BLOCKS
    cfg.SOLVER.IMS_PER_BATCH = len(case.batches[0])
    # Of two batches, so that the second step compares with keys of the first.
    cfg.MODEL.KEEP_CLASSES.NUM = 2 * case.keeps_classes
    cfg.MODEL.KEEP_CLASSES.MIN_SCORE = 0.005  # that of a new head is 0.01
    cfg.MODEL.MOCO.QUEUE_SIZE = 2 * cfg.SOLVER.IMS_PER_BATCH
    cfg.merge_from_list(list(case.opts))
    return cfg


def make_image(index):
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


def build_case(case, device="cpu"):
    torch.manual_seed(0)
    model = build_model(make_case_config(case, device))
    for name, parameter in model.named_parameters():
        if name.endswith("bbox_embed.last.weight"):  # zero at first: all boxes alike
            nn.init.normal_(parameter, std=0.3)
    return model


def run_case(case, device="cpu"):
    """Returns the gradients of the last step of a case, see ``take_steps``."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = build_case(case, device)
    batches = [[make_image(index) for index in batch] for batch in case.batches]
    if case.is_partly_annotated:
        for image in itertools.chain(*batches):
            image[ANNOTATED_CLASSES] = [image["label"]]
    mean_teacher = None
    if case.is_taught:
        mean_teacher = MeanTeacher(build_case(case, device).eval(), precision=None)
        for image in itertools.chain(*batches):
            other = make_image((int(image["label"]) + 3) % len(NUM_BOXES))
            image[UNLABELLED] = [{"image": other["image"], STRONG: other["image_key"]}]
    old_detector = None
    if case.keeps_classes:
        other = build_case(case, device)
        for parameter in other.parameters():
            parameter.data.mul_(1.1)
        old_detector = OldDetector(other, precision=None)
    return take_steps(
        model,
        batches,
        accumulate=case.accumulate,
        batch_statistics=case.batch_statistics,
        mean_teacher=mean_teacher,
        old_detector=old_detector,
    )


def take_steps(model, batches, *, accumulate=1, batch_statistics=False, **teachers):
    """Takes a step of each batch, of which this process has its share, without learning.

    Returns:
        The gradients of the last step, and its mean loss under "total_loss".
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:  # else early gradients vanish in so small a network
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    world_size, rank = comm.get_world_size(), comm.get_rank()
    shares = [cut(batch, world_size)[rank] for batch in batches]
    trainer = StepTrainer(
        distribute(model) if world_size > 1 else model,
        shares,
        torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=len(batches[0]),
        accumulate=accumulate,
        **teachers,
    )
    for norm in norms:
        norm.train(batch_statistics)
    with EventStorage() as storage:
        trainer._data_loader_iter_obj = iter(shares)
        for trainer.iter in range(len(shares)):
            trainer.run_step()
            storage.step()
        total = storage.history("total_loss").latest()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return {**gradients, "total_loss": torch.tensor(total)}


class WithGivenMasks(nn.Module):
    """A model whose images name their visible parts, which each process would draw otherwise."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batched_inputs):
        if hasattr(self.model, "choose_quarters"):
            return self.model(batched_inputs, [entry["place"] for entry in batched_inputs])
        return self.model(batched_inputs, torch.stack([e["visible"] for e in batched_inputs]))


def run_reconstruction(meta_arch, accumulate):
    """Returns the gradients of a step of an objective that reconstructs masked images."""
    torch.manual_seed(0)
    model = build_model(make_tiny_config(meta_arch))
    for name, parameter in model.named_parameters():
        if name.startswith("predictor."):  # zero at first
            nn.init.normal_(parameter, std=0.1)
    images = []
    for index in range(7):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)
        visible = (torch.rand(16, generator=generator).argsort() < 4).view(4, 4)
        place = QUADRANTS[index % len(QUADRANTS)]
        images.append({"image": image, "visible": visible, "place": place})
    return take_steps(WithGivenMasks(model), [images], accumulate=accumulate)


def run_wasserstein(form):
    """Returns the gradients of a step of Wasserstein dependency; what is drawn is given."""
    num_images = 8
    cfg = make_tiny_config("WassersteinDependency")
    cfg.MODEL.MOBILE_FORMER.NORM = "BN"
    keys = cfg.MODEL.WASSERSTEIN
    keys.FORM, keys.RADIUS, keys.HIDDEN_DIM, keys.DIM, keys.CRITIC_DIM = form, 3.0, 32, 8, 16
    cfg.SOLVER.IMS_PER_BATCH = num_images
    torch.manual_seed(0)
    model = build_model(cfg)
    for parameter in model.critic.parameters():
        nn.init.normal_(parameter, std=0.3)  # steep enough for a penalty
    first = torch.arange(num_images) % 4
    second = (first + 1 + torch.arange(num_images) % 3) % 4
    mixing = torch.rand(num_images)
    mine = cut(list(range(num_images)), comm.get_world_size())[comm.get_rank()]
    drawn = DependencyDraw(first[mine], second[mine], mixing[mine])
    model.draw = lambda num_images: drawn
    images = torch.randint(256, (num_images, 3, 64, 64), dtype=torch.uint8)
    return take_steps(model, [[{"image": image} for image in images]])


def run_all(args):
    """The job of one process: cases by kind, with their arguments."""
    return {
        "detection": {name: run_case(case, args.kind) for name, case in args.cases.items()},
        "reconstruction": {arch: run_reconstruction(arch, 2) for arch in args.reconstruction},
        "wasserstein": {form: run_wasserstein(form) for form in args.wasserstein},
    }
