# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole comparison of objectives: planned, run, gone on with, reported."""

from collections.abc import Mapping

from qbheat_det.analysis.comparison_table import render_table
from qbheat_det.data import load_image_folders

from .encoder_cost import time_step
from .plan import Comparison, count_images, plan_stages
from .progress import Progress, duration, estimate_seconds, is_known, whole_seconds
from .report import Report
from .run import Runner, State, load_state, locked, share_of_threads
from .stage import Stage


def compare(comparison: Comparison, *, jobs: int = 1) -> tuple[str, dict[str, str]]:
    """Runs what is not done yet, and keeps the report current.

    Args:
        comparison: what is asked for.
        jobs: stages at a time.

    Returns:
        The tables, and for each stage that failed why.

    Raises:
        UserError: data or configs are not sound, results of other settings stand in the folder,
            or another comparison is running in it.
    """
    sets = count_images(comparison)
    stages = plan_stages(comparison, sets)
    with locked(comparison.output_dir):
        state = load_state(stages)
        threads = share_of_threads(jobs)
        report = Report(comparison, sets, jobs=jobs, threads=threads)
        progress = Progress(state, jobs=jobs)
        progress.tell(
            f"{len(stages)} stages, {jobs} at a time (threads of each: {threads}); results and "
            f"logs in {comparison.output_dir}"
        )
        done = -1

        def on_change(event: str) -> None:
            nonlocal done
            if len(state.results) != done:
                report.write(state)
                done = len(state.results)
            progress.tell(event)

        runner = Runner(
            state, jobs=jobs, threads=threads, on_change=on_change, on_poll=progress.show
        )
        try:
            runner.run()
        finally:
            progress.close()
        table = report.write(state)
    titles = {stage.key: stage.title for stage in stages}
    return table, {titles[key]: reason for key, reason in state.failed.items()}


def render_plan(comparison: Comparison, *, jobs: int = 1) -> str:
    """Returns the stages in the order in which they would start, with what is known of their cost.

    Of objectives of which no run tells the time, a step is timed on a batch.

    Raises:
        UserError: see ``compare``.
    """
    sets = count_images(comparison)
    state = load_state(plan_stages(comparison, sets))
    timed = _time_unknown(comparison, state)
    rows = [_describe(state, index, timed) for index in range(len(state.stages))]
    headers = ("", "objective", "seed", "stage", "steps", "state", "time")
    estimates = {
        stage.key: _estimate(stage, state, timed)
        for stage in state.stages
        if stage.key not in state.results
    }
    known = [seconds for seconds in estimates.values() if seconds is not None]
    unknown = len(estimates) - len(known)
    return (
        f"{comparison.epochs:g} epochs of {sets.pretraining:,} images; probes learn from "
        f"{sets.train:,} images of {sets.classes} classes, judged on {sets.val:,}.\n\n"
        f"{render_table(headers, rows)}\n\n"
        f"{len(state.results)} of {len(rows)} stages are done. What is left takes "
        f"{'at least ' if unknown else ''}{duration(sum(known) / jobs)} with {jobs} at a time, by "
        "stages that were run and steps that were timed"
        + (f"; of {unknown} stages neither is known." if unknown else ".")
    )


def _time_unknown(comparison: Comparison, state: State) -> dict[str, float]:
    """Returns the seconds of a step for each objective of which nothing better is known."""
    waiting = {
        stage.objective
        for stage in state.left
        if stage.steps and not is_known(stage, state) and stage.key not in state.results
    }
    records, _ = load_image_folders([comparison.train_folder], labelled=True)
    return {
        objective.name: time_step(objective.cfg, records)
        for objective in comparison.objectives
        if objective.name in waiting
    }


def _estimate(stage: Stage, state: State, timed: Mapping[str, float]) -> float | None:
    if stage.steps and stage.objective in timed:
        return stage.steps * timed[stage.objective]
    return estimate_seconds(stage, state)


def _describe(state: State, index: int, timed: Mapping[str, float]) -> tuple[str, ...]:
    stage = state.stages[index]
    result = state.results.get(stage.key)
    steps = f"{stage.steps:,}" if stage.steps else ""
    place = f"{index + 1}", stage.objective, f"{stage.seed}", stage.name, steps
    if result is not None:
        return *place, "done", duration(whole_seconds(stage.key, result))
    estimate = _estimate(stage, state, timed)
    return *place, "to do", "not known" if estimate is None else f"about {duration(estimate)}"
