# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The picture of confusions, from two classes to more than fit a side."""

import io
import re

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from qbheat_det.analysis import confusion_matrix
from qbheat_det.analysis.confusion_matrix import plot_confusion


def make_matrix(num_classes: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng(0)
    matrix = rng.poisson(0.05, (num_classes, num_classes))
    matrix[np.diag_indices(num_classes)] = 8
    matrix[0, 1] = 40
    return matrix.astype(np.int64)


@pytest.mark.parametrize("num_classes", [1, 2, 20, 600])
def test_it_can_be_drawn_for_few_classes_and_for_many(num_classes: int) -> None:
    matrix = make_matrix(max(num_classes, 2))[:num_classes, :num_classes]
    names = [f"class {i}" for i in range(num_classes)]
    with Image.open(io.BytesIO(plot_confusion(matrix, names, title="val"))) as picture:
        assert 600 < picture.width < 3000
        assert 600 < picture.height < 2200


def test_the_list_names_what_is_confused_most_and_how_often() -> None:
    matrix = make_matrix(12)
    svg = plot_confusion(matrix, [f"kind {i}" for i in range(12)], format="svg").decode()
    # Letters are drawn as shapes; matplotlib says in comments what they spell.
    lines = re.findall(r"<!-- (.*?) -->", svg, flags=re.DOTALL)
    text = "\n".join(lines)
    assert f"kind 0 → kind 1:  40 of {matrix[0].sum()}" in text
    wrong = matrix.sum() - matrix.trace()
    assert f"({wrong} of {matrix.sum()} images are wrong)" in text


def test_long_names_stay_apart_in_the_list() -> None:
    names = [f"a rather long name of class {i} among others of that kind" for i in range(3)]
    svg = plot_confusion(np.array([[1, 2, 0], [0, 3, 0], [1, 0, 3]]), names, format="svg").decode()
    named = {text.split(" →")[0] for text in re.findall(r"<!-- (.*?) -->", svg) if " →" in text}
    assert len(named) == 2


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["a$b$c", "$\\frac{", "tab\there", "\udcff", "猫", ""])
def test_any_name_of_a_folder_can_be_drawn(name: str) -> None:
    plot_confusion(np.eye(2, dtype=np.int64), [name, "other"])


def test_cells_of_many_classes_show_the_mean_of_right_and_the_largest_of_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confusion_matrix, "_MOST_CELLS", 3)
    shares = np.random.default_rng(0).random((5, 5))
    has_images = np.array([True, False, True, True, False])
    shares[~has_images] = 0
    pooled, per_cell = confusion_matrix._pool(shares, has_images)
    assert (pooled.shape, per_cell) == ((3, 3), 2)
    for i in range(3):
        for j in range(3):
            block = shares[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            right = block.diagonal()[has_images[2 * i : 2 * i + 2]] if i == j else block
            expected = block.max() if i != j else right.mean() if len(right) else 0
            assert pooled[i, j] == pytest.approx(expected)


def test_a_matrix_of_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="3 classes do not have a matrix"):
        plot_confusion(np.eye(2, dtype=np.int64), ["a", "b", "c"])
