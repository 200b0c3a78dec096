# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectors joined on their encoder find what each of them finds alone; what cannot be joined."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from detectron2.modeling import BACKBONE_REGISTRY

import qbheat_det
from qbheat_det.checkpoint import info_of, load_run_config, read_weights, save_weights
from qbheat_det.config import dump_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import assemble_run
from qbheat_det.engine.run_flags import RunFlags
from qbheat_det.export.agreement import build_reference
from qbheat_det.export.graph import build_exportable
from qbheat_det.inference.predict import build_predictor
from tests.export.tiny_models import TwoMaps, make_config, save, save_model
from tests.tool_modules import load_tool, refuse
from tests.toy_set import draw_toy_set

join = load_tool("join").main


def save_named(folder, kind, names, **seeds):
    """Writes a tiny detector of these classes; returns the path of its weights."""
    cfg = make_config(kind)
    cfg.MODEL.CLASS_NAMES = names
    cfg.MODEL.CATEGORY_IDS = list(range(1, len(names) + 1))
    return save_model(folder, cfg, **seeds)


def join_files(folder, *weights, words=()):
    """Joins detectors with the tool; returns the path of the new file."""
    output = str(folder / "joined.safetensors")
    flags = [word for name in weights for word in ("--weights", name)]
    join([*flags, "--output", output, *words])
    return output


def find(weights, images, num_images=1):
    """Returns (image, class name, score, box) of all detections, in batches of ``num_images``."""
    cfg = load_run_config(weights, device="cpu")
    model = build_predictor(cfg).model
    rows = []
    for start in range(0, len(images), num_images):
        batch = [{"image": image} for image in images[start : start + num_images]]
        with torch.no_grad():
            outputs = model(batch)
        for index, output in enumerate(outputs, start=start):
            found = output["instances"]
            for label, score, box in zip(
                found.pred_classes.tolist(),
                found.scores.tolist(),
                found.pred_boxes.tensor.tolist(),
                strict=True,
            ):
                rows.append((index, cfg.MODEL.CLASS_NAMES[label], score, tuple(box)))
    return sorted(rows)


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    sizes = [(64, 80), (50, 96), (75, 61)]  # a batch of them is padded
    return [torch.randint(0, 256, (3, *size), generator=generator).float() for size in sizes]


@pytest.mark.parametrize("num_images", [1, 3])
@pytest.mark.parametrize(
    "kinds", [("retinanet", "retinanet"), ("two_maps", "fcos"), ("mf_detr", "mf_detr")]
)
def test_joined_detectors_find_what_each_finds_alone(kinds, num_images, images, tmp_path):
    alone = []
    for index, kind in enumerate(kinds):
        names = [f"{index} {letter}" for letter in ("ab" if kind == "mf_detr" else "abc")]
        alone.append(save_named(tmp_path / str(index), kind, names, head_seed=index))
    joined = join_files(tmp_path, *alone)
    expected = [find(weights, images, num_images) for weights in alone]
    assert all(expected)
    assert find(joined, images, num_images) == sorted(itertools.chain(*expected))


def test_a_joined_detector_can_be_joined_and_the_first_detector_finds_a_class(
    images, tmp_path, capsys
):
    first = save_named(tmp_path / "1", "two_maps", ["a", "b", "c"], head_seed=1)
    second = save_named(tmp_path / "2", "two_classes", ["d", "b"], head_seed=2)
    third = save_named(tmp_path / "3", "two_classes", ["e", "d"], head_seed=3)
    both = join_files(tmp_path, first, second)
    assert f"'b' is a class of several detectors: that of '{first}'" in capsys.readouterr().out
    (tmp_path / "more").mkdir()
    joined = join_files(tmp_path / "more", both, third)
    info = info_of(joined)
    assert (info.class_names, info.category_ids) == (("a", "b", "c", "d", "e"), (1, 2, 3, 4, 5))
    seconds = [row for row in find(second, images) if row[1] == "d"]
    thirds = [row for row in find(third, images) if row[1] == "e"]
    assert seconds
    assert thirds
    assert find(joined, images) == sorted([*find(first, images), *seconds, *thirds])


