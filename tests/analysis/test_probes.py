# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Results of probes and curves of runs: read from files, averaged, drawn apart where needed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.analysis.curves import (
    draw_curves,
    find_quantities,
    read_series,
    select_curve,
)
from qbheat_det.analysis.probes import (
    Decoder,
    ProbeResult,
    choose_statistics,
    draw_probes,
    plot_by_decoder,
    plot_by_images,
    read_probes,
)
from qbheat_det.analysis.run import FigureOptions, Run, open_runs
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable

SETTING = {"contents": [1, 2], "num_classes": 3, "size": 128, "tran": {"width": 192}}
KNN, DEEP = Decoder(0), Decoder(2, 4, 192)
NARROW, WIDE = (Decoder(2, 1, width) for width in (192, 768))


def make_row(
    backbone: str, seen: int | None, probe: str = "knn", *, top1: float | None = 50.0, bn: int = 0
) -> dict[str, Any]:
    return {"backbone": backbone, "digest": backbone, "images_seen": seen, "recalibrated": bn,
            "probe": probe, "top1": top1, "top1_standard_error": 2.5}  # fmt: skip


def write(path: Path, *rows: dict[str, Any], **setting: Any) -> Path:
    """Writes a file as tools/probe_backbone.py does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": SETTING | setting, "rows": rows}))
    return path


def make_result(
    series: str = "run", seen: int | None = 64, decoder: Decoder = KNN, top1: float = 10.0,
    *, error: float = 1.0, recalibrated: bool = False,
) -> ProbeResult:  # fmt: skip
    return ProbeResult(series, f"{series}.pth", seen, recalibrated, decoder, top1, error)


def test_seeds_are_averaged_checkpoints_joined_and_random_backbones_keep_both_statistics() -> None:
    stored = [make_result(), make_result("random", 0), make_result("other")]
    recalibrated = [make_result(recalibrated=True), make_result("random", 0, recalibrated=True)]
    assert [(one.series, one.recalibrated) for one in choose_statistics(stored + recalibrated)] == [
        ("random, as initialized", False), ("other", False), ("run", True), ("random", True)
    ]  # fmt: skip
    heights = {WIDE: 40.0, KNN: 5.0, DEEP: 30.0, NARROW: 20.0}
    results = [make_result(decoder=one, top1=top1, error=2.0) for one, top1 in heights.items()]
    results += [make_result(seen=8, top1=99.0)]  # an earlier checkpoint
    results += [make_result("other", top1=top1) for top1 in (10.0, 12.0)]
    (chart,) = plot_by_decoder(results).axes
    lines = [list(container[0].get_ydata()) for container in chart.containers]
    assert lines == [[5], [20, 40], [30], [11]]
    (segment, _) = chart.containers[1][2][0].get_segments()
    assert [y for _, y in segment] == [18, 22]  # one standard error
    results = [make_result("long", seen, top1=seen) for seen in (128, 64)]
    results += [make_result("random", 0, top1=top1) for top1 in (4.0, 6.0)]
    (knn,) = plot_by_images([*results, make_result("unknown", None)]).axes
    assert [list(container[0].get_xdata()) for container in knn.containers] == [[64, 128]]
    assert list(knn.get_lines()[-1].get_ydata()) == [5.0, 5.0]


def test_checkpoints_and_random_backbones_of_one_file(tmp_path: Path) -> None:
    rows = [make_row(f"a/model_{seen}.pth", seen, probe, top1=seen)
            for seen in (8, 16) for probe in ("knn", "linear", "tran-1", "tran-1:384")]  # fmt: skip
    rows += [make_row(f"random, seed {seed}", 0, top1=seed, bn=bn)
             for seed in (1, 2) for bn in (0, 9)]  # fmt: skip
    rows.append(make_row("a/model_16.pth", 16, "tran-4", top1=None))  # null stands for nan
    file = write(tmp_path / "out" / "probes.json", *rows)
    figure = draw_probes([Run.open(file)], FigureOptions())
    assert list(figure.images) == ["decoders", "images_seen"]
    assert figure.table.header[4:] == (
        "kNN (%)", "linear (%)", "tran-1, width 192 (%)", "tran-1, width 384 (%)"
    )  # fmt: skip
    lines = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in figure.table.rows]
    assert lines[0][1:] == ["model_8.pth", "8", "as stored", *["8.00 ± 2.50"] * 4]
    assert lines[3] == ["random", "random, seed 1", "0", "whole images", "1.00 ± 2.50", *[""] * 3]
    results = figure.data["runs"]["out/probes"]["results"]
    assert len(results) == 12
    assert results[3]["decoder"] == "tran-1, width 384"


def test_series_are_runs_exports_or_the_objectives_of_a_comparison(tmp_path: Path) -> None:
    exports = [make_row(f"out/{name}.safetensors", None) for name in "ab"]
    results = read_probes(write(tmp_path / "1.json", *exports))[1]
    assert [result.series for result in results] == ["out/a", "out/b"]
    runs = [make_row(f"{name}/seed1/{seen}.pth", seen) for name in "ab" for seen in (8, 16)]
    results = read_probes(write(tmp_path / "2.json", *runs))[1]
    assert [result.series for result in results] == ["a/seed1"] * 2 + ["b/seed1"] * 2
    rows = [make_row(f"{seed}/x.pth", 8) | {"series": "qb_heat"} for seed in (1, 2)]
    (tmp_path / "cmp").mkdir()
    comparison = Run.open(write(tmp_path / "cmp" / "comparison.json", *rows).parent)
    figure = draw_probes([comparison], FigureOptions())
    assert {result["series"] for result in figure.data["runs"]["cmp"]["results"]} == {"cmp"}


def test_results_on_other_images_are_left_out_and_other_files_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", make_row("a/x.pth", 8))
    write(tmp_path / "b.json", make_row("b/x.pth", 8), size=224)
    write(tmp_path / "c.json", make_row("c/x.pth", 8), contents=[1, 3])
    (tmp_path / "bad.json").write_text('{"rows": [3]}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").touch()
    paths = [f"{name}={tmp_path / name}.json" for name in ("a", "b", "c", "bad")]
    runs = open_runs([*paths, str(tmp_path / "run")])
    figure = draw_probes(runs, FigureOptions())
    assert list(figure.data["runs"]) == ["a", "b"]
    assert len(figure.data["left_out"]) == 3
    with pytest.raises(UserError, match=r"bad\.json"):
        draw_probes(runs[3:4], FigureOptions())
    with pytest.raises(NotApplicable, match=r"probes\.json"):
        draw_probes(runs[4:], FigureOptions())

    for text in ("", "[]", "{}", '{"setting": {}, "rows": []}', '"rows"'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match=r"x\.json"):
            read_probes(tmp_path / "x.json")


# Logged every 10 steps. Killed after iteration 29, and resumed from a checkpoint after 19.
RESUMED = [
    {"iteration": 9, "epoch": 0.5, "total_loss": 4.0},
    {"iteration": 19, "epoch": 1.0, "total_loss": 3.0},
    {"iteration": 29, "epoch": 1.5, "total_loss": 9.0},
    {"iteration": 29, "epoch": 1.5, "total_loss": 2.0},
    {"iteration": 34, "epoch": 1.75, "bbox/AP": 12.0},
    {"iteration": 39, "epoch": 2.0, "total_loss": math.inf},
]


def write_run(
    folder: Path, *opts: Any, records: list[dict[str, Any]] | None = None, epochs: int = 2
) -> Run:
    folder.mkdir()
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.EPOCHS = 8, float(epochs)
    cfg.OUTPUT_DIR = str(folder)
    cfg.merge_from_list(list(opts))
    (folder / "config.yaml").write_text(cfg.dump())
    records = records or [
        {"iteration": 9, "epoch": 1, "total_loss": 40.0, "lr": 0.1, "bbox/AP": 1.0},
        {"iteration": 10 * epochs - 1, "epoch": epochs, "total_loss": 2.0, "bbox/AP": 5.276},
    ]
    (folder / "metrics.json").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return Run.open(folder, device="cpu")


def test_positions_and_values_of_a_resumed_run_are_those_by_hand(tmp_path: Path) -> None:
    resumed = write_run(tmp_path / "resumed", records=RESUMED)
    steps = [10, 20, 30, 35, 40]
    assert select_curve(resumed, "iteration", "steps")[0] == steps
    assert select_curve(resumed, "iteration", "images")[0] == [8 * n for n in steps]
    assert select_curve(resumed, "iteration", "epochs")[0] == [0.5, 1.0, 1.5, 1.75, 2.0]

    positions, values = select_curve(resumed, "total_loss", "epochs")
    assert positions == [0.5, 1.0, 1.5, 2.0]
    assert values[:3] == [4.0, 3.0, 2.0]
    assert math.isnan(values[3])
    assert select_curve(resumed, "bbox/AP", "images") == ([280.0], [12.0])
    assert select_curve(resumed, "bbox/AP50", "images") == ([], [])
    assert read_series([{"iteration": 1, "a": math.nan}], "a") == ([], [])


def test_quantities_leave_out_single_classes_and_inner_blocks() -> None:
    keys = ["lr", "bbox/AP-cat", "bbox/APs", "bbox/AP50", "loss_ce_0", "loss_ce", "knn/top1",
            "total_loss", "data_time", "reconstruction/loss_corner"]  # fmt: skip
    found = find_quantities([{"iteration": 0, "never": math.nan, **dict.fromkeys(keys, 1.0)}])
    assert list(found) == [
        "total_loss", "loss_ce", "reconstruction/loss_corner", "bbox/AP50", "knn/top1", "lr"
    ]  # fmt: skip


def test_each_model_has_its_losses_and_all_share_scores(tmp_path: Path) -> None:
    models = {"a": "QBHeat", "b": "MFDETR", "c": "QBHeat"}
    for name, model in models.items():
        write_run(tmp_path / name, "MODEL.META_ARCHITECTURE", model)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.yaml").touch()
    runs = open_runs([str(tmp_path / name) for name in (*models, "none")], device="cpu")
    figure = draw_curves(runs, FigureOptions())
    titles = "Total loss, QBHeat, Total loss, MFDETR, bbox/AP on the test set."
    assert figure.images["all"].caption == titles
    assert figure.data["runs"]["b"]["bbox/AP"] == {"epochs": [1.0, 2.0], "values": [1.0, 5.276]}
    assert [text[:6] for text in figure.data["left_out"]] == ["'none'"]
    row = dict(zip(figure.table.header, figure.table.rows[0], strict=True))
    assert (row["bbox/AP"], row["total_loss"]) == ("5.276", "2")
    with pytest.raises(NotApplicable):
        draw_curves(runs[-1:], FigureOptions())
    assert draw_curves(runs[:1], FigureOptions(), axis="images").data["axis"] == "images"
