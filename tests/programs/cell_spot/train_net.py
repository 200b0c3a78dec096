#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""CellSpot training script: a project on Detectron2 whose backbone is chosen by its config."""

import functools
import os

import detectron2.data.transforms as T
import detectron2.engine.defaults as defaults
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg
from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from detectron2.evaluation import COCOEvaluator, DatasetEvaluators, verify_results
from detectron2.utils import comm

import qbheat_det

DATA = os.path.join(os.environ["DETECTRON2_DATASETS"], "cells")
for part in ("train", "val"):
    register_coco_instances(f"spot_{part}", {}, os.path.join(DATA, f"{part}.json"), DATA)


class SpotMapper(DatasetMapper):
    """Drops boxes whose sides are below a limit."""

    def __init__(self, cfg):
        augmentations = [
            T.ResizeShortestEdge(cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN, "choice"),
            T.RandomFlip(),
            T.RandomBrightness(0.9, 1.1),
        ]
        super().__init__(True, augmentations=augmentations, image_format=cfg.INPUT.FORMAT)
        self.min_side = cfg.MODEL.SPOT.MIN_SIDE

    def __call__(self, dataset_dict):
        dataset_dict = super().__call__(dataset_dict)
        instances = dataset_dict["instances"]
        dataset_dict["instances"] = instances[instances.gt_boxes.nonempty(self.min_side)]
        return dataset_dict


class Trainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        if output_folder is None:
            output_folder = os.path.join(cfg.OUTPUT_DIR, "inference")
        coco = COCOEvaluator(dataset_name, output_dir=output_folder)
        return DatasetEvaluators([coco])

    @classmethod
    def build_train_loader(cls, cfg):
        return build_detection_train_loader(cfg, mapper=SpotMapper(cfg))


def add_spot_config(cfg):
    cfg.MODEL.SPOT = CN()
    cfg.MODEL.SPOT.MIN_SIDE = 2.0


def setup(args):
    cfg = get_cfg()
    add_spot_config(cfg)
    qbheat_det.add_qbheat_config(cfg)
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    default_setup(cfg, args)
    return cfg


def main(args):
    cfg = setup(args)
    if args.eval_only:
        model = Trainer.build_model(cfg)
        checkpointer = DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        results = Trainer.test(cfg, model)
        if comm.is_main_process():
            verify_results(cfg, results)
        return results
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


def run_cpu_process(rank, args):
    """Detectron2's launch starts processes on GPUs only. This is one of several on the CPU."""
    defaults.create_ddp_model = functools.partial(defaults.create_ddp_model, device_ids=None)
    store = f"file://{os.path.abspath(args.store)}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.num_cpus)
    comm._LOCAL_PROCESS_GROUP = dist.new_group(list(range(args.num_cpus)))
    main(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = default_argument_parser()
    parser.add_argument("--num-cpus", type=int, default=0, help="processes on the CPU, with gloo")
    parser.add_argument("--store", default="gloo_store", help="a new file for --num-cpus")
    args = parser.parse_args()
    print("Command Line Args:", args)
    if args.num_cpus:
        mp.spawn(run_cpu_process, args=(args,), nprocs=args.num_cpus)
    else:
        launch(main, args.num_gpus, num_machines=args.num_machines, args=(args,))
