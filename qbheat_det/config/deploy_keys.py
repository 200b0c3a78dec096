# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of the form in which trained weights predict; docs/fast.md has what each step gains."""

from detectron2.config import CfgNode


def add_deploy_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.DEPLOY`` to a config, in place.

    Training does not read it: a trainer's models, and averages of them, evaluate in plain form.
    """
    cfg.MODEL.DEPLOY = CfgNode()
    # Bring the model, once its weights are loaded, into its fastest equal form on the device.
    cfg.MODEL.DEPLOY.ENABLED = False
    # "float32", or "bfloat16" for processors and GPUs that multiply it: AP moves by some tenths.
    cfg.MODEL.DEPLOY.PRECISION = "float32"
    cfg.MODEL.DEPLOY.COMPILE = "auto"  # or "off"; compiled programs are kept on the disk
    # [[height, width], …] in pixels, after resizing, that are compiled for before the first image.
    cfg.MODEL.DEPLOY.IMAGE_SIZES = []
    # Images of one size after which a process compiles for that size; 0: never.
    cfg.MODEL.DEPLOY.COMPILE_AFTER = 300
    # On the CPU, keep the memory that an image frees for the next one, where else the kernel fills
    # it with zeros page by page. It holds for the whole process. Only with glibc.
    cfg.MODEL.DEPLOY.KEEP_MEMORY = True
