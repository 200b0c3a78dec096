# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config key that this package adds to Detectron2's, with its default and one comment."""

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg


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

    _add_deploy(cfg)

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
    _add_auxiliary_queries(cfg)
    _add_fcos(cfg)
    _add_pretraining(cfg)
    _add_teacher(cfg)
    _add_random_masking(cfg)
    _add_wasserstein(cfg)
    _add_classifier(cfg)

    # "default" is Detectron2's DatasetMapper, "detr" flips, scales and crops as DETR does,
    # "pretrain" cuts out a random part of an image without annotations, "classify" augments it
    # further, with the label of the image's class folder, "two_views" augments two such parts.
    cfg.INPUT.DATASET_MAPPER_NAME = "default"
    # Crop of the "detr" mapper: with probability 1/2 resize the shorter side to one of these
    # lengths (pixels), then crop height and width uniform in [min, max] (pixels). Empty: no crop.
    cfg.INPUT.DETR_CROP_RESIZE = [400, 500, 600]
    cfg.INPUT.DETR_CROP_RANGE = [384, 600]
    _add_pretraining_data(cfg)
    _add_moco(cfg)
    _add_classify_data(cfg)
    _add_cache(cfg)

    # Read the header and the last bytes of every image file before training.
    cfg.DATASETS.CHECK_IMAGES = True

    _add_solver(cfg)
    _add_step(cfg)

    cfg.TEST.EVAL_EPOCHS = 0.0  # where not 0, TEST.EVAL_PERIOD is worked out from it
    # "task/metric" of the evaluation that decides which checkpoint is the best: the highest, or of
    # metrics whose name begins with "loss" the lowest.
    cfg.TEST.BEST_METRIC = "bbox/AP"
    # "auto": faster-coco-eval where it is installed, else pycocotools; or one of the two names.
    cfg.TEST.COCO_EVAL_LIBRARY = "auto"
    _add_knn(cfg)
    _add_visualization(cfg)


def _add_solver(cfg: CfgNode) -> None:
    cfg.SOLVER.OPTIMIZER = "SGD"  # "SGD" or "ADAMW"
    cfg.SOLVER.BETAS = (0.9, 0.999)  # of AdamW
    cfg.SOLVER.BACKBONE_MULTIPLIER = 1.0  # learning rate of the backbone relative to the rest
    # Of a Mobile-Former's tokens and of what computes them (tokens, mobile_to_former, former).
    cfg.SOLVER.TOKEN_MULTIPLIER = 1.0
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
    # How the logits are read: "softmax" as in DETR; or "focal", a sigmoid for each class.
    cfg.MODEL.MF_DETR.CLASSIFICATION = "softmax"
    cfg.MODEL.MF_DETR.FOCAL = CfgNode()  # of "focal"
    cfg.MODEL.MF_DETR.FOCAL.GAMMA = 2.0  # exponent of the distance between target and prediction
    # Weight of the class that is there; 1 - ALPHA of those that are not.
    cfg.MODEL.MF_DETR.FOCAL.ALPHA = 0.25
    # What a matched query's class is to score: 1 at 0.0, the IoU of its box at 1.0, or between.
    cfg.MODEL.MF_DETR.FOCAL.IOU_TARGET = 1.0
    cfg.MODEL.MF_DETR.FOCAL.PRIOR = 0.01  # probability of each class at first


def _add_deploy(cfg: CfgNode) -> None:
    """How ``tools/predict.py`` and ``tools/train_net.py --eval-only`` deploy; see docs/fast.md.

    Detectron2's own programs do not read these keys: they call ``qbheat_det.deploy(model)``.
    """
    cfg.MODEL.DEPLOY = CfgNode()
    # Bring the model, once its weights are loaded, into its fastest equal form on the device.
    cfg.MODEL.DEPLOY.ENABLED = False
    # "float32", or "bfloat16" for processors and GPUs that multiply it: AP moves by some tenths.
    cfg.MODEL.DEPLOY.PRECISION = "float32"
    # "auto" compiles for IMAGE_SIZES (on GPUs: for all sizes if there are none); or "off".
    cfg.MODEL.DEPLOY.COMPILE = "auto"
    cfg.MODEL.DEPLOY.IMAGE_SIZES = []  # [[height, width], …] in pixels, after resizing
    # On the CPU, keep the memory that an image frees for the next one, where else the kernel fills
    # it with zeros page by page. It holds for the whole process. Only with glibc.
    cfg.MODEL.DEPLOY.KEEP_MEMORY = True


def _add_auxiliary_queries(cfg: CfgNode) -> None:
    """MF-DETR's auxiliary queries in training."""
    cfg.MODEL.MF_DETR.DENOISING = CfgNode()
    # Noised copies of every ground-truth box that are queries in training; 0: none.
    cfg.MODEL.MF_DETR.DENOISING.GROUPS = 0
    # How far a corner may move, relative to half the box's side; of negatives once to twice as far.
    cfg.MODEL.MF_DETR.DENOISING.BOX_NOISE = 0.4
    cfg.MODEL.MF_DETR.DENOISING.LABEL_NOISE = 0.25  # probability that a label is drawn anew
    # Beside each copy one with more noise, which is to be recognised as no object.
    cfg.MODEL.MF_DETR.DENOISING.NEGATIVES = True
    # Most denoising queries of an image: one with many boxes has fewer groups, or not all boxes.
    cfg.MODEL.MF_DETR.DENOISING.MAX_QUERIES = 200
    cfg.MODEL.MF_DETR.DENOISING.WEIGHT = 1.0  # of its losses, relative to the main ones

    cfg.MODEL.MF_DETR.QUERY_GROUPS = CfgNode()
    # Sets of object queries, each matched one-to-one on its own; all but the first help training.
    cfg.MODEL.MF_DETR.QUERY_GROUPS.COUNT = 1
    # Of each further group's losses, relative to the main ones.
    cfg.MODEL.MF_DETR.QUERY_GROUPS.WEIGHT = 1.0


def _add_fcos(cfg: CfgNode) -> None:
    """Detectron2's FCOS, which has no keys there, after those of ``MODEL.RETINANET``."""
    cfg.MODEL.FCOS = CfgNode()
    cfg.MODEL.FCOS.NUM_CLASSES = 80
    cfg.MODEL.FCOS.IN_FEATURES = ["p3", "p4", "p5", "p6", "p7"]
    cfg.MODEL.FCOS.NUM_CONVS = 4  # of each of the head's two towers
    cfg.MODEL.FCOS.NORM = "GN"  # of the towers; "GN" has 32 groups
    cfg.MODEL.FCOS.PRIOR_PROB = 0.01  # probability of each class at first
    # Half the side of the square around a box's centre whose places learn it, in strides.
    cfg.MODEL.FCOS.CENTER_SAMPLING_RADIUS = 1.5
    cfg.MODEL.FCOS.FOCAL_LOSS_ALPHA = 0.25
    cfg.MODEL.FCOS.FOCAL_LOSS_GAMMA = 2.0
    cfg.MODEL.FCOS.SCORE_THRESH_TEST = 0.2  # of the root of class score times centerness
    cfg.MODEL.FCOS.TOPK_CANDIDATES_TEST = 1000
    cfg.MODEL.FCOS.NMS_THRESH_TEST = 0.6


def _add_pretraining(cfg: CfgNode) -> None:
    """Config keys of the pre-training objectives, with their defaults and one comment each."""
    cfg.MODEL.QB_HEAT = CfgNode()
    # Backbone output to predict, of any stride s for which a quarter of INPUT.PRETRAIN.SIZE is a
    # multiple of s; a position reconstructs s x s pixels.
    cfg.MODEL.QB_HEAT.IN_FEATURE = "s16_expanded"
    # Where the visible quarter of the image is: "corner", "centre", or "both", half a batch each;
    # FeatureDistillation also takes "whole".
    cfg.MODEL.QB_HEAT.VISIBLE = "both"
    # Explicit linear models of each scale: 8, 4 (A1, A2, B1, B2) or 2 (A1, B1).
    cfg.MODEL.QB_HEAT.NUM_MODELS = 8
    cfg.MODEL.QB_HEAT.FEATURE_DIM = 512  # channels of what is predicted
    cfg.MODEL.QB_HEAT.DECODER_DEPTH = 6  # transformer blocks
    cfg.MODEL.QB_HEAT.DECODER_DIM = 512
    cfg.MODEL.QB_HEAT.DECODER_HEADS = 16
    cfg.MODEL.QB_HEAT.DECODER_MLP_RATIO = 4.0  # hidden width of the feed-forward networks
    cfg.MODEL.QB_HEAT.LOSS_ON = "masked"  # positions that count: "masked" or "all"
    # Bring each true patch to mean 0 and variance 1 before it is compared.
    cfg.MODEL.QB_HEAT.NORM_PIXEL_LOSS = True


