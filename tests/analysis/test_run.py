# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs and checkpoints, loaded on first use; reports of figures that fail one at a time."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.attention import crop_squares, find_size
from qbheat_det.analysis.curves import find_quantities
from qbheat_det.analysis.figures import Figure, Image, NotApplicable, Table
from qbheat_det.analysis.report import FigureResult, write_page
from qbheat_det.analysis.run import FigureOptions, Run, choose_images, open_runs, run_each
from qbheat_det.core.errors import UserError
from qbheat_det.tasks import CLASSIFICATION, DETECTION
from tests.tool_modules import load_tool, refuse

from ..engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run
from .tiny_runs import make_images, retinanet_config, truncate, write_run


def test_a_folder_gives_its_final_or_last_checkpoint_config_and_metrics(tmp_path):
    weights = save_run(make_retinanet_config(), tmp_path / "mine", seed=3)
    lines = '{"iteration": 9, "lr": 0.1}\n7\n{"iteration": 1, "note": "\xff"}\n{"itera'
    odd = "".join(f'{{"iteration": {step}}}\n' for step in ('"a"', "NaN", "Infinity", "null"))
    (tmp_path / "mine" / "metrics.json").write_text(odd + lines, encoding="latin-1")
    run = Run.open(tmp_path / "mine", device="cpu")
    assert (run.label, run.folder) == ("mine", tmp_path / "mine")
    assert (run.task, str(run.weights)) == (DETECTION, weights)
    assert run.metrics == [{"iteration": 9, "lr": 0.1}]
    assert run.cfg.OUTPUT_DIR == str(tmp_path / "mine")
    stored = torch.load(weights, weights_only=True)["model"]
    torch.testing.assert_close(dict(run.model.state_dict()), stored, rtol=0, atol=0)
    assert run.model is run.model
    assert not run.model.training
    assert not any(parameter.requires_grad for parameter in run.model.parameters())
    run.require_task(DETECTION)
    with pytest.raises(NotApplicable, match="mine"):
        run.require_task(CLASSIFICATION)

    weights = Path(save_run(make_probe_config(), tmp_path / "run"))
    weights.rename(tmp_path / "run" / "model_0000009.pth")
    (tmp_path / "run" / "last_checkpoint").write_text("model_0000009.pth")
    assert Run.open(tmp_path / "run").weights.name == "model_0000009.pth"
    (tmp_path / "run" / "model_0000009.pth").unlink()
    young = Run.open(tmp_path / "run", device="cpu")
    assert young.task is DETECTION
    with pytest.raises(NotApplicable, match="run"):
        _ = young.model


def test_other_paths_and_broken_weights_are_refused(tmp_path):
    (tmp_path / "model.pkl").write_text("no weights")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "model.pkl"):
        with pytest.raises(UserError, match=path.name):
            Run.open(path)
    save_run(make_probe_config(), tmp_path / "run")
    (tmp_path / "model.pkl").rename(tmp_path / "run" / "model_final.pth")
    with pytest.raises(UserError):
        _ = Run.open(tmp_path / "run", device="cpu").model


def test_labels_are_short_unless_two_are_equal(tmp_path):
    paths = []
    for name in ("a/seed1/pretraining", "b/seed1/pretraining", "c/other"):
        save_run(make_probe_config(), tmp_path / name)
        paths.append(str(tmp_path / name))
    runs = open_runs([*paths, f"Ours={paths[0]}"])
    labels = [run.label for run in runs]
    assert labels == [*paths[:2], "other", "Ours"]
    assert runs[3].folder == tmp_path / "a/seed1/pretraining"
    for twice in ([f"x={paths[0]}", f"x={paths[1]}"], [paths[2], paths[2]]):
        with pytest.raises(UserError, match="LABEL=PATH"):
            open_runs(twice)


