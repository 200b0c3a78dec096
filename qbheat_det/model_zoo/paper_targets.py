# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The QB-Heat paper's accuracies as targets, each beside the config that is meant to reach it.

Self-Supervised Learning based on Heat Equation, arXiv:2211.13228, as printed. The strings are the
paper's digits; an empty one stands where the paper prints none.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetTable:
    """One table of targets.

    Attributes:
        title: with the paper's tables.
        note: what the numbers are.
        columns: ways of pre-training.
        metric: of the figures that stand beside them.
        data: on which; a figure of an entry counts where its data begin so.
        rows: what stands before the config, the config below ``configs/`` without its ending, and
            a number or "" for each column.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    metric: str
    data: str
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]


_PROBE, _TUNED = "ImageNet-probing", "ImageNet-finetune"

TARGETS = (
    TargetTable(
        title="ImageNet, probing and fine-tuning (paper, Tables 1, 2, 4 and 15, Sec. 6.3)",
        note="Top-1 of one 224x224 crop as printed; "
        "\"—\" under a pre-training where the paper prints none.",
        columns=("sup", "MoCo-v2", "QB-Heat"),
        metric="top-1",
        data="ImageNet",
        rows=(
            ("frozen, ", f"{_PROBE}/linear_3.7G", ("", "", "65.1")),
            ("frozen, ", f"{_PROBE}/linear_1.0G", ("", "60.4", "")),
            ("frozen, ", f"{_PROBE}/linear_285M", ("", "51.6", "")),
            ("frozen, ", f"{_PROBE}/tran1_3.7G", ("", "", "78.6")),
            ("frozen, ", f"{_PROBE}/tran1_1.0G", ("", "", "")),
            ("frozen, ", f"{_PROBE}/tran1_285M", ("", "52.9", "65.6")),
            ("fine-tuned, ", f"{_TUNED}/tran1_3.7G", ("80.8", "80.0", "82.5")),
            ("fine-tuned, ", f"{_TUNED}/tran1_1.0G", ("79.4", "79.2", "80.5")),
            ("fine-tuned, ", f"{_TUNED}/tran1_285M", ("75.7", "74.3", "75.8")),
            ("fine-tuned, ", f"{_TUNED}/tran4_3.7G", ("", "", "83.5")),
            ("fine-tuned, ", f"{_TUNED}/tran4_1.0G", ("", "", "81.9")),
            ("fine-tuned, ", f"{_TUNED}/tran4_285M", ("", "", "78.4")),
        ),
    ),
    TargetTable(
        title="COCO, MF-DETR (paper, Tables 5 and 16)",
        note="AP on val2017 as printed: from supervised ImageNet weights, from QB-Heat, and from "
        "QB-Heat fine-tuned on ImageNet.",
        columns=("sup", "QB-Heat", "QB-Heat + IN-ft"),
        metric="AP",
        data="COCO",
        rows=(
            ("", "coco/mf_detr_522_3.7G_probe", ("40.5", "43.5", "45.5")),
            ("", "coco/mf_detr_522_1.0G_probe", ("38.3", "42.6", "44.0")),
            ("", "coco/mf_detr_522_285M_probe", ("35.2", "39.7", "41.6")),
            ("", "coco/mf_detr_211_3.7G_probe", ("34.1", "36.7", "41.0")),
            ("", "coco/mf_detr_211_1.0G_probe", ("31.2", "35.7", "39.3")),
            ("", "coco/mf_detr_211_285M_probe", ("27.8", "33.0", "35.8")),
            ("", "coco/mf_detr_522_3.7G_finetune", ("48.1", "48.0", "49.0")),
            ("", "coco/mf_detr_522_1.0G_finetune", ("46.2", "46.7", "47.1")),
            ("", "coco/mf_detr_522_285M_finetune", ("42.5", "42.6", "44.4")),
            ("", "coco/mf_detr_211_3.7G_finetune", ("44.0", "44.3", "46.0")),
            ("", "coco/mf_detr_211_1.0G_finetune", ("42.5", "42.4", "43.8")),
            ("", "coco/mf_detr_211_285M_finetune", ("37.6", "37.2", "39.3")),
        ),
    ),
    TargetTable(
        title="COCO, RetinaNet with a frozen backbone (paper, Table 14)",
        note="",
        columns=("sup", "QB-Heat", "QB-Heat + IN-ft"),
        metric="AP",
        data="COCO",
        rows=(
            ("", "coco/retinanet_3.7G_probe", ("34.0", "36.6", "38.7")),
            ("", "coco/retinanet_1.0G_probe", ("33.6", "35.7", "37.7")),
            ("", "coco/retinanet_285M_probe", ("30.8", "31.3", "33.8")),
        ),
    ),
)  # fmt: skip