def _add_teacher(cfg: CfgNode) -> None:
    """The frozen network whose features ``FeatureDistillation`` predicts."""
    cfg.MODEL.TEACHER = CfgNode()
    cfg.MODEL.TEACHER.NAME = "tf_efficientnet_lite0"  # of timm's
    cfg.MODEL.TEACHER.WEIGHTS = ""  # as MODEL.WEIGHTS
    cfg.MODEL.TEACHER.IN_FEATURE = "s32"  # map to predict
    # Side of the images that the teacher sees: its map has as many positions as the encoder's.
    cfg.MODEL.TEACHER.IMAGE_SIZE = 256
    cfg.MODEL.TEACHER.PIXEL_MEAN = [127.0, 127.0, 127.0]
    cfg.MODEL.TEACHER.PIXEL_STD = [128.0, 128.0, 128.0]


def _add_random_masking(cfg: CfgNode) -> None:
    """Config keys of scattered masking, with their defaults and one comment each.

    Map, projection, decoder and target are those of ``MODEL.QB_HEAT``.
    """
    cfg.MODEL.RANDOM_MASKING = CfgNode()
    # Share of the positions of the map whose pixels the encoder does not see.
    cfg.MODEL.RANDOM_MASKING.MASK_RATIO = 0.75


def _add_wasserstein(cfg: CfgNode) -> None:
    """Keys of pre-training by the Wasserstein dependency between two areas of an image."""
    cfg.MODEL.WASSERSTEIN = CfgNode()
    # Backbone output that is pooled. Half of INPUT.PRETRAIN.SIZE is a multiple of its stride.
    cfg.MODEL.WASSERSTEIN.IN_FEATURE = "s16_expanded"
    # "dual": the distance itself. "contrastive": telling an area's own partner from the others.
    cfg.MODEL.WASSERSTEIN.FORM = "contrastive"
    cfg.MODEL.WASSERSTEIN.HIDDEN_DIM = 2048  # of the head between encoder and critic
    cfg.MODEL.WASSERSTEIN.DIM = 128  # of what the head gives, between which distances are measured
    # Length of the same, R. In the contrastive form, a bilinear critic with a slope of 1 at pairs
    # gives R / sqrt(2) times their cosine: 10 is like a temperature of 0.14. In the dual form the
    # estimate is a multiple of R.
    cfg.MODEL.WASSERSTEIN.RADIUS = 10.0
    cfg.MODEL.WASSERSTEIN.CRITIC_DIM = 256  # width of the critic's two hidden layers
    # On the squared excess of the critic's slope over 1.
    cfg.MODEL.WASSERSTEIN.PENALTY_WEIGHT = 10.0


def _add_classifier(cfg: CfgNode) -> None:
    """Keys of image classifiers: what reads the backbone's features, and how it is regularised."""
    cfg.MODEL.CLASSIFIER = CfgNode()
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 1000
    # Map that is classified; the first token is read besides, where the backbone gives "tokens".
    cfg.MODEL.CLASSIFIER.IN_FEATURE = "s16_expanded"
    cfg.MODEL.CLASSIFIER.DECODER = "linear"  # "linear", or "transformer": "tran-k" of the paper
    # BatchNorm without scale and offset before the linear decoder, as linear probing has it.
    cfg.MODEL.CLASSIFIER.NORMALIZE = False
    # Of the transformer decoder; the paper has widths of 192, 384 and 768 for 285M, 1.0G and 3.7G.
    cfg.MODEL.CLASSIFIER.WIDTH = 192  # a multiple of 64
    cfg.MODEL.CLASSIFIER.DEPTH = 1  # blocks: k of "tran-k"
    cfg.MODEL.CLASSIFIER.DROPOUT = 0.0  # rate inside the blocks
    cfg.MODEL.CLASSIFIER.LABEL_SMOOTHING = 0.0
    # Alphas of the beta distributions that shares are drawn from; 0 leaves it out. Where both are
    # given, each batch is mixed in one of the two ways, drawn evenly.
    cfg.MODEL.CLASSIFIER.MIXUP = 0.0
    cfg.MODEL.CLASSIFIER.CUTMIX = 0.0


def _add_pretraining_data(cfg: CfgNode) -> None:
    """The mapper "pretrain": how an image is cropped, and whether images stay in memory.

    Of Detectron2's own keys the mapper reads ``INPUT.FORMAT`` and ``INPUT.RANDOM_FLIP``.
    """
    cfg.INPUT.PRETRAIN = CfgNode()
    cfg.INPUT.PRETRAIN.SIZE = 256  # side of the square that the model sees, in pixels
    # RandomResizedCrop: share of the image's area, and width over height, each [min, max].
    cfg.INPUT.PRETRAIN.SCALE = [0.2, 1.0]
    cfg.INPUT.PRETRAIN.RATIO = [3 / 4, 4 / 3]
    # A training set that takes less memory than this when decoded is decoded once, at the start.
    # GB (1e9 bytes) of one machine; 0 reads every image from its file each time, as do fixed views
    # (INPUT.FIXED_VIEWS), which must not depend on what fits into memory.
    cfg.INPUT.PRETRAIN.MEMORY_GB = 4.0


def _add_moco(cfg: CfgNode) -> None:
    """Keys of MoCo-v2 and of its two views, with their defaults and one comment each.

    What is cut out of an image, and how large, is ``INPUT.PRETRAIN``'s, as in all pre-training.
    """
    cfg.MODEL.MOCO = CfgNode()
    cfg.MODEL.MOCO.IN_FEATURE = "s16_expanded"  # backbone output whose mean is compared
    cfg.MODEL.MOCO.HIDDEN_DIM = 2048  # of the head, a perceptron of two layers
    cfg.MODEL.MOCO.DIM = 128  # of what is compared
    cfg.MODEL.MOCO.TEMPERATURE = 0.2
    cfg.MODEL.MOCO.MOMENTUM = 0.999  # what the encoder of keys keeps of itself in each step
    # Keys of earlier steps; a multiple of SOLVER.IMS_PER_BATCH. At most a quarter of the training
    # images: the queue else holds keys of the query's own image for more than 3 % of the queries.
    cfg.MODEL.MOCO.QUEUE_SIZE = 65536
    # Parts of each process's images, or of a micro-batch of them, with BatchNorm statistics of
    # their own. With one process, 1 lets queries and keys share their statistics.
    cfg.MODEL.MOCO.NORM_GROUPS = 1

    cfg.INPUT.TWO_VIEWS = CfgNode()
    # Brightness, contrast, saturation (factors in 1 +- x), hue (of the circle), in any order.
    cfg.INPUT.TWO_VIEWS.JITTER = [0.4, 0.4, 0.4, 0.1]
    cfg.INPUT.TWO_VIEWS.JITTER_PROBABILITY = 0.8
    cfg.INPUT.TWO_VIEWS.GREY_PROBABILITY = 0.2
    cfg.INPUT.TWO_VIEWS.BLUR_SIGMA = [0.1, 2.0]  # of a Gaussian, in pixels, [min, max]
    cfg.INPUT.TWO_VIEWS.BLUR_PROBABILITY = 0.5