def test_broken_runs_are_left_out_with_their_label(tiny, tmp_path, caplog):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.json").write_text("")
    new, whole = Run.open(tmp_path / "new"), tiny.get("untrained")
    cut = truncate(whole, tmp_path)

    def compute(run):
        return sum(1 for _ in run.model.parameters())

    results = run_each([new, cut, whole], compute, nothing="nothing")
    assert list(results.by_label) == ["untrained"]
    assert [label in text for label, text in zip(("'new'", "'cut'"), results.left_out, strict=True)]
    assert len(results.draw("name", "Title", (), {}).explanation) == 1
    warnings = [r.getMessage() for r in caplog.records if "left out" in r.msg]
    assert warnings == [f"left out: {results.left_out[1]}"]  # a missing checkpoint is no error
    with pytest.raises(UserError, match=r"nothing: .*'new'.*'cut'"):
        run_each([new, cut], compute, nothing="nothing")
    with pytest.raises(NotApplicable, match=r"nothing: .*'new'"):
        run_each([new], compute, nothing="nothing")


def test_shared_images_are_spread_evenly_and_unreadable_ones_replaced(tiny, tmp_path):
    run, folder = tiny.get("untrained"), make_images(tmp_path, 8)

    def choose(number):
        entries, unreadable = choose_images([run], number, folder)
        return [Path(entry["file_name"]).name for entry in entries], unreadable

    assert choose(4) == (["0.png", "2.png", "4.png", "6.png"], [])
    (folder / "2.png").write_text("not an image")
    assert choose(4) == (["0.png", "3.png", "4.png", "6.png"], [str(folder / "2.png")])
    assert len(choose(99)[0]) == 7
    (entry,) = crop_squares(run.cfg, [str(folder / "0.png")])
    assert entry["image"].shape == (3, 64, 64)
    retinanet = tiny.get("retinanet")
    (entry,) = crop_squares(retinanet.cfg, [str(folder / "0.png")], 32)
    assert entry["image"].shape == (3, 32, 32)
    assert find_size([retinanet, run], 1) == 64
    for path in folder.iterdir():
        path.write_bytes(b"not an image")
    with pytest.raises(UserError):
        choose(3)
    with pytest.raises(UserError, match="missing"):
        choose_images([run], 3, tmp_path / "missing")
    with pytest.raises(NotApplicable, match="--images"):
        choose_images([run], 3, None)


def make_figure(runs, options):
    table = Table(("Run", "n", "why"), [("a", "1", "x < y"), ("b", "-2", "")])
    image = Image.from_rgb(np.zeros((20, 30, 3), np.uint8), alt='"a"', caption="<i>")
    data = {"number": options.num_images}
    return Figure("curves", "Wide <things>", ["words"], {"sheet": image}, data, table)


def fail(error):
    def draw(runs, options):
        raise error

    return draw


@pytest.fixture
def tool(monkeypatch):
    """tools/report.py with figures that draw, do not apply, fail, and are interrupted."""
    figures = {
        "curves": make_figure,
        "spectrum": fail(NotApplicable("no <linear> models")),
        "classes": fail(ZeroDivisionError("by zero")),
        "attention": fail(KeyboardInterrupt()),
    }
    monkeypatch.setattr("qbheat_det.analysis.report.load_figures", lambda: figures)
    return load_tool("report")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(write_run(tmp_path_factory.mktemp("runs") / "a", retinanet_config()))


def test_a_page_escapes_text_and_loads_nothing(tmp_path):
    drawn = FigureResult("curves", make_figure([], FigureOptions()))
    results = [drawn, drawn, FigureResult("S & T", reason="\udcff")]
    write_page(
        tmp_path / "new" / "page.html", "<title>", "Lead.", Table((), []), results, command="a <b>"
    )
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    for escaped in (
        "<h1>&lt;title&gt;</h1>",
        "S &amp; T",
        "x &lt; y",
        "a &lt;b&gt;",
        "\\udcff",
        "<figcaption>&lt;i&gt;",
        'alt="&#34;a&#34;"',
    ):
        assert escaped in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<script" not in text
    assert set(re.findall(r'href="#(\d)"', text)) == set(re.findall(r'section id="(\d)"', text))
    assert '<th scope="col" class="text">why</th>' in text  # columns of words on the left
    assert '<th scope="col">n</th>' in text


