# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole comparison of objectives: planned, run, gone on with, reported."""

from qbheat_det.analysis.comparison_table import render_table

from .comparison_plan import Comparison, count_images, plan_stages
from .comparison_progress import Progress, duration, estimate_seconds, time_left, whole_seconds
from .comparison_report import Report
from .comparison_run import Runner, State, load_state, locked, share_of_threads


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

    Raises:
        UserError: see ``compare``.
    """
    sets = count_images(comparison)
    state = load_state(plan_stages(comparison, sets))
    lines = [_describe(state, index) for index in range(len(state.stages))]
    table = render_table(("", "objective", "seed", "stage", "state", "time"), lines)
    seconds, unknown = time_left(state, jobs)
    total = (
        f"{len(state.results)} of {len(lines)} stages are done. What is left takes "
        f"{'at least ' if unknown else ''}{duration(seconds)} with {jobs} at a time, by those that "
        "are done" + (f"; of {unknown} stages none like them has been run yet." if unknown else ".")
    )
    each = (
        f"{comparison.epochs:g} epochs of {sets.pretraining:,} images; probes learn from "
        f"{sets.train:,} images of {sets.classes} classes, judged on {sets.val:,}."
    )
    return f"{each}\n\n{table}\n\n{total}"


def _describe(state: State, index: int) -> tuple[str, ...]:
    stage = state.stages[index]
    result = state.results.get(stage.key)
    place = f"{index + 1}", stage.objective, f"{stage.seed}", stage.name
    if result is not None:
        return *place, "done", duration(whole_seconds(stage.key, result))
    estimate = estimate_seconds(stage, state)
    return *place, "to do", f"about {duration(estimate)}" if estimate else "not known"
