# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One run, from its flags to its stages: what ``qbheat train`` does before the first step.

Read ``assemble_run`` from top to bottom. It opens the data (``run_data.py``), reads the config
(``run_config.py``), prepares the data, and returns one ``Stage`` for each training. A stage is a
frozen value: its config is complete, and its data are checked and registered.
``qbheat_det.api.training.train`` trains it.

``SOLVER.FIRST_STAGE`` names the config of a first stage, usually a head on cached features of a
frozen encoder, which trains in minutes. The second stage starts from its weights and also trains
the encoder. Each stage is a run in a folder of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError

from .logs import filter_detectron2_logs
from .run_config import (
    check_config,
    complete_config,
    list_shared_overrides,
    read_config,
    read_first_stage,
)
from .run_data import RunData, check_flags, check_records, open_sources, prepare_data
from .run_flags import RunFlags
from .run_record import Start, check_start, find_start, name_last_checkpoint


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
    check_config(cfg, eval_only=False)
    overrides = flags.overrides
    start = find_start(Path(cfg.OUTPUT_DIR), asked=flags.resume)
    if not replaces_run:
        check_start(start, overrides.get("MODEL.WEIGHTS", ""))

    first_cfg = None if start.continues else read_first_stage(cfg, overrides)
    first_start = start
    shared = list_shared_overrides(overrides)
    if first_cfg is not None:
        check_config(first_cfg, eval_only=False)
        first_start = find_start(Path(first_cfg.OUTPUT_DIR), asked=flags.resume)
        check_start(first_start, shared.get("MODEL.WEIGHTS", ""))
        start = replace(start, resume=False)  # it starts from the weights of the first stage

    data = prepare_data(cfg, flags, sources, first_start)
    cfg = complete_config(cfg, data, overrides, start)
    stages = [Stage(cfg, data, start.resume, flags.allow_partial)]
    if first_cfg is not None:
        labelled = replace(data, unlabelled=())
        first_cfg = complete_config(first_cfg, labelled, shared, first_start)
        stages = [
            Stage(
                first_cfg, labelled, first_start.resume, flags.allow_partial, "First stage of two"
            ),
            replace(stages[0], title="Second stage of two"),
        ]
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
    overrides = flags.overrides
    weights = overrides.get("MODEL.WEIGHTS", "")
    if flags.resume and weights:
        raise UserError(f"--resume evaluates a checkpoint, not MODEL.WEIGHTS '{weights}'")
    sources = open_sources(flags)
    cfg = read_config(flags, sources)
    check_config(cfg, eval_only=True)
    folder = Path(cfg.OUTPUT_DIR)
    start = Start(folder, flags.resume, name_last_checkpoint(folder))
    data = prepare_data(cfg, flags, sources, start)
    cfg = complete_config(cfg, data, overrides, start, eval_only=True)
    check_records([cfg], data, eval_only=True)
    return Stage(cfg, data, start.resume)
