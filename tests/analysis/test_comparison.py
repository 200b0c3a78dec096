# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Comparisons of objectives: the commands, what is run once, refused, retried and summarized."""

import json
import math
import sys
from dataclasses import replace

import pytest

from qbheat_det.analysis import comparison
from qbheat_det.analysis.comparison import (
    Comparison,
    Row,
    list_rows,
    load_objectives,
    measure_row,
    render_tables,
    summarize,
    write_report,
)
from qbheat_det.checkpoint import WeightsInfo
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from tests.engine.classifier_cases import make_classes
from tests.tool_modules import TOOLS, load_tool, refuse

JOBS = load_tool("comparison_jobs")
QB_HEAT = get_config_path("objectives/qb_heat.yaml")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Class folders with 4 training images and 2 others."""
    root = tmp_path_factory.mktemp("images")
    train = make_classes(root / "train", {"a": 2, "b": 2})
    return {"train": train, "val": make_classes(root / "val", {"a": 1, "b": 1}, first=100)}


@pytest.fixture
def ask(folders, tmp_path):
    """Builds comparisons of objectives by name."""

    def build(*names, **keywords):
        return Comparison(
            objectives=load_objectives(names, keywords.get("opts", ())),
            train_folder=folders["train"],
            val_folder=folders["val"],
            output_dir=tmp_path / "out",
            **{"seeds": [1], "epochs": 6.0, "probes": ["knn"]} | keywords,
        )

    return build


def test_commands_are_those_that_a_person_would_type(ask, folders, tmp_path):
    opts = ["SOLVER.IMS_PER_BATCH", "8"]
    compared = ask("random", "qb_heat", seeds=[3, 1], opts=opts)
    rows = list_rows(compared)
    jobs = [JOBS.plan_row(compared, row) for row in rows]
    assert [(row.objective.name, row.seed) for row in rows] == [
        ("random", 3),
        ("qb_heat", 3),
        ("random", 1),
        ("qb_heat", 1),
    ]
    stages = [["probes"], ["pretraining", "probes"]]
    assert [[job.stage for job in planned] for planned in jobs] == 2 * stages
    pretraining, probes = (job.command for job in jobs[3])
    folder = tmp_path / "out" / "qb_heat" / "seed1"
    assert pretraining == [
        *(sys.executable, str(TOOLS / "train_net.py"), "--config-file", QB_HEAT),
        *("--images", folders["train"], "--output", str(folder / "pretraining")),
        *("--resume", "SEED", "1", "SOLVER.EPOCHS", "6.0", *opts),
    ]
    assert probes[1] == str(TOOLS / "probe_backbone.py")
    assert (probes[-4], probes[-2:]) == ("--json", ["SEED", "1"])
    assert str(folder / "pretraining" / "model_final.safetensors") in probes
    random = jobs[2][0].command
    assert (random[2:4], random[-4:]) == (["--random", "--config-file"], ["SEED", "1", *opts])
    assert jobs[3][0].settings["SOLVER.IMS_PER_BATCH"] == 8


def test_distillation_is_compared_if_it_is_named():
    names = [objective.name for objective in load_objectives([])]
    assert names[0] == "random"
    assert "distill" not in names
    assert "mask_token" in names
    _, distill = load_objectives(["qb_heat", "distill"])
    assert distill.cfg.MODEL.META_ARCHITECTURE == "FeatureDistillation"


def test_other_encoders_and_images_are_refused(tmp_path):
    path = tmp_path / "own.yaml"
    for content, key in (
        ("INPUT: {PRETRAIN: {SIZE: 64}}", "INPUT.PRETRAIN.SIZE"),
        ("MODEL: {MOBILE_FORMER: {VARIANT: 26M}}", "MODEL.MOBILE_FORMER.VARIANT"),
        ("INPUT: {DATASET_MAPPER_NAME: detr}", "INPUT.DATASET_MAPPER_NAME"),
    ):
        path.write_text(f"_BASE_: {QB_HEAT}\n{content}\n")
        with pytest.raises(UserError, match=key):
            load_objectives(["qb_heat", str(path)])
    (tmp_path / "random.yaml").write_text(f"_BASE_: {QB_HEAT}\n")
    for words in (["qb_heat", "qb_heat"], ["simclr"], [str(tmp_path / "random.yaml")]):
        with pytest.raises(UserError):
            load_objectives(words)


def test_the_tool_refuses_what_cannot_be_compared_before_anything_runs(folders, tmp_path, capsys):
    words = ["--data", folders["train"], "--val", folders["val"], "--epochs", "2"]
    words += ["--output", str(tmp_path / "out"), "--objectives", "random", "--recalibrate-bn", "8"]
    main = load_tool("compare_pretraining").main
    for flags, named in (
        ("--objectives simclr", "simclr"),
        ("--probes svm", "svm"),
        ("--epochs 0", "--epochs"),
        ("--seeds 1 1", "--seeds"),
        ("SEED 3", "SEED"),
        ("SOLVER.BASE_LR", "SOLVER.BASE_LR has no value"),
        ("solver.base_lr", "partner"),
        ("SOLVER.BASE_RATE 1", "SOLVER.BASE_RATE"),
        ("--val NONE", "NONE"),
    ):
        assert named in refuse(main, [*words, *flags.split()], capsys)
    assert main([*words, "--plan"]) == 0
    assert capsys.readouterr().out.startswith("random seed 1 probes: ")
    assert not (tmp_path / "out").exists()


class Steps:
    """Rows of jobs whose commands note their names in a file, in place of trainings."""

    def __init__(self, comparison, folder):
        self.comparison = comparison
        self.folder = folder
        self.rows = []
        self.jobs = {}

    def add_row(self, name, **codes):
        """Adds a row with a job for each code, and returns the jobs."""
        objective = replace(self.comparison.objectives[0], name=name)
        row = Row(objective, 1, self.folder / name)
        jobs = []
        for stage, code in codes.items():
            note = f"open({str(self.folder / 'order')!r}, 'a').write('{name}/{stage} ')"
            command = [sys.executable, "-c", f"{note}; {code or 'pass'}"]
            jobs.append(JOBS.Job(row, stage, command, {"LR": 0.5}))
        self.rows.append(row)
        self.jobs[name] = jobs
        return jobs

    @property
    def order(self):
        return (self.folder / "order").read_text().split()


@pytest.fixture
def steps(ask, tmp_path, monkeypatch):
    steps = Steps(ask("qb_heat"), tmp_path)
    monkeypatch.setattr(JOBS, "list_rows", lambda _: steps.rows)
    monkeypatch.setattr(JOBS, "plan_row", lambda _, row: steps.jobs[row.objective.name])
    monkeypatch.setattr(JOBS, "write_report", lambda *_: "table")
    return steps


def test_jobs_run_once_in_order_and_a_failure_stops_its_row(steps):
    first, _ = steps.add_row("a", first="", second="")
    steps.add_row("b", first="print('the reason'); raise SystemExit(3)", second="")
    table, failed = JOBS.compare(steps.comparison)
    assert table == "table"
    assert sorted(failed) == ["b seed 1 first", "b seed 1 second"]
    assert "code 3" in failed["b seed 1 first"]
    assert "the reason" in failed["b seed 1 first"]
    assert [name for name in steps.order if name[0] == "a"] == ["a/first", "a/second"]
    record = json.loads(first.record_file.read_text())
    assert record["command"] == first.command
    (steps.folder / "order").unlink()
    JOBS.compare(steps.comparison)
    assert steps.order == ["b/first"]  # retries the failed job alone
    (steps.folder / "order").unlink()
    first.record_file.unlink()
    JOBS.compare(steps.comparison)
    assert steps.order[:2] == ["a/first", "a/second"]  # a new result makes later ones stale


def test_results_of_other_settings_are_refused_with_the_key(steps):
    (job,) = steps.add_row("a", only="")
    JOBS.compare(steps.comparison)
    assert job.is_done()
    assert not replace(job, command=[*job.command, "more"]).is_done()
    assert replace(job, settings={"LR": 0.5, "NEW": 1}).is_done()
    with pytest.raises(UserError, match=r"LR 0\.5 -> 0\.1"):
        replace(job, settings={"LR": 0.1}).is_done()
    for text in ("", "[]", "{}"):
        job.record_file.write_text(text)
        with pytest.raises(UserError, match=r"only\.json"):
            job.is_done()


def test_measures_of_a_row_are_read_from_its_finished_jobs(ask, monkeypatch):
    asked = ask("qb_heat", opts=["SOLVER.IMS_PER_BATCH", "4"])
    (row,) = list_rows(asked)
    probe = {"backbone": "x", "digest": "d", "images_seen": 8, "top1_standard_error": 1.0}
    rows = [{**probe, "probe": "knn", "recalibrated": bn, "top1": top1}
            for bn, top1 in ((0, 10.0), (9, 20.0))]  # fmt: skip
    rows.append({**probe, "probe": "tran-4", "recalibrated": 9, "top1": 99.0})  # not asked for
    (row.folder / "probes").mkdir(parents=True)
    content = {"setting": {"tran": {"width": 64}}, "rows": rows}
    (row.folder / "probes" / "rows.json").write_text(json.dumps(content))
    (row.folder / "pretraining").mkdir()
    log = [{"iteration": 4, "time": 2.0}, {"iteration": 9, "time": 4.0}, {"iteration": 9}]
    ((row.folder / "pretraining") / "metrics.json").write_text("\n".join(map(json.dumps, log)))
    info = WeightsInfo.from_config(row.objective.cfg, iteration=9, commit="")
    monkeypatch.setattr(comparison, "info_of", lambda path: info)
    assert measure_row(asked, row) == {}  # nothing has ended
    for stage in ("probes", "pretraining"):
        (row.folder / f"{stage}.json").write_text("{}")
    assert measure_row(asked, row) == {
        "kNN": 20.0, "kNN, BN as trained": 10.0, "images seen": 40.0, "minutes": 0.5,
    }  # fmt: skip
    table = write_report(asked, [row], {"a title": "a reason"})
    assert "20.00 (one seed)" in table
    assert "a title" in table
    written = json.loads((asked.output_dir / "comparison.json").read_text())
    assert written["summary"]["qb_heat"]["kNN"] == {
        "mean": 20.0, "deviation": None, "values": {"1": 20.0}
    }  # fmt: skip


def test_spreads_and_tables_are_those_computed_by_hand(ask):
    asked = ask("random", "qb_heat", seeds=[1, 2])
    measures = [{"kNN": 2.0}, {"kNN": 10.0, "linear": 50.0, "minutes": 1.5}, {}, {"kNN": 14.0}]
    summary = summarize(list(zip(list_rows(asked), measures, strict=True)))
    spread = summary["qb_heat"]["kNN"]
    assert (spread["mean"], spread["deviation"]) == (12.0, pytest.approx(math.sqrt(8)))
    text = render_tables(asked, summary, {})
    for part in ("| 12.00 ± 2.83 (2)", "| 1.50 (one seed)"):
        assert part in text


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was_and_writes_its_table(folders, tmp_path, capsys):
    config, output = tmp_path / "tiny.yaml", tmp_path / "out"
    decoder = "MODEL: {QB_HEAT: {FEATURE_DIM: 16, DECODER_DEPTH: 1, DECODER_DIM: 16}}"
    config.write_text(f"_BASE_: {QB_HEAT}\n{decoder}\n")
    words = ["--data", folders["train"], "--val", folders["val"], "--objectives",
             str(config), "--epochs", "1", "--seeds", "1", "--probes", "knn",
             "--output", str(output), "INPUT.PRETRAIN.SIZE", "64", "SOLVER.IMS_PER_BATCH", "4",
             "SOLVER.WARMUP_EPOCHS", "0.0"]  # fmt: skip
    main = load_tool("compare_pretraining").main
    assert main(words) == 0
    assert (output / "comparison.md").read_text().strip() in capsys.readouterr().out
    summary = json.loads((output / "comparison.json").read_text())["summary"]
    assert summary["tiny"]["images seen"]["values"] == {"1": 4.0}
    assert {"kNN", "kNN, BN as trained"} < set(summary["tiny"])
    records = {path: path.stat().st_mtime_ns for path in output.glob("*/seed1/*.json")}
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in records} == records
    said = refuse(main, [*words, "SOLVER.BASE_LR", "0.5"], capsys)
    assert "SOLVER.BASE_LR 0.0015 -> 0.5" in said
