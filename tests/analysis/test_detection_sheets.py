# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sheets of single boxes: what is cut out, where the boxes are drawn, and what is said."""

import numpy as np

from qbheat_det.analysis.detection_errors import judge_detections
from qbheat_det.analysis.detection_pictures import BACKGROUND
from qbheat_det.analysis.detection_sheets import (
    FOUND_COLOR,
    TRUTH_COLOR,
    Case,
    describe_alarm,
    describe_miss,
    draw_case,
    draw_sheet,
)
from tests.analysis.detection_cases import make_found, make_truth

NAMES = ["eel", "ray"]
NOTHING = np.zeros((0, 4))


def _case(box: list[float], *, truth: bool = True) -> Case:
    corners = np.array(box)
    if truth:
        return Case(1, corners, corners[None], NOTHING, ("a", "b"))
    return Case(1, corners, NOTHING, corners[None], ("a", "b"))


def _grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 90, np.uint8)


def test_a_cell_has_the_box_in_its_middle_and_as_much_again_around_it() -> None:
    image = _grey(400, 600)
    image[160:240, 260:340] = 200
    cell = draw_case(image, _case([260, 160, 340, 240]))
    assert cell.shape[1] == 240
    # 160 pixels a side become 240: the box begins at 60 and ends at 180.
    assert tuple(cell[120, 60]) == TRUTH_COLOR
    assert tuple(cell[120, 180]) == TRUTH_COLOR
    assert tuple(cell[60, 120]) == TRUTH_COLOR
    np.testing.assert_array_equal(cell[120, 120], 200)
    np.testing.assert_array_equal(cell[20, 20], 90)


def test_detections_have_a_colour_of_their_own() -> None:
    cell = draw_case(_grey(400, 600), _case([260, 160, 340, 240], truth=False))
    assert tuple(cell[120, 60]) == FOUND_COLOR


def test_at_an_edge_the_part_is_moved_into_the_image() -> None:
    cell = draw_case(_grey(400, 600), _case([0, 0, 80, 80]))
    np.testing.assert_array_equal(cell[200, 200], 90)
    np.testing.assert_array_equal(cell[200, 20], 90)
    assert tuple(cell[60, 120]) == TRUTH_COLOR  # its right side


def test_what_an_elongated_image_lacks_is_dark() -> None:
    cell = draw_case(_grey(50, 300), _case([0, 0, 300, 50]))
    np.testing.assert_array_equal(cell[120, 120], 90)
    assert tuple(cell[10, 120]) == BACKGROUND
    assert tuple(cell[230, 120]) == BACKGROUND


def test_boxes_outside_the_image_or_without_a_side_can_be_drawn() -> None:
    for box in ([500.0, 500.0, 520.0, 520.0], [10.0, 10.0, 10.0, 10.0], [-9.0, -9.0, 999.0, 5.0]):
        assert draw_case(_grey(40, 40), _case(box)).shape[1] == 240


def test_a_miss_says_how_large_it_is_and_what_was_on_it_at_best() -> None:
    truth = make_truth([(1, 3, [0, 0, 50, 50]), (1, 7, [60, 60, 90, 90])])
    judged = judge_detections(truth, make_found([(1, 7, [0, 0, 50, 40], 0.25)]))
    case = describe_miss(judged, 0, NAMES, image_area=100.0 * 100.0)
    assert case.lines == ("eel, 25 % of image", "at best: ray 0.25, IoU 0.80")
    np.testing.assert_allclose(case.found, [[0, 0, 50, 40]])
    case = describe_miss(judged, 1, NAMES, image_area=100.0 * 100.0)
    assert case.lines[1] == "nothing on it at any score"
    assert len(case.found) == 0


def test_a_false_alarm_says_its_score_and_what_is_near() -> None:
    truth = make_truth([(1, 3, [0, 0, 50, 50])], num_images=2)
    found = [(1, 7, [0, 0, 20, 50], 0.5), (1, 7, [60, 60, 70, 70], 0.4), (2, 3, [0, 0, 9, 9], 0.3)]
    judged = judge_detections(truth, make_found(found))
    lines = [describe_alarm(judged, d, NAMES).lines for d in range(3)]
    assert lines == [
        ("ray 0.50", "nearest: eel, IoU 0.40"),
        ("ray 0.40", "touches no box"),
        ("eel 0.30", "no box in the image"),
    ]


def test_lines_that_are_too_long_are_shortened_not_cut() -> None:
    long = Case(1, np.array([0.0, 0, 9, 9]), NOTHING, NOTHING, ("w" * 200, "b"))
    cell = draw_case(_grey(40, 40), long)
    assert cell.shape == draw_case(_grey(40, 40), _case([0, 0, 9, 9])).shape
    np.testing.assert_array_equal(cell[240:258, -3:], np.broadcast_to(BACKGROUND, (18, 3, 3)))


def test_a_sheet_has_the_cells_row_by_row() -> None:
    cells = [draw_case(_grey(40, 40), _case([0, 0, 9, 9]))] * 5
    sheet = draw_sheet(cells)
    height, width = cells[0].shape[:2]
    assert sheet.shape == (2 * height + 8, 4 * width + 24, 3)
    np.testing.assert_array_equal(sheet[:height, :width], cells[0])
