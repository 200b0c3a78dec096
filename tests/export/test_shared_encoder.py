# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models split behind a shared backbone: the parts give the results of the whole models."""

import copy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.checkpoint import load_run_config, local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets import CELLS
from qbheat_det.export.agreement import build_reference
from qbheat_det.export.graph import build_exportable
from qbheat_det.export.shared_encoder import _pad_maps_of, split_models
from qbheat_det.inference.exported import SharedEncoderModel
from qbheat_det.inference.predict import build_predictor
from qbheat_det.tasks import CLASSIFICATION, find_task
from tests.export.tiny_models import build, make_config, save, save_photos
from tests.tool_modules import load_tool, refuse


def _exportable(kind, seeds=None, **changes):
    cfg = make_config(kind, **changes)
    return build_exportable(build(cfg, **(seeds or {})), cfg)


@pytest.mark.parametrize("kind", ["retinanet", "mf_detr"])
def test_heads_share_an_encoder_on_images_of_any_size(kind):
    models = {name: _exportable(kind, {"head_seed": seed}) for seed, name in enumerate("ab")}
    encoder, heads = split_models(models)
    images = torch.randint(0, 256, (2, 75, 90, 3), dtype=torch.uint8)
    with torch.no_grad():
        *maps, sizes = encoder(images)
        features = dict(zip(encoder.names, maps, strict=True))
        for name, model in models.items():
            outputs = heads[name]([features[read] for read in heads[name].names], sizes)
            torch.testing.assert_close(outputs, model(images), rtol=1e-5, atol=1e-5)


def test_an_fpn_pads_feature_maps_and_mf_detr_reads_those_of_the_whole_image():
    models = {name: _exportable(name) for name in ("retinanet", "mf_detr")}
    encoder, heads = split_models(models)
    assert set(encoder.names) == {"s8", "s16", "s16_expanded"}

    def run(name, images):
        *maps, sizes = encoder(images)
        features = dict(zip(encoder.names, maps, strict=True))
        return heads[name]([features[read] for read in heads[name].names], sizes)

    for size in ((64, 80), (75, 90)):  # resized to 64 x 80, and to 64 x 77
        images = torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8)
        with torch.no_grad():
            torch.testing.assert_close(run("mf_detr", images), models["mf_detr"](images))
            whole = models["retinanet"]
            x, sizes = whole.preprocessing(images)
            if size == (64, 80):  # is not padded
                expected = whole(images)
            else:
                # FPN and head of the whole model, on maps that are pasted into larger ones.
                fpn = copy.deepcopy(whole.backbone)
                maps = {"s8": torch.zeros(2, 48, 8, 10), "s16": torch.zeros(2, 128, 4, 5)}
                unpadded = fpn.bottom_up(x[..., :64, :77])
                for key, feature in unpadded.items():
                    maps[key] = torch.zeros(2, feature.shape[1], *maps[key].shape[2:])
                    maps[key][..., : feature.shape[2], : feature.shape[3]] = feature
                fpn.bottom_up = Mock(spec=torch.nn.Module, return_value=maps)
                expected = whole.head(fpn(x), sizes)
            torch.testing.assert_close(run("retinanet", images), expected)


def test_the_reference_of_a_padded_head_is_the_detector_alone_without_padding(tmp_path):
    weights = save(tmp_path / "run", "retinanet")
    cfg = load_run_config(weights, device="cpu")
    predictor = build_predictor(cfg)
    padding_maps = _pad_maps_of(predictor, 0)
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    for width, is_equal in ((80, True), (77, False)):
        results = []
        for each in (predictor, padding_maps):
            reference = build_reference(each, cfg, "detection")
            results.append(reference(image[:, :width])["scores"])
        assert np.array_equal(*results) == is_equal


def test_the_hash_depends_on_weights_and_preprocessing_of_the_encoder_only():
    models = (
        _exportable("two_maps", {"head_seed": 1}),
        _exportable("two_maps", {"head_seed": 2}),
        _exportable("two_maps", {"backbone_seed": 5}),
        _exportable("two_maps", INPUT__MIN_SIZE_TEST=80),
    )
    one, two, *others = (split_models({"a": model})[0].hash() for model in models)
    assert one == two
    assert len({one, *others}) == 3


@pytest.mark.parametrize(
    ("kind", "changes", "difference"),
    [
        ("two_maps", {"seeds": {"backbone_seed": 5}}, "coarse.weight.*MODEL.BACKBONE.FREEZE_AT"),
        ("two_maps", {"INPUT__MIN_SIZE_TEST": 80}, "size of test images.*INPUT.MIN_SIZE_TEST"),
        ("two_maps", {"INPUT__FORMAT": "BGR"}, "INPUT.FORMAT.*channel order"),
        ("mf_detr", {}, "type of the backbone"),
    ],
)
def test_models_that_cannot_share_an_encoder_are_refused(kind, changes, difference):
    models = {"fish": _exportable("two_classes"), "boats": _exportable(kind, **changes)}
    with pytest.raises(UserError, match=f"'boats'.*{difference}"):
        split_models(models)


