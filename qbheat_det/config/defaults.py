# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config key that this package adds to Detectron2's, with its default and one comment."""

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

from .cache_keys import add_cache_keys
from .classifier_keys import add_classifier_keys
from .classify_data_keys import add_classify_data_keys
from .deploy_keys import add_deploy_keys
from .detr_help_keys import add_detr_help_keys
from .fcos_keys import add_fcos_keys
from .knn_keys import add_knn_keys
from .looking_keys import add_looking_keys
from .moco_keys import add_moco_keys
from .pretraining_data_keys import add_pretraining_data_keys
from .pretraining_keys import add_pretraining_keys
from .scattered_keys import add_scattered_keys
from .step_keys import add_step_keys
from .wasserstein_keys import add_wasserstein_keys


def get_cfg() -> CfgNode:
    """Returns a copy of Detectron2's default config with this package's keys added."""
    cfg = get_detectron2_cfg()
    add_qbheat_config(cfg)
    return cfg


def add_qbheat_config(cfg: CfgNode) -> None:
    """Adds the keys of ``qbheat_det`` to a Detectron2 config, in place."""
    # Written by tools/train_net.py: what the model predicts, for prediction without the data.
    cfg.MODEL.CLASS_NAMES = []  # contiguous order
    cfg.MODEL.CATEGORY_IDS = []  # ids in the annotation file, same order

    add_deploy_keys(cfg)

    _add_mobile_former(cfg)
    # What build_fpn_backbone stands on: any registered backbone, also "timm:resnet18" and the like.
    # MODEL.FPN.IN_FEATURES takes the place of that backbone's own OUT_FEATURES.
    cfg.MODEL.FPN.BOTTOM_UP = "MobileFormer"
    # Strided levels that it adds on its coarsest map: with three, "s8" and "s16" become P3 ... P7.
    cfg.MODEL.FPN.TOP_LEVELS = 3
    cfg.MODEL.TIMM = CfgNode()
    # For MODEL.BACKBONE.NAME "TimmBackbone"; "timm:resnet18" there says both at once.
    cfg.MODEL.TIMM.NAME = "resnet18"
    cfg.MODEL.TIMM.OUT_FEATURES = ["s8", "s16"]  # maps by stride, of those that the model has
    _add_mf_detr(cfg)
    add_detr_help_keys(cfg)
    add_fcos_keys(cfg)
    add_pretraining_keys(cfg)
    add_scattered_keys(cfg)
    add_wasserstein_keys(cfg)
    add_classifier_keys(cfg)

    # "default" is Detectron2's DatasetMapper, "detr" flips, scales and crops as DETR does,
    # "pretrain" cuts out a random part of an image without annotations, "classify" augments it
    # further, with the label of the image's class folder, "two_views" augments two such parts.
    cfg.INPUT.DATASET_MAPPER_NAME = "default"
    # Crop of the "detr" mapper: with probability 1/2 resize the shorter side to one of these
    # lengths (pixels), then crop height and width uniform in [min, max] (pixels). Empty: no crop.
    cfg.INPUT.DETR_CROP_RESIZE = [400, 500, 600]
    cfg.INPUT.DETR_CROP_RANGE = [384, 600]
    add_pretraining_data_keys(cfg)
    add_moco_keys(cfg)
    add_classify_data_keys(cfg)
    add_cache_keys(cfg)

    # Read the header and the last bytes of every image file before training.
    cfg.DATASETS.CHECK_IMAGES = True

    _add_solver(cfg)
    add_step_keys(cfg)

    cfg.TEST.EVAL_EPOCHS = 0.0  # where not 0, TEST.EVAL_PERIOD is worked out from it
    # "task/metric" of the evaluation that decides which checkpoint is the best: the highest, or of
    # metrics whose name begins with "loss" the lowest.
    cfg.TEST.BEST_METRIC = "bbox/AP"
    # "auto": faster-coco-eval where it is installed, else pycocotools; or one of the two names.
    cfg.TEST.COCO_EVAL_LIBRARY = "auto"
    add_knn_keys(cfg)
    add_looking_keys(cfg)


