# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet on Mobile-Former, trained on blood cells with Detectron2's DefaultTrainer."""

import os

import cv2
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultPredictor, DefaultTrainer
from detectron2.evaluation import COCOEvaluator
from detectron2.utils.logger import setup_logger

import qbheat_det

DATA = os.path.join(os.environ["DETECTRON2_DATASETS"], "cells")


class Trainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name):
        return COCOEvaluator(dataset_name, output_dir=cfg.OUTPUT_DIR)


def get_config():
    cfg = get_cfg()
    qbheat_det.add_qbheat_config(cfg)
    cfg.merge_from_file(model_zoo.get_config_file("COCO-Detection/retinanet_R_50_FPN_1x.yaml"))
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    cfg.MODEL.WEIGHTS = "qbheat://distill/285M"
    cfg.MODEL.PIXEL_MEAN = [123.675, 116.28, 103.53]
    cfg.MODEL.PIXEL_STD = [58.395, 57.12, 57.375]
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.FORMAT = "RGB"
    cfg.INPUT.MIN_SIZE_TRAIN = (128,)
    cfg.INPUT.MIN_SIZE_TEST = 128
    cfg.DATASETS.TRAIN = ("cells_train",)
    cfg.DATASETS.TEST = ("cells_val",)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.BASE_LR = 0.002
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SOLVER.MAX_ITER = 6
    cfg.SOLVER.STEPS = ()
    cfg.OUTPUT_DIR = "output"
    return cfg


def main():
    setup_logger()
    for part in ("train", "val"):
        register_coco_instances(f"cells_{part}", {}, os.path.join(DATA, f"{part}.json"), DATA)
    cfg = get_config()
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()

    cfg.MODEL.WEIGHTS = os.path.join(cfg.OUTPUT_DIR, "model_final.pth")
    predictor = DefaultPredictor(cfg)
    name = sorted(os.listdir(os.path.join(DATA, "val")))[0]
    instances = predictor(cv2.imread(os.path.join(DATA, "val", name)))["instances"]
    print(f"{name}: {len(instances)} boxes in an image of {instances.image_size}")


if __name__ == "__main__":
    main()