@pytest.mark.parametrize("weights", [["fish.pth"], ["a=x.pth", "a=y.pth"], ["a b=fish.pth"]])
def test_heads_without_a_valid_name_are_refused(weights, capsys):
    words = ["--shared-encoder", "--output", "x", *(w for f in weights for w in ("--weights", f))]
    assert "NAME=FILE" in refuse(load_tool("export").main, words, capsys)


# Detectors' graphs are much larger, and take the exporter much longer.
@pytest.fixture(
    scope="module",
    params=[{"one": "classifier"},
            pytest.param({"one": "two_maps", "two": "two_classes"}, marks=pytest.mark.slow)],
    ids=["classifier", "detectors"],
)  # fmt: skip
def exported(request, tmp_path_factory):
    """A folder: the run of each head, ``photos``, and ``shared``, which the tool wrote.

    An older export was in ``shared``, beside a file of the user's own.
    """
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    root = tmp_path_factory.mktemp("exported")
    (root / "shared").mkdir()
    for name in ("encoder", "head_one", "mine"):
        (root / "shared" / f"{name}.onnx").write_bytes(b"older")
    arguments = ["--shared-encoder", "--images", save_photos(root / "photos"), "--overwrite"]
    arguments += ["--output", str(root / "shared")]
    for seed, (name, kind) in enumerate(request.param.items()):
        arguments += ["--weights", f"{name}={save(root / name, kind, head_seed=seed)}"]
    load_tool("export").main(arguments)
    return root


def _pixels(exported, index=0):
    return np.asarray(Image.open(exported / "photos" / f"{index}.png"))[None]


def _scores(result):
    """Returns the scores of the first image, whatever the head."""
    return result[0].scores if isinstance(result, list) else result[0]


def _compute_scores(weights, image):
    cfg = load_run_config(str(weights), device="cpu")
    predictor = build_predictor(cfg)
    if find_task(cfg) is CLASSIFICATION:
        return build_reference(predictor, cfg, "classification")(image)["scores"][0]
    scores = predictor(image[:, :, ::-1])["instances"].scores
    return scores.sort(descending=True).values.numpy()


def test_the_encoder_runs_once_and_every_head_gives_the_scores_of_its_model(exported, monkeypatch):
    files = {path.name: path.read_bytes() for path in (exported / "shared").iterdir()}
    assert [name for name, content in files.items() if content == b"older"] == ["mine.onnx"]
    model = SharedEncoderModel(exported / "shared", device="cpu")
    encode = Mock(side_effect=model.encode)
    monkeypatch.setattr(model, "encode", encode)
    found = model(_pixels(exported))
    assert encode.call_count == 1
    assert files.keys() == {"encoder.onnx", "mine.onnx", *(f"head_{name}.onnx" for name in found)}
    for name, result in found.items():
        weights = exported / name / "model_final.safetensors"
        expected = _compute_scores(weights, _pixels(exported)[0])
        np.testing.assert_allclose(_scores(result), expected, atol=1e-4)
    together = model(np.concatenate([_pixels(exported, 1)] * 3))["one"]
    alone = _scores(model.heads["one"](_pixels(exported, 1)))
    for index in range(3):
        scores = _scores(together[index : index + 1])
        np.testing.assert_allclose(scores, alone, rtol=1e-4, atol=1e-5)


def test_files_in_the_folder_are_kept(tmp_path, capsys):
    weights = save(tmp_path / "run", "classifier")
    for name, words in (("encoder.onnx", []), ("head_older.onnx", ["--overwrite"])):
        folder = tmp_path / name[:4]
        folder.mkdir()
        (folder / name).write_bytes(b"older")
        arguments = ["--shared-encoder", "--weights", f"a={weights}", "--output", str(folder)]
        assert name in refuse(load_tool("export").main, [*arguments, *words], capsys)
        assert [path.read_bytes() for path in folder.iterdir()] == [b"older"]


@pytest.mark.slow
def test_the_two_shipped_detectors_share_one_encoder(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    weights = {"retinanet": "retinanet/285M_bccd", "mf_detr": "mf_detr/211_285M_bccd"}
    cells = Image.open(CELLS / "val" / "bloodimage_00007.jpg")
    images = [cells, cells.crop((0, 0, 291, 225))]  # resized to 384 and 372 x 288
    (tmp_path / "photos").mkdir()
    for index, image in enumerate(images):
        image.save(tmp_path / "photos" / f"{index}.png")
    arguments = ["--shared-encoder", "--images", str(tmp_path / "photos")]
    arguments += ["--output", str(tmp_path / "shared")]
    for name, zoo_name in weights.items():
        arguments += ["--weights", f"{name}=qbheat://{zoo_name}"]
    load_tool("export").main(arguments)
    assert "feature maps are padded instead of the image" in capsys.readouterr().out

    model = SharedEncoderModel(tmp_path / "shared", device="cpu")
    for index, image in enumerate(images):
        pixels = np.asarray(image.convert("RGB"))
        found = model(pixels[None])
        for name, zoo_name in weights.items():
            if name == "retinanet" and index == 1:
                continue  # its own padding changes the features
            scores = _compute_scores(local_weights(f"qbheat://{zoo_name}"), pixels)
            np.testing.assert_allclose(_scores(found[name]), scores, atol=1e-4)
