# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny runs and images that the tests of all figures share, and charts that are not encoded."""

import pytest

from qbheat_det.analysis.figures import write_figure

from .tiny_runs import TinyRuns, make_images


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Runs with random weights by name."""
    return TinyRuns(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of three images."""
    return make_images(tmp_path_factory.mktemp("photos"))


def check_files(figure, folder):
    """Writes a figure: strict JSON, and an image file that is not empty for each of its images."""
    about, *images = write_figure(figure, folder)
    assert about.name == f"{figure.name}.json"
    assert len(images) == len(figure.images)
    assert all(image.stat().st_size for image in images)
    assert all(image.alt for image in figure.images.values())
