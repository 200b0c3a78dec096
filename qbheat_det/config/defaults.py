# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config key that this package adds to Detectron2's, with its default and a comment."""

import copy
from typing import Any

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

_KEYS: dict[str, dict[str, Any]] = {
    "MODEL": {
        # What the model predicts. Training sets these from the data.
        "CLASS_NAMES": [],  # contiguous order
        "CATEGORY_IDS": [],  # ids in the annotation file, same order
        # Store only the inputs of each block for the backward pass: less memory, longer steps,
        # equal gradients.
        "ACTIVATION_CHECKPOINTING": False,
        # Memory format of feature maps in training. None: channels-last on CPUs only.
        "CHANNELS_LAST": None,
    },
    # Deployment in qbheat predict and qbheat evaluate, see docs/export.md. Detectron2's own
    # programs do not read these keys: call qbheat_det.deploy(model) there.
    "MODEL.DEPLOY": {
        # Convert the loaded model to its fastest equivalent form on the device.
        "ENABLED": False,
        "PRECISION": "float32",  # or "bfloat16", if the device is fast: AP changes by some tenths
        # "auto" compiles for IMAGE_SIZES (on GPUs for all sizes if it is empty); or "off".
        "COMPILE": "auto",
        "IMAGE_SIZES": [],  # [[height, width], …] in pixels, after resizing
        "KEEP_MEMORY": True,  # as SOLVER.KEEP_MEMORY, for the next image
    },
    "MODEL.MOBILE_FORMER": {
        "VARIANT": "285M",  # "285M", "1.0G", "3.7G", or "custom": the keys below
        # Of "s2", "s4", "s8", "s16", "s16_expanded" and "tokens".
        "OUT_FEATURES": ["s8", "s16_expanded"],
        "NORM": "BN",  # any name of detectron2.layers.get_norm
        "DROP_PATH": 0.0,  # rate at the last block; it rises linearly from zero
        "NUM_TOKENS": 6,
        "TOKEN_DIM": 192,
        "STEM_CHANNELS": 16,
        # One row per block: [kind, hidden width, output width, second hidden width]. Kinds are
        # "lite", "down" (starts a stage) and "plain". Only "down" has a second hidden width.
        "BLOCKS": [["lite", 32, 16, 0]],
        "EXPANDED_CHANNELS": 720,  # width of "s16_expanded"
    },
    "MODEL.FPN": {
        # Any registered backbone, or timm's such as "timm:resnet18", for build_fpn_backbone.
        # MODEL.FPN.IN_FEATURES replaces the OUT_FEATURES of that backbone.
        "BOTTOM_UP": "MobileFormer",
        # Strided levels above the coarsest map: with three, "s8" and "s16" become P3 to P7.
        "TOP_LEVELS": 3,
    },
    "MODEL.TIMM": {
        # For MODEL.BACKBONE.NAME "TimmBackbone"; "timm:resnet18" there sets both.
        "NAME": "resnet18",
        "OUT_FEATURES": ["s8", "s16"],  # maps by stride
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
        "DEEP_SUPERVISION": True,  # losses on the predictions of every block
        "CLASS_WEIGHT": 1.0,
        "L1_WEIGHT": 5.0,
        "GIOU_WEIGHT": 2.0,
        "NO_OBJECT_WEIGHT": 0.1,
        "CLASSIFICATION": "softmax",  # as in DETR; or "focal", a sigmoid for each class
    },
    "MODEL.MF_DETR.FOCAL": {  # of "focal"
        "GAMMA": 2.0,  # exponent of the distance between target and prediction
        "ALPHA": 0.25,  # weight of the class that is there; 1 - ALPHA of those that are not
        # Target score of a matched query: 1 at 0.0, the IoU of its box at 1.0, or in between.
        "IOU_TARGET": 1.0,
        "PRIOR": 0.01,  # initial probability of each class
    },
    "MODEL.MF_DETR.DENOISING": {
        "GROUPS": 0,  # noised copies of each ground-truth box as queries in training
        # Maximum shift of a corner, relative to half the side of the box; once to twice this for
        # negatives.
        "BOX_NOISE": 0.4,
        "LABEL_NOISE": 0.25,  # probability of a random label
        "NEGATIVES": True,  # add a copy with more noise, whose target is no object
        "MAX_QUERIES": 200,  # per image; with many boxes there are fewer groups
        "WEIGHT": 1.0,  # of its losses, relative to the main ones
    },
    "MODEL.MF_DETR.QUERY_GROUPS": {
        # Sets of object queries, each matched one-to-one; only the first is used in inference.
        "COUNT": 1,
        "WEIGHT": 1.0,  # of the losses of each further set, relative to the main ones
    },
    "MODEL.MF_DETR.QUERY_SELECTION": {
        # Start object queries from the highest scores of a dense head, whose boxes and classes the
        # decoder refines; otherwise queries are learned and equal for all images.
        "ENABLED": False,
        "POSITIONS_PER_BOX": 6,  # positive positions of each box in training the dense head
        "WEIGHT": 1.0,  # of the dense head's losses, relative to the main ones
    },
    "MODEL.FCOS": {  # Detectron2's FCOS has no keys; the names are those of MODEL.RETINANET
        "NUM_CLASSES": 80,
        "IN_FEATURES": ["p3", "p4", "p5", "p6", "p7"],
        "NUM_CONVS": 4,  # of each of the head's two towers
        "NORM": "GN",  # of the towers; "GN" has 32 groups
        "PRIOR_PROB": 0.01,  # initial probability of each class
        # Half the side of the square of positive positions around the centre of a box, in strides.
        "CENTER_SAMPLING_RADIUS": 1.5,
        "FOCAL_LOSS_ALPHA": 0.25,
        "FOCAL_LOSS_GAMMA": 2.0,
        "SCORE_THRESH_TEST": 0.2,  # of sqrt(class score x centerness)
        "TOPK_CANDIDATES_TEST": 1000,
        "NMS_THRESH_TEST": 0.6,
    },
    "MODEL.QB_HEAT": {
        # Backbone output to predict. A quarter of INPUT.PRETRAIN.SIZE must be a multiple of its
        # stride s; a position reconstructs s x s pixels.
        "IN_FEATURE": "s16_expanded",
        # Position of the visible quarter: "corner", "centre", or "both" (half a batch each);
        # FeatureDistillation also accepts "whole".
        "VISIBLE": "both",
        # Linear models of each scale: 8, 4 (A1, A2, B1, B2) or 2 (A1, B1).
        "NUM_MODELS": 8,
        "FEATURE_DIM": 512,  # channels of the predicted features
        "DECODER_DEPTH": 6,  # transformer blocks
        "DECODER_DIM": 512,
        "DECODER_HEADS": 16,
        "DECODER_MLP_RATIO": 4.0,  # hidden width of the feed-forward networks
        "LOSS_ON": "masked",  # positions with a loss: "masked" or "all"
        # Normalize each target patch to mean 0 and variance 1.
        "NORM_PIXEL_LOSS": True,
    },
    "MODEL.TEACHER": {  # frozen network whose features FeatureDistillation predicts
        "NAME": "tf_efficientnet_lite0",  # of timm's
        "WEIGHTS": "qbheat://timm/tf_efficientnet_lite0",  # as MODEL.WEIGHTS
        "IN_FEATURE": "s32",  # map that MODEL.QB_HEAT.IN_FEATURE predicts
        # More pairs of an encoder's and a teacher's map, such as [["s8", "s16"]]. The encoder's map
        # must be in MODEL.MOBILE_FORMER.OUT_FEATURES.
        "FINER": [],
        # Side of the teacher's images in pixels; its map must be as large as the encoder's.
        "IMAGE_SIZE": 256,
        "PIXEL_MEAN": [127.0, 127.0, 127.0],  # unless the file of WEIGHTS has them
        "PIXEL_STD": [128.0, 128.0, 128.0],
    },
    "MODEL.RANDOM_MASKING": {  # map, projection, decoder and target are set by MODEL.QB_HEAT
        "MASK_RATIO": 0.75,  # share of the map's positions with masked pixels
    },
    "MODEL.WASSERSTEIN": {  # Wasserstein dependency between two areas of an image
        # Backbone output to pool. Half of INPUT.PRETRAIN.SIZE must be a multiple of its stride.
        "IN_FEATURE": "s16_expanded",
        # "dual": the distance itself. "contrastive": identify the partner of an area among others.
        "FORM": "contrastive",
        "HIDDEN_DIM": 2048,  # of the head between encoder and critic
        "DIM": 128,  # of the head's outputs, between which distances are measured
        # Length R of the head's outputs. In the contrastive form, a bilinear critic with slope 1 at
        # pairs returns R / sqrt(2) times their cosine: 10 is like a temperature of 0.14. In the
        # dual form the estimate is a multiple of R.
        "RADIUS": 10.0,
        "CRITIC_DIM": 256,  # width of the critic's two hidden layers
        "PENALTY_WEIGHT": 10.0,  # of the squared excess of the critic's slope over 1
    },
    "MODEL.MOCO": {
        "IN_FEATURE": "s16_expanded",  # backbone output that is pooled
        "HIDDEN_DIM": 2048,  # of the head, a perceptron with two layers
        "DIM": 128,  # of queries and keys
        "TEMPERATURE": 0.2,
        "MOMENTUM": 0.999,  # of the key encoder
        # Keys of earlier steps; a multiple of SOLVER.IMS_PER_BATCH, and at most a quarter of the
        # training images: otherwise over 3 % of the queries find a key of their own image.
        "QUEUE_SIZE": 65536,
        # Parts of a micro-batch with separate BatchNorm statistics. With one process, 1 lets
        # queries and keys share their statistics.
        "NORM_GROUPS": 1,
    },
    "MODEL.CLASSIFIER": {
        "NUM_CLASSES": 1000,
        # Map to classify; the first token is used as well if the backbone has "tokens".
        "IN_FEATURE": "s16_expanded",
        "DECODER": "linear",  # "linear", or "transformer": "tran-k" of the paper
        # BatchNorm without scale and offset before the linear decoder, as in linear probing.
        "NORMALIZE": False,
        # Of the transformer decoder, a multiple of 64. Paper: 192, 384, 768 for 285M, 1.0G, 3.7G.
        "WIDTH": 192,
        "DEPTH": 1,  # blocks: k of "tran-k"
        "DROPOUT": 0.0,  # rate inside the blocks
        "LABEL_SMOOTHING": 0.0,
        # Alphas of the beta distributions of shares; 0 disables. With both, each batch is mixed in
        # one of the two ways at random.
        "MIXUP": 0.0,
        "CUTMIX": 0.0,
    },
    "MODEL.SEMI": {  # training on DATASETS.UNLABELLED; the teacher is the average of SOLVER.EMA
        "BURN_IN": 0.25,  # share of the run at the start that uses labels only
        "RATIO": 1,  # unlabelled images per labelled image of a step
        "WEIGHT": 1.0,  # of the losses on unlabelled images
        "TOP_SHARE": 0.01,  # of the locations with a loss, by the teacher's score
        # Strong view of cached features: shares of the channels and of the area set to zero. The
        # strong view of images has the colours and blurs of INPUT.TWO_VIEWS, and erased parts.
        "DROP_CHANNELS": 0.2,
        "ERASE": 0.2,
    },
    "MODEL.CACHE_FEATURES": {
        # Encode every view once before training, and train the head from the features on the disk.
        # The whole backbone must be frozen.
        "ENABLED": False,
        "DTYPE": "float16",  # "float16", "bfloat16" or "float32"
        "FOLDER": "",  # of all caches; empty: "feature_cache" in the package's cache directory
    },
    "DATASETS": {
        "UNLABELLED": (),  # images without labels for RetinaNet and FCOS, see MODEL.SEMI
        # Check the header and the end of every image file before training.
        "CHECK_IMAGES": True,
        # Share of the images of --data that is held out if no evaluation set is named. It is
        # stratified by class, depends on SEED, and is listed in OUTPUT_DIR/split.json. 0 disables.
        "VAL_FRACTION": 0.2,
    },
    "DATALOADER": {
        # Shards whose images are shuffled together; 0 shuffles all images, as in folders.
        "SHUFFLE_SHARDS": 32,
        # Remote shards: disk space for their copies (1e9 bytes), and how long requests are retried.
        "CACHE_GB": 20.0,
        "RETRY_SECONDS": 300.0,
    },
    "INPUT": {
        # "default": Detectron2's DatasetMapper. "detr": flips, scales and crops as in DETR.
        # "pretrain": random crop without annotations. "classify": further augmented, with the label
        # of the class folder. "two_views": two augmented crops.
        "DATASET_MAPPER_NAME": "default",
        # Crop of "detr" with probability 1/2: resize the shorter side to one of these lengths, then
        # crop height and width uniform in [min, max], in pixels. Empty: no crop.
        "DETR_CROP_RESIZE": [400, 500, 600],
        "DETR_CROP_RANGE": [384, 600],
    },
    "INPUT.PRETRAIN": {  # the mapper also reads INPUT.FORMAT and INPUT.RANDOM_FLIP
        "SIZE": 256,  # side of the model's square input, in pixels
        # RandomResizedCrop: share of the image's area, and aspect ratio, each [min, max].
        "SCALE": [0.2, 1.0],
        "RATIO": [3 / 4, 4 / 3],
        # A training set that fits decoded into this memory of a machine (1e9 bytes) is decoded once
        # at the start. 0 disables; fixed views (INPUT.FIXED_VIEWS) always read files.
        "MEMORY_GB": 4.0,
    },
    "INPUT.TWO_VIEWS": {  # of MoCo; crop and size are set by INPUT.PRETRAIN
        # Brightness, contrast, saturation (factors in 1 +- x), hue (of the circle), in any order.
        "JITTER": [0.4, 0.4, 0.4, 0.1],
        "JITTER_PROBABILITY": 0.8,
        "GREY_PROBABILITY": 0.2,
        "BLUR_SIGMA": [0.1, 2.0],  # of a Gaussian, in pixels, [min, max]
        "BLUR_PROBABILITY": 0.5,
    },
    "INPUT.CLASSIFY": {  # size, crop, flip and memory are set by INPUT.PRETRAIN
        # RandAugment: magnitude (0 to 10) and its standard deviation, as [9, 0.5]. Empty: none.
        "RAND_AUGMENT": [],
        "RANDOM_ERASING": 0.0,  # probability that a rectangle becomes noise
        # Side of the centre crop in inference, as a share of the shorter side.
        "TEST_CROP": 0.875,
    },
    "INPUT.FIXED_VIEWS": {
        # Augmented views of each training image, drawn once. 0: a new augmentation each time.
        "COUNT": 0,
        "SEED": 0,  # of the views, so that runs with another SEED share a cache
    },
    "SOLVER": {
        "OPTIMIZER": "SGD",  # "SGD" or "ADAMW"
        "BETAS": (0.9, 0.999),  # of AdamW
        "BACKBONE_MULTIPLIER": 1.0,  # learning rate of the backbone relative to the rest
        # Of the token path of a Mobile-Former (tokens, mobile_to_former, former).
        "TOKEN_MULTIPLIER": 1.0,
        # Log the similarity of these tokens over images, and within an image, for each block every
        # SOLVER.LOG_PERIOD. Not with SOLVER.COMPILE.
        "LOG_TOKENS": True,
        # Layer-wise decay of the learning rate, from the head down through the backbone.
        "LAYER_DECAY": 1.0,
        # Micro-batches per step and process, to save memory. SOLVER.IMS_PER_BATCH counts the images
        # of an optimizer step over all of them.
        "ACCUMULATE": 1,
        # Schedules in epochs. If not 0 or empty, they determine MAX_ITER, STEPS, WARMUP_ITERS and
        # CHECKPOINT_PERIOD.
        "EPOCHS": 0.0,
        "STEP_EPOCHS": [],
        "WARMUP_EPOCHS": 0.0,
        "CHECKPOINT_EPOCHS": 0.0,
        # Images per step that SOLVER.BASE_LR is meant for; 0 does not scale it.
        "REFERENCE_BATCH_SIZE": 0,
        "LR_SCALING": "linear",  # with the batch, as for SGD; or "sqrt", as for AdamW
        "CHECKPOINTS_KEPT": 3,  # newest ones, besides the best and the last; 0: all
        # Address to which each checkpoint is copied, such as s3://bucket/run. A start fetches the
        # last one to OUTPUT_DIR.
        "CHECKPOINT_URL": "",
        "LOG_PERIOD": 20,  # iterations between two lines of the log
        "WANDB_PROJECT": "",  # logs to Weights & Biases too, with the extra "wandb"
        # Compile the blocks of backbone, decoder and head; the first steps take minutes.
        "COMPILE": False,
        # On CPUs with glibc, keep freed memory for the next step. Applies to the whole process.
        "KEEP_MEMORY": True,
    },
    "SOLVER.AMP": {"PRECISION": "float16"},  # or "bfloat16", with SOLVER.AMP.ENABLED
    "SOLVER.EMA": {  # moving average of weights and buffers, which is evaluated and exported
        "ENABLED": False,
        "DECAY": 0.9998,
        "WARMUP": True,  # averages over fewer steps at the start
    },
    "TEST": {
        "EVAL_EPOCHS": 0.0,  # if not 0, determines TEST.EVAL_PERIOD
        # "task/metric" that selects the best weights. Higher is better, unless the metric's name
        # begins with "loss".
        "BEST_METRIC": "bbox/AP",
        # "auto": faster-coco-eval where it is installed, else pycocotools; or one of the two names.
        "COCO_EVAL_LIBRARY": "auto",
    },
    "TEST.KNN": {  # nearest-neighbour score, which needs no training
        # Labelled image sets, such as "imagenet_train", that vote and that are classified. Empty:
        # no score.
        "TRAIN": (),
        "VAL": (),
        "K": 20,  # neighbours that vote
        "TEMPERATURE": 0.07,  # the weight of a vote is exp(cosine similarity / temperature)
    },
    "VIS": {  # figures of pre-training in OUTPUT_DIR/visualizations and TensorBoard
        "ENABLED": True,  # does not affect TEST.KNN
        # Iterations between drawings, besides the first and last ones; 0 for a twentieth of a run.
        "PERIOD": 0,
        "EPOCHS": 0.0,  # if not 0, determines VIS.PERIOD
        "SHARE": 0.01,  # maximum part of the run's time for each figure
        # Reconstructed images, spread evenly over DATASETS.TEST, or DATASETS.TRAIN without it.
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
