# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config key that this package adds to Detectron2's, with its default and a comment."""

import copy
from typing import Any

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

NETWORK_KEYS = (
    "MODEL.META_ARCHITECTURE",
    "MODEL.BACKBONE.NAME",
    "MODEL.MOBILE_FORMER.VARIANT",
    "MODEL.FPN.BOTTOM_UP",
    "MODEL.FPN.OUT_CHANNELS",
)
"""Keys of the network. The weights of one config do not fit another config with other values."""

REMOVED_KEYS: dict[str, object] = {
    "MODEL.FPN.SEPARABLE": False,
    "MODEL.RETINANET.SEPARABLE_HEAD.ENABLED": False,
    "MODEL.RETINANET.SEPARABLE_HEAD.KERNEL_SIZE": 5,
    "MODEL.RETINANET.SEPARABLE_HEAD.SHARES_TOWER": True,
    "MODEL.TIMM.NUM_BLOCKS": [],
}
"""Keys of earlier versions with their defaults. Files that were trained before may have these."""

_KEYS: dict[str, dict[str, Any]] = {
    "MODEL": {
        # The classes that the model predicts. Training sets both lists from the data.
        "CLASS_NAMES": [],  # contiguous order
        "CATEGORY_IDS": [],  # ids in the annotation file, same order
        # Whether feature maps are channels-last in training. None: on CPUs only.
        "CHANNELS_LAST": None,
    },
    # Deployment in qbheat predict and qbheat evaluate, see docs/export.md. Detectron2's own
    # programs do not read these keys: call qbheat_det.deploy(model) there.
    "MODEL.DEPLOY": {
        # Convert the loaded model to the fastest equivalent form on the device.
        "ENABLED": False,
        "PRECISION": "float32",  # or "bfloat16", which can be faster and changes AP by a few tenths
        "KEEP_MEMORY": True,  # like SOLVER.KEEP_MEMORY, for the next image
    },
    "MODEL.MOBILE_FORMER": {
        # "285M", "1.0G" or "3.7G" of the QB-Heat paper; "508M", "294M", "214M", "151M", "96M",
        # "52M" or "26M" of the Mobile-Former paper; or "custom", which reads the keys from
        # NUM_TOKENS on.
        "VARIANT": "285M",
        # Any of "s2", "s4", "s8", "s16", "s16_expanded" and "tokens". The variants "508M" to "26M"
        # end at stride 32: they have "s32", and "s32_expanded" instead of "s16_expanded".
        "OUT_FEATURES": ["s8", "s16_expanded"],
        "NORM": "BN",  # any name that detectron2.layers.get_norm accepts
        "DROP_PATH": 0.0,  # stochastic depth rate of the last block; rates rise linearly from zero
        "NUM_TOKENS": 6,
        "TOKEN_DIM": 192,
        "STEM_CHANNELS": 16,
        # One row per block: [kind, hidden width, output width, second hidden width]. Kinds are
        # "plain", "down" (starts a stage), and without tokens "lite" and "lite_down" (starts a
        # stage). Only "down" has a second hidden width.
        "BLOCKS": [["lite", 32, 16, 0]],
        "EXPANDED_CHANNELS": 720,  # width of the output whose name ends in "_expanded"
    },
    "MODEL.FPN": {
        # Any registered backbone, or a timm model such as "timm:resnet18", for build_fpn_backbone.
        # MODEL.FPN.IN_FEATURES replaces the OUT_FEATURES of that backbone.
        "BOTTOM_UP": "MobileFormer",
        # Number of strided levels above the coarsest map: with 3, "s8" and "s16" give P3 to P7.
        # Levels that no head reads are left out.
        "TOP_LEVELS": 3,
    },
    "MODEL.TIMM": {
        "OUT_FEATURES": ["s8", "s16"],  # feature maps of "timm:…", named by stride
        # All BatchNorms keep their statistics, weights and biases, as Detectron2's "FrozenBN".
        "FREEZE_NORMS": False,
    },
    "MODEL.MF_DETR": {
        "NUM_CLASSES": 80,
        # Backbone outputs at strides 8, 16 and optionally 32, in this order.
        "IN_FEATURES": ["s8", "s16_expanded"],
        "NUM_BLOCKS": [5, 2, 2],  # number of blocks at strides 32, 16, 8: MF-Dec-522
        "HIDDEN_DIM": 256,
        "NUM_OBJECT_QUERIES": 100,
        "NHEADS": 8,
        "DIM_FEEDFORWARD": 1024,
        "EXPANSION": 6,  # expansion of the lite bottleneck in M-F- blocks
        "DROPOUT": 0.1,
        "NORM": "BN",  # norm of down- and up-convolutions; "SyncBN" for tiny batches
        "CLASS_WEIGHT": 1.0,
        "L1_WEIGHT": 5.0,
        "GIOU_WEIGHT": 2.0,
        "NO_OBJECT_WEIGHT": 0.1,
        "CLASSIFICATION": "softmax",  # as in DETR; or "focal", a sigmoid for each class
    },
    "MODEL.MF_DETR.FOCAL": {  # for CLASSIFICATION "focal"
        "GAMMA": 2.0,  # exponent of the distance between target and prediction
        "ALPHA": 0.25,  # weight of the true class; all other classes have weight 1 - ALPHA
        # Target score of a matched query: between 1 (at 0.0) and the IoU of its box (at 1.0).
        "IOU_TARGET": 1.0,
        "PRIOR": 0.01,  # initial probability of each class
    },
    "MODEL.MF_DETR.QUERY_SELECTION": {
        # Initialize object queries from the best predictions of a dense head, which the decoder
        # refines. If False, queries are learned parameters, the same for all images.
        "ENABLED": False,
    },
    "MODEL.RETINANET.ATSS": {
        # Assign anchors by ATSS, train scores on the IoU of the predicted boxes, and boxes with the
        # GIoU loss. If False: Detectron2's MODEL.RETINANET.IOU_THRESHOLDS and losses.
        "ENABLED": False,
        "TOP_K": 9,  # candidates per box and level
        "GIOU_WEIGHT": 2.0,  # weight of the GIoU loss
    },
    "MODEL.FCOS": {  # Detectron2 has no FCOS keys; names are as in MODEL.RETINANET
        "NUM_CLASSES": 80,
        "IN_FEATURES": ["p3", "p4", "p5", "p6", "p7"],
        "NUM_CONVS": 4,  # convolutions in each of the head's two towers
        "NORM": "GN",  # norm in the towers; "GN" has 32 groups
        "PRIOR_PROB": 0.01,  # initial probability of each class
        # Positive positions are in a square around the center of a box; half its side, in strides.
        "CENTER_SAMPLING_RADIUS": 1.5,
        "FOCAL_LOSS_ALPHA": 0.25,
        "FOCAL_LOSS_GAMMA": 2.0,
        "SCORE_THRESH_TEST": 0.2,  # threshold of sqrt(class score x centerness)
        "TOPK_CANDIDATES_TEST": 1000,
        "NMS_THRESH_TEST": 0.6,
    },
    "MODEL.QB_HEAT": {
        # Backbone output to predict. A quarter of INPUT.PRETRAIN.SIZE must be a multiple of its
        # stride s. Each position of the map reconstructs s x s pixels.
        "IN_FEATURE": "s16_expanded",
        # Position of the visible quarter: "corner", "centre", or "both" (half of the batch each).
        # FeatureDistillation also accepts "whole".
        "VISIBLE": "both",
        # Number of linear models for each scale: 8, 4 (A1, A2, B1, B2) or 2 (A1, B1).
        "NUM_MODELS": 8,
        "FEATURE_DIM": 512,  # channels of the predicted features
        "DECODER_DEPTH": 6,  # transformer blocks
        "DECODER_DIM": 512,
        "DECODER_HEADS": 16,
        # Normalize each target patch to mean 0 and variance 1.
        "NORM_PIXEL_LOSS": True,
    },
    "MODEL.TEACHER": {  # frozen network whose features FeatureDistillation predicts
        "NAME": "tf_efficientnet_lite0",  # name of a timm model
        "WEIGHTS": "qbheat://timm/tf_efficientnet_lite0",  # same values as MODEL.WEIGHTS
        "IN_FEATURE": "s32",  # teacher's feature map, which MODEL.QB_HEAT.IN_FEATURE predicts
        # Side of the teacher's images in pixels. Its map must be as large as the encoder's map.
        "IMAGE_SIZE": 256,
        "PIXEL_MEAN": [127.0, 127.0, 127.0],  # used if the file of WEIGHTS has no pixel statistics
        "PIXEL_STD": [128.0, 128.0, 128.0],
    },
    "MODEL.RANDOM_MASKING": {  # MODEL.QB_HEAT sets map, projection, decoder and target
        "MASK_RATIO": 0.75,  # share of the feature map's positions whose pixels are masked
    },
    "MODEL.WASSERSTEIN": {  # Wasserstein dependency between two areas of an image
        # Backbone output to pool. Half of INPUT.PRETRAIN.SIZE must be a multiple of its stride.
        "IN_FEATURE": "s16_expanded",
        # "dual": the distance itself. "contrastive": find the other area of an image among many.
        "FORM": "contrastive",
        "HIDDEN_DIM": 2048,  # hidden width of the head between encoder and critic
        "DIM": 128,  # dimension of the head's outputs, between which distances are measured
        # Norm R of the head's outputs. In the contrastive form, a bilinear critic with slope 1 at
        # pairs returns R / sqrt(2) times their cosine, so 10 corresponds to a temperature of 0.14.
        # In the dual form, the estimate is proportional to R.
        "RADIUS": 10.0,
        "CRITIC_DIM": 256,  # width of the critic's two hidden layers
        "PENALTY_WEIGHT": 10.0,  # weight of the squared excess of the critic's slope over 1
    },
    "MODEL.MOCO": {
        "IN_FEATURE": "s16_expanded",  # backbone output that is pooled
        "HIDDEN_DIM": 2048,  # hidden width of the head, an MLP with two layers
        "DIM": 128,  # dimension of queries and keys
        "TEMPERATURE": 0.2,
        "MOMENTUM": 0.999,  # momentum of the key encoder
        # Number of keys of earlier steps, a multiple of SOLVER.IMS_PER_BATCH. With more than a
        # quarter of the training images, over 3 % of the queries find a key of their own image.
        "QUEUE_SIZE": 65536,
        # Number of parts of a micro-batch with separate BatchNorm statistics. With one process and
        # one part, queries and keys are normalized with statistics of the same images.
        "NORM_GROUPS": 1,
    },
    "MODEL.CLASSIFIER": {
        "NUM_CLASSES": 1000,
        # Feature map to classify. The first token is used too if the backbone outputs "tokens".
        "IN_FEATURE": "s16_expanded",
        "DECODER": "linear",  # "linear", or "transformer" for the paper's "tran-k"
        # BatchNorm without scale and offset before the linear decoder, as in linear probing.
        "NORMALIZE": False,
        # Width of the transformer, a multiple of 64 (paper: 192, 384, 768 for 285M, 1.0G, 3.7G).
        "WIDTH": 192,
        "DEPTH": 1,  # number of blocks, the k of "tran-k"
        "DROPOUT": 0.0,  # rate inside the blocks
        "LABEL_SMOOTHING": 0.0,
        # Alphas of the beta distributions of mixing ratios; 0 disables. If both are set, one of the
        # two is chosen at random for each batch.
        "MIXUP": 0.0,
        "CUTMIX": 0.0,
    },
    "MODEL.SEMI": {  # training on DATASETS.UNLABELLED; the mean teacher is SOLVER.EMA
        "BURN_IN": 0.25,  # share of the run, at its start, that uses only labelled images
        "RATIO": 1,  # unlabelled images per labelled image of a step
        "WEIGHT": 1.0,  # weight of the losses on unlabelled images
        # Number of locations that learn from the mean teacher (those with its highest scores),
        # divided by the number of locations that belong to objects in the labelled images.
        "TOP_RATIO": 2.0,
    },
    "MODEL.KEEP_CLASSES": {  # of the detector in MODEL.WEIGHTS, by --keep-classes
        "NUM": 0,  # number of kept classes, which come first; the flag sets it
        "WEIGHT": 1.0,  # weight of the losses towards the old detector's scores and boxes
        # Boxes are learned where the old detector's score is at least this high. For MF-DETR, these
        # boxes become labels.
        "MIN_SCORE": 0.3,
        # Weight of the loss that keeps the feature maps of a trained encoder.
        "FEATURE_WEIGHT": 0.1,
    },
    "MODEL.JOINED": {  # of JoinedDetectors; qbheat join sets both keys
        # The keys of each detector that differ from the rest of the config, as {key: value}.
        "PARTS": [],
        # For each detector, the index of each of its classes in MODEL.CLASS_NAMES. -1: another
        # detector finds this class.
        "CLASS_INDICES": [],
    },
    "MODEL.CACHE_FEATURES": {
        # Encode every view once before training, and train the head on the stored features. The
        # whole backbone must be frozen.
        "ENABLED": False,
        "DTYPE": "float16",  # "float16", "bfloat16" or "float32"
        "FOLDER": "",  # folder of all caches; empty: "feature_cache" in the package's cache folder
    },
    "DATASETS": {
        "UNLABELLED": (),  # sets of images without labels for RetinaNet and FCOS, see MODEL.SEMI
        # Check the header and the end of every image file before training.
        "CHECK_IMAGES": True,
        # Images and boxes of --data with faults are left out. More than this share is an error.
        "MAX_LEFT_OUT": 0.1,
        # Share of the images of --data that is held out if no evaluation set is given; 0 disables.
        # The split is stratified by class, the same for all SEEDs, and is in OUTPUT_DIR/split.json.
        "VAL_FRACTION": 0.2,
    },
    "DATALOADER": {
        # Form batches of augmented images of about the same size: rounded up to multiples of this
        # number of pixels, their sizes are equal. An image that has waited for one epoch joins
        # images of other sizes. Replaces ASPECT_RATIO_GROUPING. 0: off.
        "SIZE_GROUPING": 0,
    },
    "INPUT": {
        # "default": Detectron2's DatasetMapper. "detr": flips, scales and crops as in DETR.
        # "pretrain": random crop without annotations. "classify": the same with INPUT.CLASSIFY and
        # the label of the class folder. "two_views": two augmented crops.
        "DATASET_MAPPER_NAME": "default",
        "TILE": 0,  # side of overlapping tiles in pixels, used in addition to each image; 0: none
        # The crop of "detr" has probability 1/2. It resizes the shorter side to one of these
        # lengths, then crops a height and width drawn from [min, max] pixels. Empty: no crop.
        "DETR_CROP_RESIZE": [400, 500, 600],
        "DETR_CROP_RANGE": [384, 600],
    },
    "INPUT.PRETRAIN": {  # the mapper also reads INPUT.FORMAT and INPUT.RANDOM_FLIP
        "SIZE": 256,  # side of the model's square input, in pixels
        "SCALE": [0.2, 1.0],  # [min, max] of the crop's area, relative to the image
    },
    "INPUT.CLASSIFY": {  # INPUT.PRETRAIN sets size and crop; INPUT.RANDOM_FLIP applies too
        # Magnitude (0 to 10) of RandAugment and its std, such as [9, 0.5]. Empty: no RandAugment.
        "RAND_AUGMENT": [],
        "RANDOM_ERASING": 0.0,  # probability that a rectangle is replaced by noise
        # Side of the center crop in inference, relative to the shorter side.
        "TEST_CROP": 0.875,
    },
    "INPUT.FIXED_VIEWS": {
        # Number of fixed augmented views per training image. 0: a new augmentation each time.
        "COUNT": 0,
        "SEED": 0,  # seed of the views; runs with different SEED share a cache
    },
    "SOLVER": {
        "OPTIMIZER": "SGD",  # "SGD" or "ADAMW"
        "BETAS": (0.9, 0.999),  # betas of AdamW
        "BACKBONE_MULTIPLIER": 1.0,  # learning rate of the backbone relative to the rest
        # Additional factor on the learning rate of Mobile-Former's token path: the tokens and the
        # modules mobile_to_former, former and last_bridge.
        "TOKEN_MULTIPLIER": 1.0,
        # Factor on the learning rate from each layer of the backbone to the layer below; 1.0: none.
        "LAYER_DECAY": 1.0,
        # Config of a first stage, such as a head on cached features of the frozen encoder: a path
        # relative to the file that sets this key, or the name of a shipped config. The stage trains
        # in OUTPUT_DIR/first_stage, and the run starts from its weights. A command skips the stage
        # if its MODEL.WEIGHTS are of a detector, or if it freezes the backbone.
        "FIRST_STAGE": "",
        # Number of micro-batches per step and process, to save memory. SOLVER.IMS_PER_BATCH is the
        # total number of images per optimizer step.
        "ACCUMULATE": 1,
        # On a GPU, detectors find the number of images per step by trial: IMS_PER_BATCH is doubled
        # as often as it fits into the memory, up to this number. Workers are limited by the cores.
        # 0: off.
        "LARGEST_BATCH": 0,
        # Schedules in epochs. If not 0, empty or None, they determine MAX_ITER, STEPS, WARMUP_ITERS
        # and CHECKPOINT_PERIOD.
        "EPOCHS": 0.0,
        # Fewest iterations of EPOCHS. If EPOCHS gives fewer, all numbers of iterations that are
        # computed from epochs grow by the same factor. A command that sets EPOCHS sets MIN_ITER to
        # 0.
        "MIN_ITER": 0,
        "STEP_EPOCHS": [],
        "WARMUP_EPOCHS": None,  # 0: no warm-up. None: SOLVER.WARMUP_ITERS iterations
        "CHECKPOINT_EPOCHS": 0.0,
        # Batch size to which BASE_LR refers. BASE_LR is scaled to the actual batch size. 0: off.
        "REFERENCE_BATCH_SIZE": 0,
        "LR_SCALING": "linear",  # scaling with the batch size; or "sqrt", which suits AdamW
        "CHECKPOINTS_KEPT": 3,  # newest checkpoints to keep besides the best and last; 0: all
        "LOG_PERIOD": 20,  # iterations between two lines of the log
        # On CPUs with glibc, keep freed memory for the next step. Applies to the whole process.
        "KEEP_MEMORY": True,
    },
    "SOLVER.AMP": {"PRECISION": "float16"},  # or "bfloat16", with SOLVER.AMP.ENABLED
    "SOLVER.EMA": {  # moving average of weights and buffers, which is evaluated and exported
        "ENABLED": False,
        "DECAY": 0.9998,  # the average is over fewer steps at the start of training
    },
    "TEST": {
        "EVAL_EPOCHS": 0.0,  # if not 0, determines TEST.EVAL_PERIOD
        # "task/metric" that selects the best weights. Higher is better, unless the metric's name
        # begins with "loss".
        "BEST_METRIC": "bbox/AP",
        # Share of a run's iterations without a better value of BEST_METRIC, after which training
        # ends early; 0: never. The recipes in configs/custom set it, those of the paper do not.
        "PATIENCE": 0.0,
    },
    "TEST.KNN": {  # kNN accuracy of qbheat probe
        "K": 20,  # number of neighbors that vote
        "TEMPERATURE": 0.07,  # the weight of a vote is exp(cosine similarity / temperature)
    },
}


def get_cfg() -> CfgNode:
    """Returns a copy of Detectron2's default config with the keys of this package."""
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
