# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Boxes judged by features: their classes, their fit, and only by other images."""

import numpy as np
import torch

from qbheat_det.api import load_encoder
from qbheat_det.labelling.appearance import (
    ImageMaps,
    describe_fit,
    describe_look,
    encode_files,
    judge_boxes,
    judge_by_others,
    pool,
    shift_boxes,
)
from qbheat_det.labelling.labels import ImageBoxes
from tests.data.pictures import draw, save

CLASSES = (3, 5)


def make_images(num_images=25):
    """Returns maps (4, 16, 16) of stride 8 with an object of each class, and the objects' boxes.

    A class has a channel of its own, which is 1 inside its object.
    """
    generator = np.random.default_rng(0)
    images = []
    annotated = []
    for _ in range(num_images):
        values = torch.from_numpy(generator.normal(0, 0.1, (4, 16, 16))).float()
        places = []
        for channel in (0, 1):
            x = 8 * channel + int(generator.integers(1, 4))
            y = int(generator.integers(1, 12))
            values[channel, y : y + 4, x : x + 4] += 1
            places.append([8.0 * x, 8.0 * y, 8.0 * x + 32, 8.0 * y + 32])
        images.append(ImageMaps({8: values.half()}, 1.0))
        labels = torch.tensor(CLASSES)
        annotated.append(ImageBoxes(torch.tensor(places).double(), labels, torch.ones(2)))
    return images, annotated


def test_wrong_classes_and_shifted_boxes_stand_out():
    images, annotated = make_images()
    wrong = annotated[4]._replace(classes=torch.tensor([5, 5]))
    moved = annotated[7].boxes.clone()
    moved[1] += 24
    labels = [*annotated]
    labels[4] = wrong
    labels[7] = annotated[7]._replace(boxes=moved)
    judged = judge_boxes(images, labels, annotated, CLASSES, seed=0)
    found = torch.stack([own.log_probabilities for own in judged.annotated]).argmax(dim=2)
    assert (found[:, 0] == 0).all()
    assert (found[[*range(7), *range(8, 25)], 1] == 1).all()
    misfits = torch.stack([own.misfit for own in judged.annotated])
    assert misfits.flatten().argmax() == 2 * 7 + 1
    copies = torch.stack([own.misfit for own in judged.shifted])
    assert copies.median() > misfits.median() + 1
    # Predicted boxes are judged like annotated ones of the same place.
    torch.testing.assert_close(judged.predicted[0].misfit, judged.annotated[0].misfit)
    again = judge_boxes(images, labels, annotated, CLASSES, seed=0)
    torch.testing.assert_close(again.annotated[3].misfit, judged.annotated[3].misfit)


def test_two_images_with_boxes_judge_each_other():
    images, annotated = make_images(10)
    nothing = ImageBoxes(*(values[:0] for values in annotated[0]))
    labels = [nothing] * 10
    labels[2] = annotated[2]
    labels[6] = annotated[6]
    for seed in (0, 10, 16):  # with 10 and 16, a plain permutation puts both into one part
        judged = judge_boxes(images, labels, annotated, CLASSES, seed=seed)
        for index in (2, 6):
            found = judged.annotated[index].log_probabilities.argmax(dim=1)
            assert found.tolist() == [0, 1]
            assert judged.annotated[index].misfit.isfinite().all()


def test_no_image_is_judged_by_its_own_boxes():
    sizes = [2, 0, 3, 1]
    features = [[torch.full((size, 1), float(index)) for index, size in enumerate(sizes)]]
    part = torch.tensor([0, 1, 0, 4])

    def fit(is_fitted):
        seen = set(torch.cat(features[0])[is_fitted[0]].flatten().tolist())

        def judge(inputs):
            assert not seen & set(inputs.flatten().tolist())
            return inputs * 2

        return judge

    (judged,) = judge_by_others(features, part, fit)
    assert [own.flatten().tolist() for own in judged] == [[0, 0], [], [4, 4, 4], [6]]


def test_shifts_are_a_quarter_to_the_whole_of_the_sides():
    boxes = torch.tensor([[10.0, 20, 30, 60]] * 200, dtype=torch.float64)
    own = ImageBoxes(boxes, torch.ones(200).long(), torch.ones(200))
    shifted = shift_boxes(own, np.random.default_rng(0)).boxes
    torch.testing.assert_close(shifted[:, 2:] - shifted[:, :2], boxes[:, 2:] - boxes[:, :2])
    length = ((shifted - boxes)[:, :2] / torch.tensor([20, 40])).norm(dim=1)
    assert 0.25 <= length.min() < 0.35
    assert 1.0 < length.max() <= 1.1


def test_features_have_a_grid_around_the_box():
    ramp = torch.arange(16.0).expand(1, 16, 16)  # the value is the column
    image = ImageMaps({8: ramp.half(), 32: ramp[:, :4, :4].half()}, 2.0)
    box = torch.tensor([[16.0, 16, 32, 32]])  # columns 4 to 8 of the map of stride 8
    grid = pool(image, box, 2)[8]
    torch.testing.assert_close(grid[0, 0, 0], torch.tensor([4.5, 6.5]))
    assert describe_fit(image, box).shape == (1, 25 + 2)
    assert describe_look(image, box).shape == (1, 4 + 2)


def test_files_that_cannot_be_read_have_no_maps(tmp_path, caplog):
    encoder = load_encoder("distill/285M", device="cpu")
    save(tmp_path / "good.png", draw(64, 48))
    (tmp_path / "bad.png").write_bytes(b"no image")
    good, bad = encode_files(encoder, [tmp_path / "good.png", tmp_path / "bad.png"])
    assert bad is None
    assert "bad.png" in caplog.text
    assert good.scale == 8
    assert all(values.dtype == torch.float16 for values in good.maps.values())