def _add_classify_data(cfg: CfgNode) -> None:
    """Keys of the mapper "classify": how images of classes are augmented, and cropped in inference.

    Size, random part, flip and memory are those of ``INPUT.PRETRAIN``, ``INPUT.RANDOM_FLIP`` and
    ``INPUT.FORMAT``, so that a backbone is pre-trained and probed on images cut alike.
    """
    cfg.INPUT.CLASSIFY = CfgNode()
    # RandAugment as [magnitude, standard deviation of the magnitude], such as [9, 0.5]: a whole
    # number from 0 to 10, and from 0. Empty: none.
    cfg.INPUT.CLASSIFY.RAND_AUGMENT = []
    cfg.INPUT.CLASSIFY.RANDOM_ERASING = 0.0  # probability that a rectangle becomes noise
    # In inference, the side of the square that is cut out of the middle, as a share of the
    # image's shorter side.
    cfg.INPUT.CLASSIFY.TEST_CROP = 0.875


def _add_cache(cfg: CfgNode) -> None:
    """Augmented views that are drawn once, and features of a frozen encoder computed once."""
    cfg.INPUT.FIXED_VIEWS = CfgNode()
    # Augmented views of each training image, drawn once; each visit shows one of them. 0: every
    # visit is augmented anew.
    cfg.INPUT.FIXED_VIEWS.COUNT = 0
    # Of the views alone, so that runs of another SEED see the same ones, and share a cache.
    cfg.INPUT.FIXED_VIEWS.SEED = 0

    cfg.MODEL.CACHE_FEATURES = CfgNode()
    # Encode every view once, before training, and train the head on what is on the disk. The
    # backbone must be frozen to its end.
    cfg.MODEL.CACHE_FEATURES.ENABLED = False
    cfg.MODEL.CACHE_FEATURES.DTYPE = "float16"  # "float16", "bfloat16" or "float32"
    # Folder of all caches; empty: "feature_cache" in the cache directory of the package.
    cfg.MODEL.CACHE_FEATURES.FOLDER = ""


def _add_knn(cfg: CfgNode) -> None:
    """The nearest-neighbour score, which needs no training."""
    cfg.TEST.KNN = CfgNode()
    # Names of labelled image sets, such as "imagenet_train": whose images vote, and whose are
    # classified. Empty: no score.
    cfg.TEST.KNN.TRAIN = ()
    cfg.TEST.KNN.VAL = ()
    cfg.TEST.KNN.K = 20  # neighbours that vote
    cfg.TEST.KNN.TEMPERATURE = 0.07  # a vote weighs exp(cosine similarity / temperature)


def _add_visualization(cfg: CfgNode) -> None:
    """Visualizations made while a run trains: how often, and how much of its time they may take."""
    cfg.VIS = CfgNode()
    # Images and metrics in OUTPUT_DIR/visualizations and TensorBoard, where the model has any.
    # A score that TEST.KNN asks for is made in any case.
    cfg.VIS.ENABLED = True
    # Iterations; 0 for twenty times a run. Before the first step and after the last in any case.
    cfg.VIS.PERIOD = 0
    cfg.VIS.EPOCHS = 0.0  # where not 0, VIS.PERIOD is worked out from it
    # Share of the run's time that each figure may take; beyond it, those in between are left out.
    cfg.VIS.SHARE = 0.01
    # Images that are reconstructed: spread evenly over DATASETS.TEST, or over DATASETS.TRAIN where
    # there is no test set.
    cfg.VIS.NUM_IMAGES = 8


def _add_step(cfg: CfgNode) -> None:
    """Keys of how a training step computes, which change neither the model nor what is learned."""
    # Compile the blocks of backbone, decoder and head for training. The first steps take minutes.
    cfg.SOLVER.COMPILE = False
    # On the CPU, keep the memory that a step frees for the next one, where else the kernel fills it
    # with zeros page by page. It holds for the whole process. Only with glibc.
    cfg.SOLVER.KEEP_MEMORY = True
    # Keep only what enters each block, and compute its inside again in the backward pass: less
    # memory, a longer step, the same gradients.
    cfg.MODEL.ACTIVATION_CHECKPOINTING = False
    # Keep maps with their channels innermost in training. None: on CPUs, which lose nothing by it.
    cfg.MODEL.CHANNELS_LAST = None
