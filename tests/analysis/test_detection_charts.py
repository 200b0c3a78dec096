# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of detections: what is in them, for one run and for several, a class and a hundred."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from qbheat_det.analysis import detection_charts
from qbheat_det.analysis.detection_charts import (
    MOST_BARS,
    choose_classes,
    plot_ap_of_classes,
    plot_ap_of_sizes,
    plot_class_precision_recall,
    plot_precision_recall,
)
from qbheat_det.analysis.detection_scores import DetectionScores

NAMES = ["eel", "_$ray$", "crab"]
NAN = float("nan")


def _scores(class_ap: list[float]) -> DetectionScores:
    ap = np.array(class_ap)
    recall = np.linspace(0, 1, 101)
    fall = np.where(recall[:, None] < ap / 100, 0.5, 0.0)
    fall[:, np.isnan(ap)] = np.nan
    return DetectionScores(
        summary={"AP": 20.0, "AP50": 40.0, "AP75": 10.0, "APs": NAN, "APm": 5.0, "APl": 30.0},
        class_ap=ap,
        class_ap50=ap,
        num_boxes=np.where(np.isnan(ap), 0, 10 + np.arange(len(ap))),
        num_of_size={"APs": 0, "APm": 7, "APl": 3},
        recall=recall,
        precision=np.stack([fall, fall / 2]),
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures themselves, instead of their files, which take half a second each."""
    figures: list[Figure] = []

    def keep(figure: Figure, *args: object) -> bytes:
        figures.append(figure)
        return b""

    monkeypatch.setattr(detection_charts, "encode", keep)
    return figures


def test_files_are_whole_in_both_themes_with_strange_names() -> None:
    scores = {"_one$": _scores([10.0, NAN, 30.0]), "other": _scores([0.0, NAN, 0.0])}
    ElementTree.fromstring(plot_ap_of_classes(scores, NAMES, theme="dark"))
    ElementTree.fromstring(plot_precision_recall(scores, theme="light"))


def test_bars_of_sizes_are_as_high_as_the_ap_and_name_their_boxes(drawn: list[Figure]) -> None:
    plot_ap_of_sizes({"one": _scores([20.0]), "other": _scores([30.0])})
    axes = drawn[0].axes[0]
    assert [bar.get_height() for bar in axes.containers[0]] == [20, 40, 10, 0, 5, 30]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["AP", "AP50", "AP75", "small\n0 boxes", "medium\n7 boxes", "large\n3 boxes"]
    assert axes.get_ylabel() == "AP (%)"
    assert axes.get_title()
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["one", "other"]
    centres = [bar.get_x() + bar.get_width() / 2 for c in axes.containers for bar in c]
    assert len(set(np.round(centres, 6))) == 12  # no bar hides another


def test_classes_stand_in_order_of_their_mean_with_those_without_boxes_last(
    drawn: list[Figure],
) -> None:
    scores = {"one": _scores([10.0, NAN, 30.0]), "other": _scores([50.0, NAN, 0.0])}
    assert choose_classes(scores) == [0, 2, 1]
    plot_ap_of_classes(scores, NAMES)
    axes = drawn[0].axes[0]
    assert [bar.get_width() for bar in axes.containers[0]] == [10, 30, 0]
    assert [bar.get_width() for bar in axes.containers[1]] == [50, 0, 0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["eel (10)", "crab (12)", r" _\$ray\$ (0)"]
    top, last = axes.containers[0][0], axes.containers[0][2]
    y = axes.transData.transform([(0, top.get_y()), (0, last.get_y())])[:, 1]
    assert y[0] > y[1]  # the best is on top
    assert "no boxes" in [text.get_text() for text in axes.texts]


def test_of_many_classes_the_best_and_the_worst_are_drawn() -> None:
    order = choose_classes({"one": _scores([float(k) for k in range(100)] + [NAN])})
    assert len(order) == MOST_BARS
    assert order[:2] == [99, 98]
    assert order[-1] == 0


def test_curves_are_means_over_the_classes_with_boxes(drawn: list[Figure]) -> None:
    plot_precision_recall({"one": _scores([50.0, NAN, 100.5])})
    first, second = drawn[0].axes
    (line,) = first.get_lines()
    precision = np.asarray(line.get_ydata())
    np.testing.assert_allclose(precision[:50], 0.5)
    np.testing.assert_allclose(precision[51:], 0.25)
    np.testing.assert_allclose(np.asarray(second.get_lines()[0].get_ydata()), precision / 2)
    assert (first.get_xlabel(), first.get_ylabel()) == ("recall", "precision")
    assert "0.50" in first.get_title()
    assert "0.75" in second.get_title()
    assert not drawn[0].legends  # one run needs none
    assert first.get_xlim()[1] == 1
    # Two panels that are to be compared have one range, which ends where the longest curve does.
    assert first.get_xlim() == second.get_xlim()
    assert first.get_ylim() == second.get_ylim() == pytest.approx((0, 0.54))


def test_each_class_with_boxes_has_axes_those_with_most_first(drawn: list[Figure]) -> None:
    scores = {"one": _scores([10.0, NAN, 30.0]), "other": _scores([0.0, NAN, 0.0])}
    plot_class_precision_recall(scores, NAMES)
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles == ["crab (12)", "eel (10)", ""]
    assert len(drawn[0].axes[0].get_lines()) == 2
    crab, eel, _ = drawn[0].axes  # curves that end at a recall of 0.3 and of 0.1
    assert crab.get_xlim() == eel.get_xlim() == pytest.approx((0, 1.08 * 0.29))
    assert crab.get_ylim() == eel.get_ylim() == pytest.approx((0, 0.54))
    with pytest.raises(ValueError, match="no class"):
        plot_class_precision_recall({"one": _scores([NAN])}, NAMES)


def test_more_runs_than_colours_are_told_apart_all_the_same(drawn: list[Figure]) -> None:
    runs = {f"run {i}": _scores([10.0 + i]) for i in range(8)}
    plot_precision_recall(runs)
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn[0].axes[0].get_lines()}
    assert len(looks) == 8
    plot_ap_of_sizes(runs)
    bars = [container[0] for container in drawn[1].axes[0].containers]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 8


def test_without_anything_right_axes_begin_at_zero_and_say_so(drawn: list[Figure]) -> None:
    nothing = _scores([0.0, 0.0, NAN])
    for key in ("AP", "AP50", "AP75", "APm", "APl"):
        nothing.summary[key] = 0.0
    plot_ap_of_sizes({"one": nothing})
    plot_ap_of_classes({"one": nothing}, NAMES)
    plot_precision_recall({"one": nothing})
    sizes, classes, curves = drawn
    assert sizes.axes[0].get_ylim() == classes.axes[0].get_xlim() == (0, 1)
    for axes in curves.axes:
        assert [text.get_text() for text in axes.texts] == ["no detection is right"]


def test_long_names_of_classes_stay_apart(drawn: list[Figure]) -> None:
    names = [f"rather long class name number {k} of all the names that there are" for k in range(9)]
    scores = {"one": _scores([10.0] * 9)}
    plot_ap_of_classes(scores, names)
    plot_class_precision_recall(scores, names)
    bars = {label.get_text() for label in drawn[0].axes[0].get_yticklabels()}
    panels = {axes.get_title() for axes in drawn[1].axes}
    assert len(bars) == len(panels) == 9
    drawn[1].draw_without_rendering()
    for axes in drawn[1].axes:  # and none is cut at the edge
        assert axes.title.get_window_extent().x1 <= drawn[1].bbox.x1


def test_axes_keep_their_height_beside_twelve_runs(drawn: list[Figure]) -> None:
    for number in (1, 12):
        plot_ap_of_sizes({f"a run of some name {i}": _scores([10.0]) for i in range(number)})
    heights = []
    for figure in drawn:
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_window_extent().height / figure.dpi)
    assert heights[1] == pytest.approx(heights[0], rel=0.15)
