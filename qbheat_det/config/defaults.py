# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config key that this package adds to Detectron2's, with its default and one comment."""

import copy
from typing import Any

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

_KEYS: dict[str, dict[str, Any]] = {
    "MODEL": {
        # Written by qbheat train: what the model predicts, for prediction without the data.
        "CLASS_NAMES": [],  # contiguous order
        "CATEGORY_IDS": [],  # ids in the annotation file, same order
        # Keep only what enters each block, and compute its inside again in the backward pass: less
        # memory, a longer step, the same gradients.
        "ACTIVATION_CHECKPOINTING": False,
        # Keep maps with their channels innermost in training. None: on CPUs, which lose nothing.
        "CHANNELS_LAST": None,
    },
    # How qbheat predict and qbheat evaluate deploy; see docs/export.md. Detectron2's
    # own programs do not read these keys: they call qbheat_det.deploy(model).
    "MODEL.DEPLOY": {
        # Bring the model, once its weights are loaded, into its fastest equal form on the device.
        "ENABLED": False,
        "PRECISION": "float32",  # or "bfloat16", where it is fast: AP moves by some tenths
        # "auto" compiles for IMAGE_SIZES (on GPUs: for all sizes if there are none); or "off".
        "COMPILE": "auto",
        "IMAGE_SIZES": [],  # [[height, width], …] in pixels, after resizing
        "KEEP_MEMORY": True,  # as SOLVER.KEEP_MEMORY, for the next image
    },
    "MODEL.MOBILE_FORMER": {
        "VARIANT": "285M",  # "285M", "1.0G", "3.7G", or "custom": the keys below
        # Of "s2", "s4", "s8", "s16", "s16_expanded" and "tokens".
        "OUT_FEATURES": ["s8", "s16_expanded"],
        "NORM": "BN",  # any name that detectron2.layers.get_norm knows
        "DROP_PATH": 0.0,  # rate at the last block, rising linearly from zero
        "NUM_TOKENS": 6,
        "TOKEN_DIM": 192,
        "STEM_CHANNELS": 16,
        # One row a block: [kind, hidden, out, second hidden]; kind "lite", "down" (starts a stage)
        # or "plain"; the second hidden width belongs to "down" alone and is 0 elsewhere.
        "BLOCKS": [["lite", 32, 16, 0]],
        "EXPANDED_CHANNELS": 720,  # width of "s16_expanded"
    },
    "MODEL.FPN": {
        # Any registered backbone, also "timm:resnet18" and the like, for build_fpn_backbone.
        # MODEL.FPN.IN_FEATURES takes the place of that backbone's own OUT_FEATURES.
        "BOTTOM_UP": "MobileFormer",
        # Strided levels on its coarsest map: with three, "s8" and "s16" become P3 ... P7.
        "TOP_LEVELS": 3,
    },
    "MODEL.TIMM": {
        # For MODEL.BACKBONE.NAME "TimmBackbone"; "timm:resnet18" there says both at once.
        "NAME": "resnet18",
        "OUT_FEATURES": ["s8", "s16"],  # maps by stride, of those that the model has
    },
    "MODEL.MF_DETR": {
        "NUM_CLASSES": 80,
        "IN_FEATURES": ["s8", "s16_expanded"],  # at strides 8 and 16, finest first
        "NUM_BLOCKS": [5, 2, 2],  # at strides 32, 16, 8: MF-Dec-522
        "HIDDEN_DIM": 256,
        "NUM_OBJECT_QUERIES": 100,
        "NHEADS": 8,
        "DIM_FEEDFORWARD": 1024,
        "EXPANSION": 6,  # of the lite bottleneck in M-F- blocks
        "DROPOUT": 0.1,
        "NORM": "BN",  # of the down- and up-convolutions; "SyncBN" for tiny batches
        "DEEP_SUPERVISION": True,  # a loss on every block's prediction
        "CLASS_WEIGHT": 1.0,
        "L1_WEIGHT": 5.0,
        "GIOU_WEIGHT": 2.0,
        "NO_OBJECT_WEIGHT": 0.1,
        "CLASSIFICATION": "softmax",  # as in DETR; or "focal", a sigmoid for each class
    },
    "MODEL.MF_DETR.FOCAL": {  # of "focal"
        "GAMMA": 2.0,  # exponent of the distance between target and prediction
        "ALPHA": 0.25,  # weight of the class that is there; 1 - ALPHA of those that are not
        # What a matched query's class is to score: 1 at 0.0, the IoU of its box at 1.0, or between.
        "IOU_TARGET": 1.0,
        "PRIOR": 0.01,  # probability of each class at first
    },
    "MODEL.MF_DETR.DENOISING": {
        "GROUPS": 0,  # noised copies of every ground-truth box that are queries in training
        # How far a corner may move, relative to half the box's side; of negatives once to twice so.
        "BOX_NOISE": 0.4,
        "LABEL_NOISE": 0.25,  # probability that a label is drawn anew
        # Beside each copy one with more noise, which is to be recognised as no object.
        "NEGATIVES": True,
        # Most denoising queries of an image: one with many boxes has fewer groups, or not all.
        "MAX_QUERIES": 200,
        "WEIGHT": 1.0,  # of its losses, relative to the main ones
    },
    "MODEL.MF_DETR.QUERY_GROUPS": {
        # Sets of object queries, each matched one-to-one; all but the first are for training alone.
        "COUNT": 1,
        "WEIGHT": 1.0,  # of each further group's losses, relative to the main ones
    },
    "MODEL.MF_DETR.QUERY_SELECTION": {
        # Object queries are the positions where a dense head is most certain of an object, and the
        # decoder refines their boxes and classes; else they are learned, the same for all images.
        "ENABLED": False,
        "POSITIONS_PER_BOX": 6,  # that a box is assigned to, in training the dense head
        "WEIGHT": 1.0,  # of the dense head's losses, relative to the main ones
    },
    "MODEL.FCOS": {  # Detectron2's, which has no keys there, after those of MODEL.RETINANET
        "NUM_CLASSES": 80,
        "IN_FEATURES": ["p3", "p4", "p5", "p6", "p7"],
        "NUM_CONVS": 4,  # of each of the head's two towers
        "NORM": "GN",  # of the towers; "GN" has 32 groups
        "PRIOR_PROB": 0.01,  # probability of each class at first
        # Half the side of the square around a box's centre whose places learn it, in strides.
        "CENTER_SAMPLING_RADIUS": 1.5,
        "FOCAL_LOSS_ALPHA": 0.25,
        "FOCAL_LOSS_GAMMA": 2.0,
        "SCORE_THRESH_TEST": 0.2,  # of the root of class score times centerness
        "TOPK_CANDIDATES_TEST": 1000,
        "NMS_THRESH_TEST": 0.6,
    },
    "MODEL.QB_HEAT": {
        # Backbone output to predict, of any stride s for which a quarter of INPUT.PRETRAIN.SIZE is
        # a multiple of s; a position reconstructs s x s pixels.
        "IN_FEATURE": "s16_expanded",
        # Where the visible quarter is: "corner", "centre", or "both", half a batch each;
        # FeatureDistillation also takes "whole".
        "VISIBLE": "both",
        # Explicit linear models of each scale: 8, 4 (A1, A2, B1, B2) or 2 (A1, B1).
        "NUM_MODELS": 8,
        "FEATURE_DIM": 512,  # channels of what is predicted
        "DECODER_DEPTH": 6,  # transformer blocks
        "DECODER_DIM": 512,
        "DECODER_HEADS": 16,
        "DECODER_MLP_RATIO": 4.0,  # hidden width of the feed-forward networks
        "LOSS_ON": "masked",  # positions that count: "masked" or "all"
        # Bring each true patch to mean 0 and variance 1 before it is compared.
        "NORM_PIXEL_LOSS": True,
    },
    "MODEL.TEACHER": {  # the frozen network whose features FeatureDistillation predicts
        "NAME": "tf_efficientnet_lite0",  # of timm's
        "WEIGHTS": "qbheat://timm/tf_efficientnet_lite0",  # as MODEL.WEIGHTS
        "IN_FEATURE": "s32",  # map that MODEL.QB_HEAT.IN_FEATURE predicts
        # More pairs of maps, of the encoder and of the teacher, such as [["s8", "s16"]]. The
        # encoder's are in MODEL.MOBILE_FORMER.OUT_FEATURES too.
        "FINER": [],
        # Side of the images that the teacher sees: its map has as many positions as the encoder's.
        "IMAGE_SIZE": 256,
        "PIXEL_MEAN": [127.0, 127.0, 127.0],  # where the file of WEIGHTS does not say it
        "PIXEL_STD": [128.0, 128.0, 128.0],
    },
    "MODEL.RANDOM_MASKING": {  # map, projection, decoder and target are those of MODEL.QB_HEAT
        "MASK_RATIO": 0.75,  # share of the map's positions whose pixels the encoder does not see
    },
    "MODEL.WASSERSTEIN": {  # the Wasserstein dependency between two areas of an image
        # Backbone output that is pooled. Half of INPUT.PRETRAIN.SIZE is a multiple of its stride.
        "IN_FEATURE": "s16_expanded",
        # "dual": the distance itself. "contrastive": telling an area's own partner from others.
        "FORM": "contrastive",
        "HIDDEN_DIM": 2048,  # of the head between encoder and critic
        "DIM": 128,  # of what the head gives, between which distances are measured
        # Length of the same, R. In the contrastive form, a bilinear critic with a slope of 1 at
        # pairs gives R / sqrt(2) times their cosine: 10 is like a temperature of 0.14. In the dual
        # form the estimate is a multiple of R.
        "RADIUS": 10.0,
        "CRITIC_DIM": 256,  # width of the critic's two hidden layers
        "PENALTY_WEIGHT": 10.0,  # on the squared excess of the critic's slope over 1
    },
    "MODEL.MOCO": {
        "IN_FEATURE": "s16_expanded",  # backbone output whose mean is compared
        "HIDDEN_DIM": 2048,  # of the head, a perceptron of two layers
        "DIM": 128,  # of what is compared
        "TEMPERATURE": 0.2,
        "MOMENTUM": 0.999,  # what the encoder of keys keeps of itself in each step
        # Keys of earlier steps; a multiple of SOLVER.IMS_PER_BATCH. At most a quarter of the
        # training images: the queue else holds keys of the query's own image for over 3 % of them.
        "QUEUE_SIZE": 65536,
        # Parts of each process's images, or of a micro-batch of them, with BatchNorm statistics of
        # their own. With one process, 1 lets queries and keys share their statistics.
        "NORM_GROUPS": 1,
    },
    "MODEL.CLASSIFIER": {
        "NUM_CLASSES": 1000,
        # Map that is classified; the first token is read besides, where the backbone has "tokens".
        "IN_FEATURE": "s16_expanded",
        "DECODER": "linear",  # "linear", or "transformer": "tran-k" of the paper
        # BatchNorm without scale and offset before the linear decoder, as linear probing has it.
        "NORMALIZE": False,
        # Of the transformer decoder, a multiple of 64; in the paper 192, 384 and 768 for 285M, 1.0G
        # and 3.7G.
        "WIDTH": 192,
        "DEPTH": 1,  # blocks: k of "tran-k"
        "DROPOUT": 0.0,  # rate inside the blocks
        "LABEL_SMOOTHING": 0.0,
        # Alphas of the beta distributions that shares are drawn from; 0 leaves it out. Where both
        # are given, each batch is mixed in one of the two ways, drawn evenly.
        "MIXUP": 0.0,
        "CUTMIX": 0.0,
    },
    "MODEL.SEMI": {  # learning from DATASETS.UNLABELLED, by a teacher: SOLVER.EMA
        "BURN_IN": 0.25,  # share of the run that trains on labels alone, at first
        "RATIO": 1,  # unlabelled images for each labelled image of a step
        "WEIGHT": 1.0,  # of the losses on unlabelled images
        "TOP_SHARE": 0.01,  # of the locations, by the teacher's score, that learn from it
        # Strong view of cached features: shares of the channels and of the area set to zero. The
        # strong view of images has the colours and blurs of INPUT.TWO_VIEWS, and erased parts.
        "DROP_CHANNELS": 0.2,
        "ERASE": 0.2,
    },
    "MODEL.CACHE_FEATURES": {
        # Encode every view once, before training, and train the head on what is on the disk. The
        # backbone must be frozen to its end.
        "ENABLED": False,
        "DTYPE": "float16",  # "float16", "bfloat16" or "float32"
        "FOLDER": "",  # of all caches; empty: "feature_cache" in the package's cache directory
    },
    "DATASETS": {
        "UNLABELLED": (),  # sets of images without labels for RetinaNet and FCOS, see MODEL.SEMI
        # Read the header and the last bytes of every image file before training.
        "CHECK_IMAGES": True,
        # Share of the images of --data that is held out for evaluation where no other set is named:
        # in the proportions of the classes, chosen by SEED and listed in OUTPUT_DIR/split.json.
        # 0 trains on all and evaluates on none.
        "VAL_FRACTION": 0.2,
    },
    "DATALOADER": {
        # Shards whose images mix; fewer shards than that, and 0, mix all images, as folders do.
        "SHUFFLE_SHARDS": 32,
        # Shards at an address: what their copies may take on this machine (1e9 bytes), and how long
        # one that does not answer is waited for.
        "CACHE_GB": 20.0,
        "RETRY_SECONDS": 300.0,
    },
    "INPUT": {
        # "default" is Detectron2's DatasetMapper, "detr" flips, scales and crops as DETR does,
        # "pretrain" cuts out a random part of an image without annotations, "classify" augments it
        # further, with the label of the image's class folder, "two_views" augments two such parts.
        "DATASET_MAPPER_NAME": "default",
        # Crop of "detr": with probability 1/2 resize the shorter side to one of these lengths
        # (pixels), then crop height and width uniform in [min, max] (pixels). Empty: no crop.
        "DETR_CROP_RESIZE": [400, 500, 600],
        "DETR_CROP_RANGE": [384, 600],
    },
    "INPUT.PRETRAIN": {  # of Detectron2's keys the mapper reads INPUT.FORMAT and INPUT.RANDOM_FLIP
        "SIZE": 256,  # side of the square that the model sees, in pixels
        # RandomResizedCrop: share of the image's area, and width over height, each [min, max].
        "SCALE": [0.2, 1.0],
        "RATIO": [3 / 4, 4 / 3],
        # A training set that takes less than this when decoded is decoded once, at the start. GB
        # (1e9 bytes) of one machine; 0 reads every image from its file each time, as do fixed views
        # (INPUT.FIXED_VIEWS), which must not depend on what fits into memory.
        "MEMORY_GB": 4.0,
    },
    "INPUT.TWO_VIEWS": {  # of MoCo; what is cut out, and how large, is INPUT.PRETRAIN's
        # Brightness, contrast, saturation (factors in 1 +- x), hue (of the circle), in any order.
        "JITTER": [0.4, 0.4, 0.4, 0.1],
        "JITTER_PROBABILITY": 0.8,
        "GREY_PROBABILITY": 0.2,
        "BLUR_SIGMA": [0.1, 2.0],  # of a Gaussian, in pixels, [min, max]
        "BLUR_PROBABILITY": 0.5,
    },
    "INPUT.CLASSIFY": {  # size, random part, flip and memory are those of INPUT.PRETRAIN
        # RandAugment as [magnitude, standard deviation of the magnitude], such as [9, 0.5]: a whole
        # number from 0 to 10, and from 0. Empty: none.
        "RAND_AUGMENT": [],
        "RANDOM_ERASING": 0.0,  # probability that a rectangle becomes noise
        # In inference, the side of the square that is cut out of the middle, as a share of the
        # image's shorter side.
        "TEST_CROP": 0.875,
    },
    "INPUT.FIXED_VIEWS": {
        # Augmented views of each training image, drawn once; each visit shows one of them. 0: every
        # visit is augmented anew.
        "COUNT": 0,
        "SEED": 0,  # of the views alone, so that runs of another SEED see them, and share a cache
    },
    "SOLVER": {
        "OPTIMIZER": "SGD",  # "SGD" or "ADAMW"
        "BETAS": (0.9, 0.999),  # of AdamW
        "BACKBONE_MULTIPLIER": 1.0,  # learning rate of the backbone relative to the rest
        # Of a Mobile-Former's tokens and of what computes them (tokens, mobile_to_former, former).
        "TOKEN_MULTIPLIER": 1.0,
        # Every SOLVER.LOG_PERIOD, log how alike these tokens are over images, and over tokens of an
        # image, for each block. Not with SOLVER.COMPILE.
        "LOG_TOKENS": True,
        # Factor on the learning rate from the head to the backbone's last layer, and from each
        # layer of the backbone to the one before it.
        "LAYER_DECAY": 1.0,
        # SOLVER.IMS_PER_BATCH is the batch of one optimizer step, over all processes. Each process
        # works through its share in this many parts, one after another, to save memory.
        "ACCUMULATE": 1,
        # Schedules in epochs. Where one is not 0 (or not empty), the key in iterations is worked
        # out from it and the number of training images: MAX_ITER, STEPS, WARMUP_ITERS,
        # CHECKPOINT_PERIOD.
        "EPOCHS": 0.0,
        "STEP_EPOCHS": [],
        "WARMUP_EPOCHS": 0.0,
        "CHECKPOINT_EPOCHS": 0.0,
        # Images per step that SOLVER.BASE_LR is meant for; 0 takes SOLVER.BASE_LR as it is.
        "REFERENCE_BATCH_SIZE": 0,
        "LR_SCALING": "linear",  # with the batch, as for SGD; or "sqrt", as for AdamW
        "CHECKPOINTS_KEPT": 3,  # newest ones; the best and the last are kept besides. 0: all
        # Where each checkpoint is sent while training goes on, such as s3://bucket/run. At the
        # start the last one comes from there to OUTPUT_DIR.
        "CHECKPOINT_URL": "",
        "LOG_PERIOD": 20,  # iterations between two lines of the log
        "WANDB_PROJECT": "",  # logs to Weights & Biases too, with the extra "wandb"
        # Compile the blocks of backbone, decoder and head for training. The first steps take
        # minutes.
        "COMPILE": False,
        # On the CPU, keep the memory that a step frees for the next one, where else the kernel
        # fills it with zeros page by page. It holds for the whole process. Only with glibc.
        "KEEP_MEMORY": True,
    },
    "SOLVER.AMP": {"PRECISION": "float16"},  # or "bfloat16", with SOLVER.AMP.ENABLED
    "SOLVER.EMA": {  # a moving average of weights and buffers, which is evaluated and exported
        "ENABLED": False,
        "DECAY": 0.9998,
        "WARMUP": True,  # averages over fewer steps at the start
    },
    "TEST": {
        "EVAL_EPOCHS": 0.0,  # where not 0, TEST.EVAL_PERIOD is worked out from it
        # "task/metric" of the evaluation that decides which checkpoint is the best: the highest, or
        # of metrics whose name begins with "loss" the lowest.
        "BEST_METRIC": "bbox/AP",
        # "auto": faster-coco-eval where it is installed, else pycocotools; or one of the two names.
        "COCO_EVAL_LIBRARY": "auto",
    },
    "TEST.KNN": {  # the nearest-neighbour score, which needs no training
        # Names of labelled image sets, such as "imagenet_train": whose images vote, and whose are
        # classified. Empty: no score.
        "TRAIN": (),
        "VAL": (),
        "K": 20,  # neighbours that vote
        "TEMPERATURE": 0.07,  # a vote weighs exp(cosine similarity / temperature)
    },
    "VIS": {  # figures in OUTPUT_DIR/visualizations and TensorBoard, where the model has any
        "ENABLED": True,  # a score that TEST.KNN asks for is made in any case
        # Iterations; 0 for twenty times a run. Before the first step and after the last in any
        # case.
        "PERIOD": 0,
        "EPOCHS": 0.0,  # where not 0, VIS.PERIOD is worked out from it
        # Share of the run's time that each figure may take; those beyond it are left out.
        "SHARE": 0.01,
        # Images that are reconstructed: spread evenly over DATASETS.TEST, or over DATASETS.TRAIN
        # where there is no test set.
        "NUM_IMAGES": 8,
    },
}


def get_cfg() -> CfgNode:
    """Returns a copy of Detectron2's default config with this package's keys added."""
    cfg = get_detectron2_cfg()
    add_qbheat_config(cfg)
    return cfg


def add_qbheat_config(cfg: CfgNode) -> None:
    """Adds the keys of ``qbheat_det`` to a Detectron2 config, in place."""
    for path, keys in _KEYS.items():
        node = cfg
        for name in path.split("."):
            node = node.setdefault(name, CfgNode())
        node.update(copy.deepcopy(keys))
