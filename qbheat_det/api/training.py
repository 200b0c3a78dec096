# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Plans and trains the stages of a run, evaluates and records them, and writes their reports."""

import difflib
import functools
import logging
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from qbheat_det.analysis.report import build_report
from qbheat_det.analysis.run import FigureOptions, Run, read_metrics
from qbheat_det.checkpoint import (
    BEST_WEIGHTS,
    LAST_WEIGHTS,
    WeightsInfo,
    find_run_weights,
    info_of,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import replace_folders, write_atomically
from qbheat_det.core.termination import Interrupted
from qbheat_det.core.text import format_duration, join_first
from qbheat_det.deployment import deploy_by_config
from qbheat_det.engine import (
    RunFlags,
    Stage,
    Trainer,
    assemble_run,
    evaluate,
    record_start,
    setup,
)
from qbheat_det.engine.hooks import find_sign
from qbheat_det.engine.logs import removes_empty_run
from qbheat_det.engine.minutes import fit_minutes
from qbheat_det.engine.run_flags import Paths
from qbheat_det.engine.run_record import (
    BEST_RESULTS_FOLDER,
    FIRST_STAGE_FOLDER,
    LOCK_FILE,
    find_duration,
    find_shared_images,
    name_last_checkpoint,
    occupies,
)

logger = logging.getLogger(__name__)
# Figures of a report in addition to the curves, by task.
_FIGURES = {"detection": ("detections",), "classification": ("classes",)}
_TITLES = {"detection": "A detector", "classification": "A classifier"}
_NUM_PICTURES = 12  # number of images in a report


def choose_folder(output: str | Path | None) -> Path:
    """Returns the folder of a new run, by default ``output/train``, ``train-2`` and so on.

    Raises:
        UserError: the folder has a run, or is no path.
    """
    if output is None:
        return _find_free(Path(get_cfg().OUTPUT_DIR))
    if not isinstance(output, str | Path):
        raise UserError(f"output must be the path of a folder, not {output!r}")
    if (Path(output) / "config.yaml").exists():
        raise UserError(
            f"'{output}' has a run: choose another folder, or use qbheat train --resume"
        )
    return Path(output)


def _find_free(folder: Path) -> Path:
    """Returns the first of ``folder``/train, train-2, train-3, … that does not exist."""
    path = folder / "train"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"train-{number}"
    return path


def check_overrides(overrides: object) -> None:
    """Raises a ``UserError`` if ``overrides`` is no dict."""
    if not isinstance(overrides, Mapping):
        raise UserError(
            f"overrides must be a dict of config keys and values, not {overrides!r}, as in "
            '{"SOLVER.BASE_LR": 0.005}'
        )


def make_flags(data: Paths, folder: Path, overrides: Mapping[str, Any], **flags: Any) -> RunFlags:
    """Returns the flags of a run in ``folder``. ``overrides`` are values by config key.

    Raises:
        UserError: ``flags`` has a name that is not a field of ``RunFlags``, or a wrong value.
    """
    check_overrides(overrides)
    opts: list[str] = []  # KEY VALUE KEY VALUE …
    for key, value in overrides.items():
        opts += [key, str(value)]
    known = [field.name for field in fields(RunFlags) if field.name != "opts"]
    for name in flags:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            advice = f"do you mean {nearest[0]}?" if nearest else "see the fields of RunFlags"
            raise UserError(f"train() has no argument '{name}': {advice}")
    return RunFlags(data=data, output=str(folder), opts=opts, **flags)


def plan_run(flags: RunFlags) -> list[Stage]:
    """Returns the stages of a training, with epochs and image size that fit ``flags.minutes``.

    Raises:
        UserError: the config or the data are invalid, or the time is too short.
    """
    stages = assemble_run(flags)
    last = stages[-1]
    if last.cfg.SOLVER.LARGEST_BATCH and flags.image_size is None:
        # The number of images per step was found for images of this size.
        flags = replace(flags, image_size=last.data.task.get_image_size(last.cfg))
    if flags.minutes:
        return fit_minutes(stages, flags, build_trainer(flags))
    return stages


def build_trainer(flags: RunFlags) -> Callable[..., Trainer]:
    """Returns ``Trainer`` for the forecasts of a run."""
    return functools.partial(Trainer, allow_partial=flags.allow_partial)


def train_run(stages: Sequence[Stage]) -> dict[str, Any]:
    """Trains the stages of a run, which ``assemble_run`` returns.

    Each stage starts from the weights of the stage before, see ``find_run_weights``.

    Returns:
        The results of the last evaluation.

    Raises:
        UserError: another run is in the folder of a stage; and the errors of ``train_stage``.
    """
    results: dict[str, Any] = {}
    weights: Path | None = None
    folders = [stage.folder for stage in stages]
    with occupies(folders, resume=any(stage.resume for stage in stages)):
        for stage in stages:
            if weights is not None:
                if _is_too_late(stage):
                    _replace_by_first_stage(stage, stages[0])
                    break
                stage = stage.with_values({"MODEL.WEIGHTS": str(weights)})
            results = train_stage(stage)
            weights = find_run_weights(stage.folder) or stage.final_weights
    return results


def _is_too_late(stage: Stage) -> bool:
    """Whether ``--minutes`` leave no time for a second stage; equal on all processes."""
    if stage.limit is None or name_last_checkpoint(stage.folder):
        return False
    left = stage.limit.end - time.monotonic()
    return bool(comm.all_gather(left < stage.limit.needed)[0])


def _replace_by_first_stage(stage: Stage, first: Stage) -> None:
    """Moves the files of the first stage to the folder of the run, as if it was the only one."""
    comm.synchronize()  # all processes have written theirs
    if not comm.is_main_process():
        return
    for path in first.folder.iterdir():
        if path.name != LOCK_FILE:
            path.replace(stage.folder / path.name)
    logger.warning(
        f"--minutes: no time is left for the second stage. '{stage.folder}' has the weights and "
        "the report of the first stage"
    )


def _keeps_first_stage(stage: Stage) -> bool:
    """Makes the weights of the first stage those of the run if no later evaluation was better.

    Returns whether it has done so. Both stages are evaluated on the same images.
    """
    folder = stage.folder
    first = folder / FIRST_STAGE_FOLDER
    metric = stage.cfg.TEST.BEST_METRIC
    values = _list_values(folder, metric)
    first_values = _list_values(first, metric)
    if not values or not first_values:
        return False
    sign = find_sign(metric)
    best = max(values, key=lambda value: sign * value)
    best_of_first = max(first_values, key=lambda value: sign * value)
    if sign * best >= sign * best_of_first:
        return False
    write_atomically(folder / BEST_WEIGHTS, (first / BEST_WEIGHTS).read_bytes())
    results = folder / BEST_RESULTS_FOLDER
    shutil.rmtree(results, ignore_errors=True)
    if (first / BEST_RESULTS_FOLDER).is_dir():
        shutil.copytree(first / BEST_RESULTS_FOLDER, results)
    logger.warning(
        f"The second stage did not improve on the first: {metric} {best:.4g} instead of "
        f"{best_of_first:.4g}. Now {BEST_WEIGHTS} in '{folder}' has the weights of the first "
        "stage, with its image size. Train for longer, or use --freeze"
    )
    return True


def _list_values(folder: Path, metric: str) -> list[float]:
    """Returns the values of a metric in all evaluations of a run."""
    path = folder / "metrics.json"
    if not path.is_file():
        return []
    return [float(record[metric]) for record in read_metrics(path) if metric in record]


def train_stage(stage: Stage) -> dict[str, Any]:
    """Trains one stage, records the run, and writes its report.

    A second stage that does not improve on the first one leaves the weights of the first one.

    Returns:
        The results of the last evaluation.

    Raises:
        UserError: the weights do not fit the model, or the training cannot go on.
    """
    setup(stage)
    with removes_empty_run(stage.folder):
        trainer = Trainer(stage.cfg, allow_partial=stage.allow_partial, limit=stage.limit)
        trainer.resume_or_load(resume=stage.resume)
        if not comm.is_main_process():
            return trainer.train()
        add_duration = record_start(
            trainer.cfg,
            stage.data.describe(),
            resumed_from=trainer.resumed_from,
            seed=trainer.seed,
        )
        start = time.monotonic()
        try:
            results = trainer.train()
        finally:
            add_duration(time.monotonic() - start)
        page = write_run_report(trainer.cfg, keeps_first=_keeps_first_stage(stage))
        logger.info(f"Report: '{page}'")
        return results


def train_afresh(flags: RunFlags) -> tuple[Trainer, dict[str, Any]]:
    """Trains a new run, which replaces an earlier run in ``flags.output``. Writes no report.

    The caller prevents that two processes do so at once: see ``refuse_second_command``.

    Returns:
        The trainer, and the results of the last evaluation.

    Raises:
        UserError: the config or the data are invalid, or the folder has other files.
    """
    stages = assemble_run(flags, replaces_run=True)
    if len(stages) > 1:
        raise UserError("SOLVER.FIRST_STAGE: name a recipe with one stage here")
    stage = stages[0]
    replace_folders(stage.folder)
    setup(stage)
    trainer = Trainer(stage.cfg)
    trainer.resume_or_load(resume=False)
    try:
        return trainer, trainer.train()
    except Interrupted as stop:
        # The trainer's message recommends --resume, but this run always starts from the beginning.
        name = signal.Signals(stop.number).name
        raise Interrupted(
            stop.number, f"{name} stopped the training in '{flags.output}': run the command again"
        ) from None


def evaluate_stage(stage: Stage) -> dict[str, Any]:
    """Evaluates weights. ``assemble_evaluation`` returns the stage.

    If ``MODEL.DEPLOY.ENABLED``, evaluates the deployed form of the model.

    Returns:
        Results by task.

    Raises:
        UserError: no weights are given, or they do not fit the model exactly.
    """
    setup(stage, eval_only=True)
    cfg = stage.cfg

    def deploy(model: nn.Module) -> nn.Module:
        deployed = deploy_by_config(model, cfg.MODEL.DEPLOY)
        logger.info(f"Deployed:\n{deployed.report}")
        return deployed

    prepare = deploy if cfg.MODEL.DEPLOY.ENABLED else None
    with removes_empty_run(stage.folder):
        return evaluate(cfg, resume=stage.resume, prepare=prepare)


def write_run_report(cfg: CfgNode, *, keeps_first: bool = False) -> Path:
    """Writes ``report.html`` into the folder of a finished run, and returns its path.

    ``keeps_first`` says that the weights of the run are those of its first stage.
    """
    folder = Path(cfg.OUTPUT_DIR)
    model = cfg.MODEL
    seconds = find_duration(folder)
    page = folder / "report.html"
    run = Run.open(folder, label=folder.resolve().name, device=model.DEVICE)
    names = [*_FIGURES.get(run.task.name, ()), "curves"]
    title = model.META_ARCHITECTURE
    if run.task.name in _TITLES and model.CLASS_NAMES:
        title = f"{_TITLES[run.task.name]} of {join_first(model.CLASS_NAMES)}"
    num_steps = _count_steps(folder / LAST_WEIGHTS)
    lead = f"Trained for {num_steps:,} steps of {cfg.SOLVER.IMS_PER_BATCH} images"
    if seconds is not None:
        lead += f" in {format_duration(seconds)}"
    if model.WEIGHTS:
        lead += f", starting from '{model.WEIGHTS}'"
    lead += "."
    for text in find_shared_images(folder):
        lead += f" Note: {text}."
    if keeps_first:
        lead += (
            " No evaluation of the second stage was better than those of the first. This page "
            f"shows the weights of the first stage, {BEST_WEIGHTS}."
        )
    elif run.weights.name == BEST_WEIGHTS:
        lead += (
            f" This page shows the weights with the best evaluation, {BEST_WEIGHTS}, after "
            f"{_count_steps(run.weights):,} steps. Commands that name the folder use them too."
        )
    command = ["qbheat", "report", str(folder), "--output", str(page), "--only", *names]
    results = build_report(
        names,
        [run],
        FigureOptions(num_images=_NUM_PICTURES),
        keywords={},
        output=page,
        command=shlex.join(command),
        title=title,
        lead=lead,
    )
    for result in results:
        if result.figure is not None and result.figure.headline:
            logger.info(f"{result.figure.headline}. {result.figure.caution}")
    return page


def _count_steps(weights: Path) -> int:
    """Returns the number of steps that a run took to its weights."""
    info = info_of(str(weights)) or WeightsInfo()
    return info.iteration + 1
