# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run of every kind of model, of four steps, for tests that compare devices."""

import timm

from qbheat_det.checkpoint import WeightsInfo, save_weights
from tests.engine import tiny_training
from tests.engine.classifier_cases import make_classes
from tests.engine.test_objectives import OPTS as PRETRAINING
from tests.engine.tiny_training import MF_DETR, TINY_ENCODER, read_opts
from tests.toy_set import draw_toy_set

# Of four steps the third does nothing but train: the others log, save or evaluate.
OPTS = read_opts("""
SOLVER.MAX_ITER 4 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.LOG_PERIOD 2 SOLVER.EMA.ENABLED True
SOLVER.CLIP_GRADIENTS.ENABLED True MODEL.MOBILE_FORMER.DROP_PATH 0 SOLVER.CHECKPOINTS_KEPT 3
""")
DETR = MF_DETR | read_opts("MODEL.MF_DETR.DROPOUT 0 MODEL.MOBILE_FORMER.DROP_PATH 0")
FOCAL = "MODEL.MF_DETR.CLASSIFICATION focal"
CACHED = """MODEL.BACKBONE.FREEZE_AT 5 INPUT.FIXED_VIEWS.COUNT 2 MODEL.CACHE_FEATURES.ENABLED True
MODEL.CACHE_FEATURES.DTYPE float32 """
FCOS = """MODEL.META_ARCHITECTURE SyncFCOS MODEL.FCOS.NUM_CONVS 1 MODEL.FCOS.IN_FEATURES ["p3","p4"]
MODEL.FCOS.NORM '' """
SEMI = "MODEL.SEMI.BURN_IN 0.2 MODEL.SEMI.RATIO 1 "
AMP = "SOLVER.AMP.ENABLED True SOLVER.AMP.PRECISION "
DETECTORS = {
    "retinanet": read_opts("SOLVER.ACCUMULATE 2 MODEL.RETINANET.PRIOR_PROB 0.5"),
    "retinanet, cached": read_opts(CACHED),
    "retinanet, bfloat16": read_opts(f"{AMP} bfloat16"),
    "retinanet, unlabelled": read_opts(SEMI),
    "retinanet, atss": read_opts("MODEL.RETINANET.ATSS.ENABLED True"),
    "fcos": read_opts(FCOS),
    "fcos, bfloat16": read_opts(f"{FCOS} {AMP} bfloat16"),
    "fcos, unlabelled": read_opts(FCOS + SEMI),
    "mf_detr": DETR | read_opts("SOLVER.ACCUMULATE 2"),
    "mf_detr, selected queries": DETR
    | read_opts(f"MODEL.MF_DETR.QUERY_SELECTION.ENABLED True {FOCAL}"),
    "mf_detr, cached": DETR | read_opts(f"{CACHED} INPUT.DETR_CROP_RESIZE []"),
    "mf_detr, float16": DETR | read_opts(f"{AMP} float16"),
}
OBJECTIVES = ["qb_heat", "interpolation", "mask_token", "moco_v2", "supervised", "wasserstein_dual"]
RCNN = "faster_rcnn"  # not among CASES: it samples proposals by random numbers of the device
TINY_RCNN = {
    **TINY_ENCODER,
    **read_opts("""
MODEL.FPN.OUT_CHANNELS 16 MODEL.ROI_BOX_HEAD.FC_DIM 32 INPUT.MIN_SIZE_TRAIN (64,)
INPUT.MIN_SIZE_TEST 64 SOLVER.IMS_PER_BATCH 2 SOLVER.WARMUP_ITERS 2 SEED 3
SOLVER.BASE_LR 0.001 DATALOADER.NUM_WORKERS 0
"""),
}
DISTILLED = "distill_285M_cpu"
CASES = [*DETECTORS, *OBJECTIVES, DISTILLED]


def make_args(case, output_dir, data, device, *flags, more_opts=None):
    """Returns the arguments of a run of a case."""
    opts = {**OPTS, "MODEL.DEVICE": device, "MODEL.CACHE_FEATURES.FOLDER": f"{output_dir}/cache"}
    opts |= more_opts or {}
    if case in DETECTORS:
        more = ("--unlabelled", str(data / "photos")) if "unlabelled" in case else ()
        boxes = next(data.glob("*/annotations.json")).parent
        return tiny_training.parse(output_dir, boxes, {**DETECTORS[case], **opts}, *more, *flags)
    if case == RCNN:
        recipe = "configs/quick_schedules/faster_rcnn_285M_cells.yaml"
        opts = {**TINY_RCNN, **opts, "OUTPUT_DIR": str(output_dir)}
        boxes = next(data.glob("*/annotations.json"))
        images = "--images", str(boxes.parent / "images")
        boxes = "--data", str(boxes), "--val", str(boxes)
        return tiny_training.parse_run(recipe, opts, *boxes, *images, *flags)
    recipe = f"configs/objectives/{case}.yaml"
    images = "--data" if case == "supervised" else "--images", str(data / "classes")
    if case == DISTILLED:
        recipe = f"configs/custom/{case}.yaml"
        opts |= {
            "MODEL.TEACHER.NAME": "mobilenetv3_small_050",
            "MODEL.TEACHER.WEIGHTS": str(data / "teacher.safetensors"),
            "MODEL.TEACHER.IMAGE_SIZE": "128",
        }
    if case in ("qb_heat", DISTILLED):
        images += "--val-images", str(data / "photos")
    opts = {**PRETRAINING, **opts, "OUTPUT_DIR": str(output_dir)}
    return tiny_training.parse_run(recipe, opts, *images, *flags)


def draw_data(folder):
    """Draws boxes, two classes of images, photos without labels; adds the weights of a teacher."""
    draw_toy_set(folder, 4)
    make_classes(folder / "classes", {"round": 3, "square": 3})
    make_classes(folder, {"photos": 4}, first=50)
    teacher = timm.create_model("mobilenetv3_small_050").state_dict()
    save_weights(str(folder / "teacher.safetensors"), teacher, WeightsInfo())
    return folder
