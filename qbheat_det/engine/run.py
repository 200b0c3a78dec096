# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One run, from its flags to its stages: what ``qbheat train`` does before the first step.

Read ``assemble_run`` from top to bottom. It reads the config (``run_config.py``), opens the data
(``opened_sources.py``) and prepares them (``data_preparation.py``), and returns one ``Stage`` for
each training. A stage is a frozen value: its config is complete, and its data are checked and
registered. ``qbheat_det.api.training.train_stage`` trains it.

``SOLVER.FIRST_STAGE`` names the config of a first stage, usually a head on cached features of a
frozen encoder, which trains in minutes. The second stage starts from its weights and also trains
the encoder. Each stage is a run in a folder of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from qbheat_det.checkpoint import LAST_WEIGHTS
from qbheat_det.config import describe_unread, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.tasks import find_task

from .batch_size import fit_to_machine
from .data_preparation import prepare_data
from .logs import filter_detectron2_logs
from .old_detector import find_kept_classes
from .opened_sources import check_flags, open_sources
from .registered_sets import check_records
from .run_config import (
    check_config,
    check_trainable,
    complete_config,
    list_shared_overrides,
    read_config,
    read_first_stage,
)
from .run_data import Draft, RunData
from .run_flags import RunFlags
from .run_record import check_start, find_start, read_start
from .time_limit import TimeLimit


@dataclass(frozen=True)
class Stage:
    """One training, or one evaluation.

    Attributes:
        cfg: complete and frozen config.
        data: the data that the config names.
        resume: whether to continue the run in ``OUTPUT_DIR``.
        allow_partial: whether ``MODEL.WEIGHTS`` may lack tensors of the model or have extra ones.
        title: first lines of the log, such as "First stage of two".
        limit: the time of the stage; None unless ``fit_minutes`` has planned it.
        is_temporary: whether ``OUTPUT_DIR`` is a temporary folder.
    """

    cfg: CfgNode
    data: RunData
    resume: bool = False
    allow_partial: bool = False
    title: str = ""
    limit: TimeLimit | None = None
    is_temporary: bool = False

    @property
    def folder(self) -> Path:
        """``OUTPUT_DIR``, the folder of the run."""
        return Path(self.cfg.OUTPUT_DIR)

    @property
    def final_weights(self) -> Path:
        """The file with the weights after the last step, which ends the stage."""
        return self.folder / LAST_WEIGHTS

    def with_values(self, values: Mapping[str, Any]) -> "Stage":
        """Returns the stage with other config values, by dotted key."""
        cfg = with_values(self.cfg, values)
        cfg.freeze()
        return replace(self, cfg=cfg)

    def with_title(self, line: str) -> "Stage":
        """Returns the stage with a line before the other lines of its title."""
        return replace(self, title="\n".join(filter(None, [line, self.title])))


def assemble_run(flags: RunFlags, *, replaces_run: bool = False) -> list[Stage]:
    """Returns the stages of a training, in order. Writes no files.

    All processes of a run must call this function. ``flags.minutes`` is for ``fit_minutes``.

    Args:
        flags: flags of the run.
        replaces_run: whether the caller deletes a run in ``OUTPUT_DIR`` afterwards. By default, a
            run in this folder is an error, unless it is resumed.

    Raises:
        UserError: the flags, the config or the data are invalid.
    """
    filter_detectron2_logs()
    if flags.eval_only:
        raise UserError("--eval-only does not train: use assemble_evaluation")
    overrides = flags.overrides
    cfg = read_config(flags)
    check_trainable(cfg)
    check_flags(flags, find_task(cfg))
    start = find_start(Path(cfg.OUTPUT_DIR), asked=flags.resume)
    drafts = [Draft(cfg, overrides, start, find_kept_classes(flags, cfg))]
    first_cfg = None if start.continues else read_first_stage(cfg, overrides)
    if first_cfg is not None:
        first_start = find_start(Path(first_cfg.OUTPUT_DIR), asked=flags.resume)
        drafts.insert(0, Draft(first_cfg, list_shared_overrides(overrides), first_start))
    for draft in drafts:
        check_config(draft.cfg, eval_only=False)
        if not replaces_run:
            check_start(draft.start, draft.overrides.get("MODEL.WEIGHTS", ""))

    data = prepare_data(flags, open_sources(flags), drafts)

    stages: list[Stage] = []
    for draft in drafts:
        is_last = draft is drafts[-1]
        # A first stage learns from labelled images alone.
        stage_data = data if is_last else replace(data, unlabelled=())
        stage_cfg = complete_config(draft, stage_data)
        values, title = fit_to_machine(stage_cfg, draft.overrides, continues=draft.start.continues)
        resume = draft.start.continues if stages else draft.start.resume
        stage = Stage(stage_cfg, stage_data, resume, flags.allow_partial, title)
        stages.append(stage.with_values(values))
    if flags.freeze:
        stages[0] = stages[0].with_title(_describe_freeze(stages[0].cfg))
    if len(stages) == 2:
        stages[0] = stages[0].with_title("First stage of two")
        stages[1] = stages[1].with_title("Second stage of two")
    if flags.size and stages[0].cfg.MODEL.DEVICE == "cpu":
        stages[0] = stages[0].with_title(
            f"--size {flags.size} is made for a GPU, and its steps take long on this CPU: "
            "--dry-run forecasts the time"
        )
    typed = flags.opts[::2]
    unread = describe_unread(
        [
            (stage.cfg, [key for key in draft.overrides if key in typed])
            for stage, draft in zip(stages, drafts, strict=True)
        ]
    )
    if unread:
        stages[0] = stages[0].with_title(unread)
    check_records([stage.cfg for stage in stages], data, eval_only=False)
    return stages


def _describe_freeze(cfg: CfgNode) -> str:
    """Says what ``--freeze`` does to a recipe."""
    if cfg.MODEL.CACHE_FEATURES.ENABLED:
        return "--freeze: the head trains on cached features of the frozen encoder"
    return "--freeze: the recipe has no SOLVER.FIRST_STAGE, so each step runs the frozen encoder"


def assemble_evaluation(flags: RunFlags) -> Stage:
    """Returns the stage that evaluates ``--weights``, or a run's last checkpoint with ``--resume``.

    Raises:
        UserError: the flags, the config or the data are invalid.
    """
    filter_detectron2_logs()
    flags = replace(flags, eval_only=True)
    overrides = flags.overrides
    weights = overrides.get("MODEL.WEIGHTS", "")
    if flags.resume and weights:
        raise UserError(f"--resume evaluates a checkpoint, not MODEL.WEIGHTS '{weights}'")
    cfg = read_config(flags)
    check_flags(flags, find_task(cfg))
    check_config(cfg, eval_only=True)
    start = read_start(Path(cfg.OUTPUT_DIR), resume=flags.resume)
    draft = Draft(cfg, overrides, start)
    data = prepare_data(flags, open_sources(flags), [draft])
    cfg = complete_config(draft, data, eval_only=True)
    check_records([cfg], data, eval_only=True)
    # Evaluation reads no key of SOLVER, which may be in a list of overrides for the training too.
    of_model = [key for key in map(str, flags.opts[::2]) if key.startswith("MODEL.")]
    return Stage(cfg, data, start.resume, title=describe_unread([(cfg, of_model)]))