def test_a_limit_of_detections_keeps_the_best_of_all(images, tmp_path):
    parts = [
        save_named(tmp_path / str(seed), "two_classes", [f"{seed}", f"{seed}b"], head_seed=seed)
        for seed in range(2)
    ]
    joined = join_files(tmp_path, *parts)
    cfg = load_run_config(joined, device="cpu", opts=["TEST.DETECTIONS_PER_IMAGE", "7"])
    found = build_predictor(cfg).model([{"image": images[0]}])[0]["instances"]
    scores = [score for _, _, score, _ in find(joined, images[:1])]
    assert found.scores.tolist() == sorted(scores, reverse=True)[:7]
    # A higher limit is that of each detector too.
    cfg = load_run_config(joined, device="cpu", opts=["TEST.DETECTIONS_PER_IMAGE", "500"])
    assert len(build_predictor(cfg).model([{"image": images[0]}])[0]["instances"]) > len(scores)


def test_the_exported_graph_has_the_joined_detections(tmp_path):
    first = save_named(tmp_path / "1", "two_maps", ["a", "b", "c"], head_seed=1)
    second = save_named(tmp_path / "2", "two_classes", ["d", "b"], head_seed=2)
    cfg = load_run_config(join_files(tmp_path, first, second), device="cpu")
    predictor = build_predictor(cfg)
    image = np.random.default_rng(0).integers(0, 256, (75, 90, 3), dtype=np.uint8)
    expected = build_reference(predictor, cfg, "detection")(image)
    pixels = torch.from_numpy(np.stack([image, image]))
    boxes, scores, labels, counts = build_exportable(predictor.model, cfg)(pixels)
    for index in range(2):
        number = int(counts[index])
        assert number == int(expected["counts"][0])
        np.testing.assert_allclose(
            scores[index, :number], expected["scores"][0, :number], rtol=1e-4
        )
        np.testing.assert_allclose(boxes[index, :number], expected["boxes"][0, :number], atol=0.01)
        assert labels[index, :number].tolist() == expected["labels"][0, :number].tolist()


@BACKBONE_REGISTRY.register()
class OtherPadding(TwoMaps):
    """Has the tensors of ``TwoMaps``, and pads in another way."""

    def __init__(self, cfg, input_shape):
        super().__init__(cfg, input_shape)
        self.coarse.padding_mode = "reflect"


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("two_classes", {"MODEL__FPN__BOTTOM_UP": "OtherPadding"}, "'coarse' is Conv2d"),
        ("two_classes", {"backbone_seed": 5}, r"coarse\.weight.*--freeze"),
        ("two_classes", {"INPUT__MIN_SIZE_TEST": 80}, "INPUT.MIN_SIZE_TEST is 64 and 80"),
        ("two_classes", {"INPUT__FORMAT": "BGR"}, "INPUT.FORMAT is RGB and BGR"),
        ("two_classes", {"MODEL__RETINANET__SCORE_THRESH_TEST": 0.3}, "SCORE_THRESH_TEST"),
        ("two_classes", {"MODEL__META_ARCHITECTURE": "RetinaNet"}, "RetinaNet cannot be joined"),
        ("qb_heat", {}, "names no classes"),
    ],
)
def test_detectors_that_cannot_be_joined_are_refused(kind, changes, named, tmp_path, capsys):
    first = save(tmp_path / "1", "two_maps")
    seeds = {key: changes.pop(key) for key in ("backbone_seed",) if key in changes}
    second = save_model(tmp_path / "2", make_config(kind, **changes), **seeds)
    words = ["--weights", first, "--weights", second, "--output", str(tmp_path / "x.safetensors")]
    message = refuse(join, words, capsys)
    assert re.search(named, message), message
    assert not (tmp_path / "x.safetensors").exists()


def test_files_that_cannot_be_parts_are_refused(tmp_path, capsys):
    first = save(tmp_path / "1", "two_maps")
    output = str(tmp_path / "x.safetensors")

    def message(other):
        words = ["--weights", first, "--weights", str(other), "--output", output]
        return refuse(join, words, capsys)

    assert "find all classes" in message(first)
    second = save(tmp_path / "2", "two_classes")
    state, info = read_weights(second)
    changed = tmp_path / "changed.safetensors"
    name = "backbone.bottom_up.coarse.weight"
    for new_state, changes, named in (
        ({**state, name: state[name].half()}, {}, "half precision"),
        ({**state, name: state[name] * torch.nan}, {}, f"'{changed}'.*NaN"),
        ({**state, "more": torch.ones(1)}, {}, f"'{changed}'.*more"),
        (state, {"class_names": ("cat", "cat")}, "a name and an id of its own"),
        (state, {"category_ids": (1,)}, "a name and an id of its own"),
    ):
        save_weights(str(changed), new_state, dataclasses.replace(info, **changes))
        found = message(changed)
        assert re.search(named, found), found
    # They pad images to other multiples.
    pair = [save(tmp_path / "3", "retinanet"), save(tmp_path / "4", "mf_detr")]
    words = [word for weights in pair for word in ("--weights", weights)]
    assert "multiples" in refuse(join, [*words, "--output", output], capsys)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"PARTS": []}, "PARTS"),
        ({"PARTS": [1, 2]}, "PARTS"),
        ({"CLASS_INDICES": [[0, 1, 2]]}, "CLASS_INDICES"),
        ({"CLASS_INDICES": [[0, 1, 2], [3, 9]]}, "CLASS_INDICES"),
        ({"CLASS_INDICES": [[0, 0, 0], [0, 0]]}, "CLASS_INDICES"),
        ({"CLASS_INDICES": [[0, 1, 2, 3], [4]]}, "CLASS_INDICES"),
        ({"CLASS_INDICES": [[0, 1, 2], [3, "4"]]}, "integers"),
        ({"FOO": 1}, "FOO"),
        ({"MODEL.PIXEL_MEAN": [0, 0, 0]}, "PIXEL_MEAN"),
        ({"MODEL.RETINANET": 3}, "MODEL.RETINANET"),
        ({"MODEL.LOAD_PROPOSALS": True}, "LOAD_PROPOSALS"),
        ({"MODEL.RETINANET.SCORE_THRESH_TEST": 0.99}, "SCORE_THRESH_TEST"),
        ({"MODEL.RETINANET.NUM_CLASSES": "3"}, "NUM_CLASSES"),
        ({"MODEL.RETINANET.NUM_CLASSES": -1}, "NUM_CLASSES"),
        ({"TEST.DETECTIONS_PER_IMAGE": 0}, "DETECTIONS_PER_IMAGE"),
        ({"MODEL.META_ARCHITECTURE": "Nope"}, "Nope"),
        ({"MODEL.META_ARCHITECTURE": "JoinedDetectors"}, "JoinedDetectors"),
        ({"MODEL.META_ARCHITECTURE": "RetinaNet"}, "RetinaNet"),
    ],
)
def test_a_stranger_s_config_is_checked(changes, named, joined_pair, tmp_path):
    state, info = read_weights(joined_pair)
    cfg = load_run_config(joined_pair, device="cpu")
    node = cfg.MODEL.JOINED
    if set(changes) <= set(node):
        node.update(changes)
    else:
        node.PARTS = [{**node.PARTS[0], **changes}, *node.PARTS[1:]]
    path = str(tmp_path / "crafted.safetensors")
    save_weights(path, state, dataclasses.replace(info, config=dump_config(cfg)))
    with pytest.raises(UserError, match=named):
        qbheat_det.load(path)


@pytest.fixture(scope="module")
def joined_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    parts = [
        save_named(folder / "1", "two_maps", ["a", "b", "c"], head_seed=1),
        save_named(folder / "2", "two_classes", ["d", "e"], head_seed=2),
    ]
    return join_files(folder, *parts)


def test_one_detector_another_suffix_and_an_existing_file_are_refused(tmp_path, capsys):
    weights = save(tmp_path / "run", "two_maps")
    output = tmp_path / "x.safetensors"
    assert "at least two" in refuse(join, ["--weights", weights, "--output", "x"], capsys)
    words = ["--weights", weights, "--weights", weights, "--output"]
    assert ".safetensors" in refuse(join, [*words, str(tmp_path / "x.pth")], capsys)
    output.write_bytes(b"mine")
    assert "--overwrite" in refuse(join, [*words, str(output)], capsys)
    assert output.read_bytes() == b"mine"


def test_a_joined_detector_predicts_from_python_and_cannot_be_trained(tmp_path):
    parts = [save_named(tmp_path / n, "two_classes", [n, f"{n}b"]) for n in "ab"]
    joined = str(tmp_path / "joined.safetensors")
    detector = qbheat_det.join(parts, joined)
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    assert {box.class_name for box in detector.predict(image, threshold=0)} <= {
        "a",
        "ab",
        "b",
        "bb",
    }
    with pytest.raises(UserError, match="list"):
        qbheat_det.join(parts[0], joined)
    data = str(draw_toy_set(tmp_path, 2, name="shapes", seed=0))
    with pytest.raises(UserError, match="qbheat join"):
        assemble_run(RunFlags(data=data, weights=joined, output=str(tmp_path / "run")))
    with pytest.raises(UserError, match="qbheat join"):
        detector.model.train()([{"image": torch.zeros(3, 64, 64)}])