def _add_solver(cfg: CfgNode) -> None:
    cfg.SOLVER.OPTIMIZER = "SGD"  # "SGD" or "ADAMW"
    cfg.SOLVER.BETAS = (0.9, 0.999)  # of AdamW
    cfg.SOLVER.BACKBONE_MULTIPLIER = 1.0  # learning rate of the backbone relative to the rest
    # Factor on the learning rate from the head to the backbone's last layer, and from each layer of
    # the backbone to the one before it.
    cfg.SOLVER.LAYER_DECAY = 1.0

    # SOLVER.IMS_PER_BATCH is the batch of one optimizer step, over all processes. Each process
    # works through its share in this many parts, one after another, to save memory.
    cfg.SOLVER.ACCUMULATE = 1
    cfg.SOLVER.AMP.PRECISION = "float16"  # "float16" or "bfloat16", with SOLVER.AMP.ENABLED

    # Schedules in epochs. Where one is not 0 (or not empty), the key in iterations is worked out
    # from it and the number of training images: MAX_ITER, STEPS, WARMUP_ITERS, CHECKPOINT_PERIOD.
    cfg.SOLVER.EPOCHS = 0.0
    cfg.SOLVER.STEP_EPOCHS = []
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    cfg.SOLVER.CHECKPOINT_EPOCHS = 0.0

    # Images per step that SOLVER.BASE_LR is meant for; 0 takes SOLVER.BASE_LR as it is.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    # How the rate follows the batch: "linear" as for SGD, or "sqrt" as for AdamW.
    cfg.SOLVER.LR_SCALING = "linear"

    # A moving average of all weights and buffers, which is what is evaluated and exported.
    cfg.SOLVER.EMA = CfgNode()
    cfg.SOLVER.EMA.ENABLED = False
    cfg.SOLVER.EMA.DECAY = 0.9998
    cfg.SOLVER.EMA.WARMUP = True  # averages over fewer steps at the start

    cfg.SOLVER.CHECKPOINTS_KEPT = 3  # newest ones; the best and the last are kept besides. 0: all
    cfg.SOLVER.LOG_PERIOD = 20  # iterations between two lines of the log
    cfg.SOLVER.WANDB_PROJECT = ""  # logs to Weights & Biases too, with the extra "wandb"


def _add_mobile_former(cfg: CfgNode) -> None:
    cfg.MODEL.MOBILE_FORMER = CfgNode()
    cfg.MODEL.MOBILE_FORMER.VARIANT = "285M"  # "285M", "1.0G", "3.7G", or "custom": the keys below
    # Of "s2", "s4", "s8", "s16", "s16_expanded" and "tokens".
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16_expanded"]
    cfg.MODEL.MOBILE_FORMER.NORM = "BN"  # any name that detectron2.layers.get_norm knows
    cfg.MODEL.MOBILE_FORMER.DROP_PATH = 0.0  # rate at the last block, rising linearly from zero
    cfg.MODEL.MOBILE_FORMER.NUM_TOKENS = 6
    cfg.MODEL.MOBILE_FORMER.TOKEN_DIM = 192
    cfg.MODEL.MOBILE_FORMER.STEM_CHANNELS = 16
    # One row a block: [kind, hidden, out, second hidden]; kind "lite", "down" (starts a stage)
    # or "plain"; the second hidden width belongs to "down" alone and is 0 elsewhere.
    cfg.MODEL.MOBILE_FORMER.BLOCKS = [["lite", 32, 16, 0]]
    cfg.MODEL.MOBILE_FORMER.EXPANDED_CHANNELS = 720  # width of "s16_expanded"


def _add_mf_detr(cfg: CfgNode) -> None:
    cfg.MODEL.MF_DETR = CfgNode()
    cfg.MODEL.MF_DETR.NUM_CLASSES = 80
    # Backbone outputs at strides 8 and 16, finest first.
    cfg.MODEL.MF_DETR.IN_FEATURES = ["s8", "s16_expanded"]
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [5, 2, 2]  # at strides 32, 16, 8: MF-Dec-522
    cfg.MODEL.MF_DETR.HIDDEN_DIM = 256
    cfg.MODEL.MF_DETR.NUM_OBJECT_QUERIES = 100
    cfg.MODEL.MF_DETR.NHEADS = 8
    cfg.MODEL.MF_DETR.DIM_FEEDFORWARD = 1024
    cfg.MODEL.MF_DETR.EXPANSION = 6  # of the lite bottleneck in M-F- blocks
    cfg.MODEL.MF_DETR.DROPOUT = 0.1
    cfg.MODEL.MF_DETR.NORM = "BN"  # of the down- and up-convolutions; "SyncBN" for tiny batches
    cfg.MODEL.MF_DETR.DEEP_SUPERVISION = True  # a loss on every block's prediction
    cfg.MODEL.MF_DETR.CLASS_WEIGHT = 1.0
    cfg.MODEL.MF_DETR.L1_WEIGHT = 5.0
    cfg.MODEL.MF_DETR.GIOU_WEIGHT = 2.0
    cfg.MODEL.MF_DETR.NO_OBJECT_WEIGHT = 0.1
    # How the logits are read: "softmax" as in DETR; "focal" or "varifocal", a sigmoid for each
    # class; or "softmax_focal", in inference the same as "softmax".
    cfg.MODEL.MF_DETR.CLASSIFICATION = "softmax"
    cfg.MODEL.MF_DETR.FOCAL = CfgNode()  # of all three but "softmax"
    cfg.MODEL.MF_DETR.FOCAL.GAMMA = 2.0  # exponent of the distance between target and prediction
    # Weight of the class that is there; 1 - ALPHA of those that are not. Of the sigmoids.
    cfg.MODEL.MF_DETR.FOCAL.ALPHA = 0.25
    # What a matched query's class is to score: 1 at 0.0, the IoU of its box at 1.0, or between.
    cfg.MODEL.MF_DETR.FOCAL.IOU_TARGET = 1.0
    cfg.MODEL.MF_DETR.FOCAL.PRIOR = 0.01  # probability of each class at first. Of the sigmoids
