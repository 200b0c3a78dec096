# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One run, from its flags to its stages: all that ``qbheat train`` does before the first step.

Read ``assemble_run`` from top to bottom. It opens the data, reads the config, prepares the data,
and returns one ``Stage`` for each training. A stage is a frozen value: its config is complete, and
its data are checked and registered. ``qbheat_det.api.training.train`` trains it.

``SOLVER.FIRST_STAGE`` names the config of a first stage, usually a head on cached features of a
frozen encoder, which trains in minutes. The second stage starts from its weights and also trains
the encoder. Each stage is a run in a folder of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.checkpoint import holds_encoder, load_run_config
from qbheat_det.config import get_cfg, get_value, load_config, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.tasks import find_task, find_task_of_data

from .checks import check_config, check_fit, check_records, find_device
from .detection_limits import fit_detection_limits
from .logs import filter_detectron2_logs
from .mean_teacher import find_mean_teacher_values
from .resume import check_start, decide_to_resume
from .run_data import OpenedSource, Role, RunData, check_flags, open_sources, prepare_data
from .run_flags import RunFlags
from .run_record import FIRST_STAGE_FOLDER, name_last_checkpoint

_MIN_IMAGE_SIZE = 32  # smallest --image-size in pixels
_FROZEN = 5  # lowest FREEZE_AT of recipes with a frozen backbone
# Beginnings of the keys whose overrides both stages share. All others are for the second stage.
_SHARED = (
    "DATALOADER.",
    "DATASETS.",
    "FLOAT32_PRECISION",
    "INPUT.FORMAT",
    "INPUT.TILE",
    "MODEL.",
    "SEED",
    "SOLVER.AMP.",
)
_NOT_SHARED = (
    "DATASETS.UNLABELLED",
    "MODEL.BACKBONE.FREEZE_AT",
    "MODEL.CACHE_FEATURES.ENABLED",
    "MODEL.SEMI.",
)
# Keys that must be equal in both stages, so that the weights fit.
_EQUAL = (
    "MODEL.META_ARCHITECTURE",
    "MODEL.BACKBONE.NAME",
    "MODEL.FPN.BOTTOM_UP",
    "MODEL.FPN.OUT_CHANNELS",
)


@dataclass(frozen=True)
class Stage:
    """One training, or one evaluation.

    Attributes:
        cfg: complete and frozen config.
        data: the data that the config names.
        resume: whether to continue the run in ``OUTPUT_DIR``.
        allow_partial: whether ``MODEL.WEIGHTS`` may lack tensors of the model or have extra ones.
        title: first line of the log, such as "First stage of two".
    """

    cfg: CfgNode
    data: RunData
    resume: bool = False
    allow_partial: bool = False
    title: str = ""

    @property
    def folder(self) -> Path:
        """``OUTPUT_DIR``, the folder of the run."""
        return Path(self.cfg.OUTPUT_DIR)

    @property
    def final_weights(self) -> Path:
        """The file with the weights after the last step."""
        return self.folder / "model_final.safetensors"

    def with_values(self, values: Mapping[str, Any]) -> "Stage":
        """Returns the stage with other config values, by dotted key."""
        cfg = with_values(self.cfg, values)
        cfg.freeze()
        return replace(self, cfg=cfg)


