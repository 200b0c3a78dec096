# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A tiny detector, the zoo's smallest encoder, and a few photos."""

import pytest

import qbheat_det
from tests.data.pictures import draw, save, save_video
from tests.export.tiny_models import save as save_tiny


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("api") / "run", "two_maps")


@pytest.fixture(scope="session")
def detector(weights):
    return qbheat_det.load(weights, device="cpu")


@pytest.fixture(scope="session")
def encoder():
    return qbheat_det.load("qbheat://qb_heat/285M_caltech101", device="cpu")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Four images of three sizes, a video of three frames, and a file that is none."""
    folder = tmp_path_factory.mktemp("photos")
    for index, size in enumerate([(120, 90), (90, 120), (120, 90), (70, 70)]):
        save(folder / f"{index}.png", draw(*size, seed=index))
    save_video(folder / "v.avi", [draw(96, 64, seed=index) for index in range(3)])
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder
