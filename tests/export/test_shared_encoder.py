# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models split behind a shared backbone: the parts give the results of the whole models."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.export.agreement import build_reference
from qbheat_det.export.graph import build_exportable
from qbheat_det.export.shared_encoder import split_models
from qbheat_det.inference.exported import SharedEncoderModel
from qbheat_det.inference.predict import build_predictor, is_classifier
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
        ("two_maps", {"seeds": {"backbone_seed": 5}}, "coarse.weight"),
        ("two_maps", {"INPUT__MIN_SIZE_TEST": 80}, "size of test images"),
        ("two_maps", {"INPUT__FORMAT": "BGR"}, "INPUT.FORMAT"),
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
    return result[0].scores.numpy() if isinstance(result, list) else result[0]


def _compute_scores(weights, image):
    cfg = load_run_config(str(weights), device="cpu")
    predictor = build_predictor(cfg)
    if is_classifier(cfg):
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