def assemble_run(flags: RunFlags, *, replaces_run: bool = False) -> list[Stage]:
    """Returns the stages of a training, in order. Writes no files.

    All processes of a run must call this function.

    Args:
        flags: flags of the run.
        replaces_run: whether the caller deletes a run in ``OUTPUT_DIR`` afterwards. By default, a
            run in this folder is an error, unless it is resumed.

    Raises:
        UserError: the flags, the config or the data are invalid.
    """
    filter_detectron2_logs()
    check_flags(flags)
    sources = open_sources(flags)
    cfg = read_config(flags, sources)
    folder = Path(cfg.OUTPUT_DIR)
    resume = decide_to_resume(folder, asked=flags.resume)
    if not replaces_run:
        check_start(folder, flags.overrides.get("MODEL.WEIGHTS", ""), resume=resume)
    check_config(cfg, eval_only=False)
    is_in_last_stage = resume and name_last_checkpoint(folder)
    first_cfg = None if is_in_last_stage else read_first_stage(cfg, flags)
    data = prepare_data(cfg, flags, sources, resume=resume)
    if first_cfg is None:
        stages = [_make_stage(cfg, data, flags, flags.overrides, resume=resume)]
    else:
        first = _make_first_stage(first_cfg, data, flags)
        second = _make_stage(cfg, data, flags, flags.overrides, resume=False)
        stages = [first, replace(second, title="Second stage of two")]
    check_records([stage.cfg for stage in stages], data, eval_only=False)
    return stages


def assemble_evaluation(flags: RunFlags) -> Stage:
    """Returns the stage that evaluates ``--weights``, or a run's last checkpoint with ``--resume``.

    Raises:
        UserError: the flags, the config or the data are invalid.
    """
    filter_detectron2_logs()
    flags = replace(flags, eval_only=True)
    check_flags(flags)
    weights = flags.overrides.get("MODEL.WEIGHTS", "")
    if flags.resume and weights:
        raise UserError(f"--resume evaluates a checkpoint, not MODEL.WEIGHTS '{weights}'")
    sources = open_sources(flags)
    cfg = read_config(flags, sources)
    check_config(cfg, eval_only=True)
    data = prepare_data(cfg, flags, sources, resume=flags.resume)
    stage = _make_stage(cfg, data, flags, flags.overrides, resume=flags.resume)
    check_records([stage.cfg], data, eval_only=True)
    return stage


def read_config(flags: RunFlags, sources: Mapping[Role, OpenedSource]) -> CfgNode:
    """Reads the config that the flags name or imply, without the values that depend on the data.

    It is ``--config-file``, or else the config inside ``--weights``, or else the default recipe of
    the task of the data.

    Raises:
        UserError: the config is invalid, or the weights are for another task than the data.
    """
    overrides = flags.overrides
    opts = [word for pair in overrides.items() for word in pair]
    weights = overrides.get("MODEL.WEIGHTS", "")
    if flags.config_file:
        cfg = load_config(flags.config_file, opts)
    elif flags.eval_only:
        cfg = load_run_config(weights, opts=opts) if weights else load_config(None, opts)
    else:
        if "train" not in sources:
            raise UserError("name what to train on: --data SRC, or --images DIR for pre-training")
        wanted = find_task_of_data(sources["train"].source)
        if weights:
            cfg = load_run_config(weights, opts=opts)
            task = find_task(cfg)
            if task is not wanted:
                raise UserError(
                    f"'{weights}' are weights of a model for {task.learns_from}, but the data are "
                    f"{wanted.learns_from}: name a recipe with --config-file, such as "
                    f"{wanted.recipe}"
                )
            if "OUTPUT_DIR" not in overrides:  # the folder of the weights' run is in use
                cfg.OUTPUT_DIR = get_cfg().OUTPUT_DIR
        else:
            cfg = load_config(wanted.recipe, opts)
    if flags.image_size is None:
        return cfg
    return with_values(cfg, _find_size_values(cfg, flags))


def _find_size_values(cfg: CfgNode, flags: RunFlags) -> dict[str, Any]:
    """Returns the values of ``--image-size``, by config key."""
    task = find_task(cfg)
    size = flags.image_size or 0
    for key in task.size_keys:
        if key in flags.overrides:
            raise UserError(f"--image-size and {key} both set the image size: leave one out")
    if size < _MIN_IMAGE_SIZE:
        raise UserError(f"--image-size is {size}, but must be at least {_MIN_IMAGE_SIZE}")
    return task.get_size_values(cfg, size, eval_only=flags.eval_only)


def read_first_stage(cfg: CfgNode, flags: RunFlags) -> CfgNode | None:
    """Reads the config of a run's first stage, or returns None if the run has none.

    Both stages have the same data, device and model. If ``--weights`` names an encoder, both use
    it. There is no first stage if the command freezes the backbone or names weights of a detector.

    Raises:
        UserError: the first stage's config is invalid, is for another model, or has a first stage.
    """
    if not cfg.SOLVER.FIRST_STAGE or cfg.MODEL.BACKBONE.FREEZE_AT >= _FROZEN:
        return None
    weights = flags.overrides.get("MODEL.WEIGHTS")
    if weights is not None and not (weights and holds_encoder(weights)):
        return None
    name = f"SOLVER.FIRST_STAGE '{cfg.SOLVER.FIRST_STAGE}'"
    overrides = {
        **list_shared_overrides(flags.overrides),
        "OUTPUT_DIR": str(Path(cfg.OUTPUT_DIR, FIRST_STAGE_FOLDER)),
    }
    try:
        opts = [word for pair in overrides.items() for word in pair]
        first = load_config(cfg.SOLVER.FIRST_STAGE, opts)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if first.SOLVER.FIRST_STAGE:
        raise UserError(f"{name} has a SOLVER.FIRST_STAGE itself, but a run has two stages at most")
    if find_task(first) is not find_task(cfg):
        raise UserError(
            f"{name} trains on {find_task(first).learns_from}, but the run on "
            f"{find_task(cfg).learns_from}"
        )
    for key in _EQUAL:
        if get_value(first, key) != get_value(cfg, key):
            raise UserError(
                f"{name} has {key} {get_value(first, key)}, but the run has {get_value(cfg, key)}"
            )
    return first


def list_shared_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the overrides that both stages of a run have."""
    return {
        key: value
        for key, value in overrides.items()
        if key.startswith(_SHARED) and not key.startswith(_NOT_SHARED)
    }


def _make_first_stage(cfg: CfgNode, data: RunData, flags: RunFlags) -> Stage:
    """Checks and completes the config of a first stage."""
    overrides = list_shared_overrides(flags.overrides)
    folder = Path(cfg.OUTPUT_DIR)
    resume = decide_to_resume(folder, asked=flags.resume)
    check_start(folder, overrides.get("MODEL.WEIGHTS", ""), resume=resume)
    check_config(cfg, eval_only=False)
    labelled = replace(data, unlabelled=())
    stage = _make_stage(cfg, labelled, flags, overrides, resume=resume)
    return replace(stage, title="First stage of two")


def _make_stage(
    cfg: CfgNode, data: RunData, flags: RunFlags, overrides: Mapping[str, str], *, resume: bool
) -> Stage:
    """Completes a config with the values that depend on data and device.

    Args:
        cfg: config of the stage.
        data: data of the stage.
        flags: flags of the run.
        overrides: the values that the user has set for this stage, by config key.
        resume: whether the stage continues an earlier run.
    """
    cfg = with_values(
        cfg,
        {
            "MODEL.DEVICE": find_device(cfg, overrides),
            "DATASETS.TRAIN": data.train,
            "DATASETS.TEST": data.test,
            "DATASETS.UNLABELLED": data.unlabelled,
            **find_task(cfg).get_class_values(data.class_names, data.category_ids),
        },
    )
    check_fit(cfg, data, overrides)
    limits = fit_detection_limits(
        cfg,
        overrides,
        max_objects_train=data.max_objects_train,
        max_objects_test=data.max_objects_test,
    )
    values: dict[str, Any] = dict(limits)
    if not flags.eval_only:
        values |= find_mean_teacher_values(cfg, overrides)
    keeps_seed = resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR))
    if cfg.SEED < 0 and not keeps_seed:
        values["SEED"] = comm.shared_random_seed()  # equal on all processes, and recorded
    cfg = with_values(cfg, values)
    cfg.freeze()
    return Stage(cfg, data, resume, flags.allow_partial)
