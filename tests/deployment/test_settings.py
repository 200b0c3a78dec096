# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Arguments of deploy that there are not end in a sentence before anything is done."""

from typing import Any

import pytest
import torch

import qbheat_det
from qbheat_det.core.errors import UserError
from qbheat_det.deployment.settings import Settings


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("precision", "half", "precision is one of float32, bfloat16, not 'half'"),
        ("compile", "always", "compile is one of auto, off, not 'always'"),
        ("image_sizes", None, "image_sizes is a list of heights and widths in pixels, not None"),
        ("image_sizes", 800, "image_sizes is a list of heights and widths in pixels, not 800"),
        ("image_sizes", "800", "image_sizes is a list of heights and widths in pixels, not '800'"),
        ("image_sizes", [(800,)], "image_sizes are pairs of height and width in pixels, not"),
        ("image_sizes", [(True, True)], "image_sizes are pairs of height and width in pixels, not"),
        ("image_sizes", [(0, 8)], "image_sizes are pairs of height and width in pixels, not"),
        ("compile_after", -5, "compile_after is a number of images, 0 for never, not -5"),
        ("compile_after", "3", "compile_after is a number of images, 0 for never, not '3'"),
        ("compile_after", True, "compile_after is a number of images, 0 for never, not True"),
        ("keep_memory", "no", "keep_memory is True or False, not 'no'"),
        ("cache_folder", "", "cache_folder is the path of a folder, not ''"),
        ("cache_folder", 3, "cache_folder is the path of a folder, not 3"),
        ("tell", None, "tell takes a line of text, which None does not"),
    ],
)
def test_what_there_is_not_is_a_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Settings(**{name: value})
    assert str(refusal.value).startswith(sentence)
    with pytest.raises(UserError):
        qbheat_det.deploy(torch.nn.Identity(), **{name: value})


def test_lists_are_sizes_as_config_files_have_them() -> None:
    assert Settings(image_sizes=[[800, 1333]], compile_after=0).compile_after == 0