def test_a_report_has_every_figure_or_the_reason_why_not_and_after_an_interrupt_what_was_drawn(
    tool, run, tmp_path, capsys
):
    path = tmp_path / "page.html"
    words = [run, "--output", str(path), "--num-images", "3", "--only"]
    assert tool.main([*words, "spectrum", "curves"]) == 0
    text = path.read_text(encoding="utf-8")
    assert "Wide &lt;things&gt;" in text
    assert "no &lt;linear&gt; models" in text
    files = {file.name for file in (tmp_path / "page").iterdir()}
    assert files == {"curves.json", "curves_sheet.jpg"}
    assert json.loads((tmp_path / "page" / "curves.json").read_text())["data"] == {"number": 3}
    # A figure that fails costs itself and the exit code; files of an earlier report go.
    (tmp_path / "page" / "curves_mine.jpg").write_text("")
    assert tool.main([*words, "classes", "spectrum"]) == 1
    assert "classes: ZeroDivisionError: by zero" in capsys.readouterr().err
    left = {file.name for file in (tmp_path / "page").iterdir()}
    assert left == {"curves_mine.jpg"}
    assert tool.main([*words, "spectrum"]) == 1  # a page without figures
    assert "spectrum: no <linear> models" in capsys.readouterr().err

    with pytest.raises(SystemExit) as ended:
        tool.main([run, "--output", str(path), "--only", "curves", "attention"])
    assert ended.value.code == 130
    assert "Wide &lt;things&gt;" in path.read_text()


def test_the_result_of_one_run_stands_first_and_its_table_fits_a_phone(tmp_path):
    table = Table(("Run", *"abcdef"), [("mine", *"123456")])
    figure = Figure(
        "curves", "Curves", table=table, headline="Finds 3 of 4.", command="qbheat predict"
    )
    for runs in (1, 2):
        rows = [("mine", "detection")] * runs
        path = tmp_path / f"{runs}.html"
        write_page(
            path,
            "T",
            "Lead.",
            Table(("Run", "For"), rows),
            [FigureResult("curves", figure)],
            command="",
        )
    text = (tmp_path / "1.html").read_text()
    assert 0 < text.index("Finds 3 of 4.") < text.index("qbheat predict") < text.index("Lead.")
    header = re.search(r"<thead>.*?</thead>", text, flags=re.DOTALL)[0]
    assert re.findall(r">(\w+)</th>", header) == ["Run", "mine"]
    assert "Finds 3 of 4." not in (tmp_path / "2.html").read_text()  # of which of the runs?


def test_teacher_and_student_have_their_names():
    records = [
        {"iteration": step, "epoch": step, "bbox/AP": step, "student/bbox/AP": 2 * step}
        for step in range(3)
    ]
    titles = [title for title, _ in find_quantities(records).values()]
    assert titles == ["AP of the mean teacher on the test set", "AP of the student on the test set"]
    alone = [{"iteration": 1, "bbox/AP50": 1, "segm/AP50": 1, "knn/accuracy": 2}]
    titles = [title for title, _ in find_quantities(alone).values()]
    assert titles == ["AP50 on the test set", "segm/AP50 on the test set", "Accuracy: knn/accuracy"]


def test_flags_are_the_keyword_arguments_of_the_registered_figures():
    tool, figures = load_tool("report"), load_figures()
    for name in tool.FIGURES:
        parameters = inspect.signature(figures[name]).parameters.values()
        keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        assert set(tool.FLAGS.get(name, {})) == keywords, name


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--only aurora", "aurora"),
        ("nowhere --only spectrum", "nowhere"),
        ("--threshold nan", "--threshold"),
        ("--num-images many", "--num-images"),
        ("--num-images 0", "--num-images"),
        ("--output page.pdf", "page.pdf"),
    ],
)
def test_wrong_arguments_are_exit_code_2(tool, run, capsys, words, named):
    assert named in refuse(tool.main, [run, *words.split()], capsys)


@pytest.mark.parametrize("name", ["folder.html", "page.html", f"{'x' * 300}.html"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_drawn(
    tool, run, tmp_path, name
):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "page").write_text("")  # where the folder of page.html belongs
    with pytest.raises(SystemExit) as ended:
        tool.main([run, "--output", str(tmp_path / name), "--only", "attention"])
    assert ended.value.code == 2  # not 130: the figure was not begun
