# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of probes as a sight: read from all files that hold them, apart where they must be."""

import json
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.gather import describe_subjects
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.probe_files import read_probes
from qbheat_det.engine.seeing.probes import see_probes
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.sights import SIGHTS
from qbheat_det.engine.seeing.subject import Subject, open_subjects

SETTING = {"contents": [1, 2], "num_classes": 3, "size": 128, "tran": {"width": 192}}


def make_row(
    backbone: str, seen: int | None, probe: str = "knn", *, top1: float | None = 50.0, anew: int = 0
) -> dict[str, Any]:
    return {
        "backbone": backbone, "digest": backbone, "images_seen": seen, "recalibrated": anew,
        "probe": probe, "top1": top1, "top1_standard_error": 2.5,
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any], **setting: Any) -> Path:
    """Writes a file as tools/probe_backbone.py does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"setting": SETTING | setting, "broken_images": 0, "rows": rows}
    path.write_text(json.dumps(content))
    return path


def make_stage(objective: str, seed: int, top1: float, name: str = "probes") -> dict[str, Any]:
    """A stage as tools/compare_pretraining.py writes it."""
    row = make_row(f"{objective}/seed{seed}/x.pth", 0 if objective == "random" else 64, top1=top1)
    return {"objective": objective, "seed": seed, "stage": name,
            "figures": {"knn": row, "setting": SETTING}}  # fmt: skip


def test_checkpoints_random_backbones_and_widths_of_one_file_are_told_apart(tmp_path: Path) -> None:
    rows = [make_row(f"a/model_{seen}.pth", seen, probe, top1=seen)
            for seen in (8, 16) for probe in ("knn", "linear", "tran-1", "tran-1:384")]  # fmt: skip
    rows += [make_row(f"random, seed {seed}", 0, top1=seed, anew=anew)
             for seed in (1, 2) for anew in (0, 9)]  # fmt: skip
    rows.append(make_row("a/model_16.pth", 16, "tran-4", top1=None))  # null stands for nan
    file = write(tmp_path / "out" / "probes.json", *rows)
    exhibit = see_probes([Subject.open(file)], SightOptions())
    assert list(exhibit.pictures) == ["decoders", "images_seen"]
    alt = exhibit.pictures["decoders"].alt
    assert "out/probes kNN 16.00 %, linear 16.00 %, tran-1, width 192 16.00 %" in alt
    assert "random, as initialised kNN 1.50 %" in alt  # the mean of two seeds
    drawn = exhibit.pictures["images_seen"].content.decode()
    assert "<!-- tran-1, width 384 -->" in drawn
    assert "<!-- kNN, random as initialised (mean of 2) -->" in drawn
    table = exhibit.table
    assert table is not None
    assert table.header[4:] == (
        "kNN (%)", "linear (%)", "tran-1, width 192 (%)", "tran-1, width 384 (%)"
    )  # fmt: skip
    lines = [[cell.replace("\N{NO-BREAK SPACE}", "~") for cell in row] for row in table.rows]
    assert lines[0] == ["out/probes", "model_8.pth", "8", "as stored", *["8.00~±~2.50"] * 4]
    assert lines[3] == ["random", "random, seed 1", "0", "whole images", "1.00~±~2.50",
                             "", "", ""]  # fmt: skip
    results = exhibit.figures["runs"]["out/probes"]["results"]
    assert len(results) == 12
    assert results[3]["decoder"] == "tran-1, width 384"


def test_runs_of_several_lengths_are_points_of_one_chart_for_each_decoder(tmp_path: Path) -> None:
    for name, seen in (("short", 8), ("long", 32)):
        write(tmp_path / name / "probes.json", make_row(f"{name}/x.pth", seen))
        (tmp_path / name / "metrics.json").touch()  # the folder of a run, then
    subjects = open_subjects([str(tmp_path / name) for name in ("short", "long")])
    exhibit = see_probes(subjects, SightOptions())
    assert list(exhibit.pictures) == ["decoders", "images_seen_knn"]
    drawn = exhibit.pictures["images_seen_knn"].content.decode()
    assert "<!-- short -->" in drawn
    assert "<!-- long -->" in drawn


def test_a_comparison_has_its_objectives_with_seeds_averaged(tmp_path: Path) -> None:
    stages = [make_stage("random", 1, 4.0), make_stage("random", 1, 8.0, "probes_as_stored"),
              make_stage("qb", 1, 10.0), make_stage("qb", 2, 20.0),
              make_stage("qb", 2, 60.0, "probes_as_stored"),
              {"objective": "qb", "seed": 1, "stage": "pretraining", "figures": {}}]  # fmt: skip
    (tmp_path / "cmp").mkdir()
    (tmp_path / "cmp" / "comparison.json").write_text(json.dumps({"results": stages}))
    exhibit = see_probes([Subject.open(tmp_path / "cmp")], SightOptions())
    assert list(exhibit.pictures) == ["decoders"]
    assert exhibit.pictures["decoders"].alt.endswith(
        "random kNN 4.00 %; random, as initialised kNN 8.00 %; qb kNN 15.00 %"
    )
    (tmp_path / "one.json").write_text(json.dumps(stages[2]))
    (result,) = read_probes(tmp_path / "one.json").results
    assert (result.series, result.top1, result.recalibrated) == ("qb", 10.0, True)


def test_other_images_get_charts_of_their_own_and_what_cannot_be_read_is_said(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a.json", make_row("a/x.pth", 8))
    write(tmp_path / "b.json", make_row("b/x.pth", 8), size=224)
    write(tmp_path / "c.json", make_row("c/x.pth", 8), contents=[1, 3])
    (tmp_path / "bad.json").write_text('{"rows": [3]}')
    names = ("a", "b", "c", "bad")
    subjects = open_subjects([f"{name}={tmp_path / name}.json" for name in names])
    exhibit = see_probes(subjects, SightOptions())
    assert list(exhibit.pictures) == ["decoders_1", "decoders_2"]
    text = "\n".join(exhibit.explanation)
    assert "different images do not compare: images 1 for a, b; images 2 for c." in text
    assert "a, b also differ in how they were probed (size)" in text
    assert f"'{tmp_path / 'bad.json'}' holds no figures of probes" in text.split("Left out: ")[1]
    with pytest.raises(UserError, match="holds no figures of probes"):
        see_probes(subjects[3:], SightOptions())


def test_files_of_one_folder_that_are_no_checkpoints_of_one_run_stay_apart(tmp_path: Path) -> None:
    exports = [make_row(f"out/{name}.safetensors", None) for name in "ab"]
    found = read_probes(write(tmp_path / "1.json", *exports))
    assert [result.series for result in found.results] == ["out/a", "out/b"]
    runs = [make_row(f"{name}/seed1/{seen}.pth", seen) for name in "ab" for seen in (8, 16)]
    found = read_probes(write(tmp_path / "2.json", *runs))
    assert [result.series for result in found.results] == ["a/seed1"] * 2 + ["b/seed1"] * 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}', '{"results": []}', '"rows"'])
def test_what_is_no_file_of_figures_is_said_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json' holds no figures of probes"):
        read_probes(tmp_path / "x.json")


def test_other_sights_pass_over_figures_and_this_one_over_runs_without(tmp_path: Path) -> None:
    file = write(tmp_path / "p" / "probes.json", make_row("a/x.pth", 8))
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"iteration": i, "epoch": i, "total_loss": 1.0} for i in range(3)]
    (run / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
    figures, trained = subjects = open_subjects([str(file), str(run)])
    assert SIGHTS["curves"].see(subjects, SightOptions()).figures["left_out"] == []
    with pytest.raises(NothingToSee, match="'p/probes': figures of probes alone, and no model"):
        SIGHTS["attention"].see([figures], SightOptions())
    for read in (lambda: figures.cfg, lambda: figures.weights, lambda: figures.kind):
        with pytest.raises(NothingToSee, match="has figures of probes alone"):
            read()
    (about,) = describe_subjects([figures])  # on the page of a report
    assert about["fault"] == "'p/probes' has figures of probes alone, and no model"
    exhibit = SIGHTS["probes"].see(subjects, SightOptions())
    (left_out,) = exhibit.figures["left_out"]
    assert left_out.startswith("'run' has no probes.json, which tools/probe_backbone.py writes")
    with pytest.raises(NothingToSee, match=r"--json OUTPUT_DIR/probes\.json"):
        see_probes([trained], SightOptions())
