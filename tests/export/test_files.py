# Copyright (c) qbheat_det contributors. Apache-2.0.
"""ONNX files agree with PyTorch or are not written; bare backbones."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model

from qbheat_det.checkpoint import (
    SafeCheckpointer,
    WeightsInfo,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.export import export_model
from qbheat_det.export.agreement import Agreement, compare_detections
from qbheat_det.export.files import _find_layers, quantize_onnx, read_images, write_model
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.images import find_inputs, read_rgb
from qbheat_det.inference.predict import build_predictor
from tests.engine.gradient_cases import MF_DETR, RETINANET, on_timm
from tests.engine.tiny_pretraining import make_folder
from tests.export.tiny_models import make_config, save, save_model, save_photos
from tests.tool_modules import load_tool, refuse


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with ``photos``; ONNX is installed."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    root = tmp_path_factory.mktemp("files")
    save_photos(root / "photos")
    return root


@pytest.mark.parametrize("kind", ["two_maps", "mf_detr", "selected_queries", "qb_heat"])
@pytest.mark.slow
def test_a_file_gives_the_results_of_pytorch(root, kind):
    cfg = load_run_config(save(root / kind, kind), device="cpu")
    output = root / f"{kind}.onnx"
    report = export_model(cfg, output, images=[str(root / "photos")])
    assert [row.num_images for row in report.rows] == [3, 4, 8]
    assert all(row.holds(1e-4) and row.num_values > 5 * row.num_images for row in report.rows)
    model = ExportedModel.open(output, device="cpu")
    assert model.info.class_names == tuple(cfg.MODEL.CLASS_NAMES)
    assert model.info.category_ids == tuple(cfg.MODEL.CATEGORY_IDS)
    assert (model.info.pixel_format, model.info.model) == ("RGB", cfg.MODEL.META_ARCHITECTURE)
    assert str(root) not in model.info.config
    # Of another size; one image gives the same as in a batch.
    images = np.random.default_rng(1).integers(0, 256, (3, 41, 57, 3), dtype=np.uint8)
    together, alone = model.run(images), model.run(images[2:])
    for name, value in alone.items():
        np.testing.assert_allclose(value, together[name][2:], rtol=1e-3, atol=1e-4)


def test_the_default_images_are_the_included_cells(root):
    images, source = read_images(make_config("classifier"), [])
    assert (len(images), source) == (8, "8 images of cells_sample_val")
    (root / "empty").mkdir()
    (root / "empty" / "x.png").write_text("no image")
    with pytest.raises(UserError, match="--images"):
        read_images(make_config("classifier"), [str(root / "empty")])


@pytest.fixture(scope="module")
def classifier(root):
    """Arguments of tools/export.py that write a classifier, and its output."""
    cfg = make_config("classifier", INPUT__CLASSIFY__TEST_CROP=1.0)
    arguments = ["--weights", save_model(root / "classifier", cfg)]
    arguments += ["--images", str(root / "photos"), "--output", str(root / "classifier.onnx")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_tool("export").main(arguments)
    return arguments, printed.getvalue()


def test_the_tool_prints_the_differences_and_keeps_existing_files(classifier, root, capsys):
    arguments, printed = classifier
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0] == ["batch", "images", "compared", "difference"]
    assert [row[:3] for row in rows[1:4]] == [["1", "3", "9"], ["2", "4", "12"], ["8", "8", "24"]]
    content = Path(arguments[-1]).read_bytes()
    for changed in (
        arguments,
        [*arguments[:-1], str(root / "x.ts")],
        [*arguments, "--overwrite", "--tolerance", "0"],
        [*arguments, "--overwrite", "--weights", "x.pth"],
    ):
        assert "--" in refuse(load_tool("export").main, changed, capsys)
    assert Path(arguments[-1]).read_bytes() == content


def test_a_file_that_does_not_agree_is_not_written(classifier, root, monkeypatch):
    # The file of other weights.
    monkeypatch.setattr(
        "qbheat_det.export.files.write_model",
        lambda model, cfg, path, **_: path.write_bytes(Path(classifier[0][-1]).read_bytes()),
    )
    weights = save(root / "other", "classifier", head_seed=1)
    cfg = load_run_config(weights, device="cpu")
    with pytest.raises(UserError, match=r"--tolerance(?s:.*)differs"):
        export_model(cfg, root / "new" / "x.onnx", images=[str(root / "photos")])
    assert not (root / "new").exists()


@pytest.mark.slow
def test_files_of_one_size_and_of_integers_find_what_pytorch_finds(root):
    onnx = pytest.importorskip("onnx")
    weights = save(root / "int8", "mf_detr")
    cfg = load_run_config(weights, device="cpu", opts=["INPUT.MIN_SIZE_TEST", "0"])
    photos, size = [str(root / "photos")], (256, 320)
    exact = export_model(cfg, root / "camera.onnx", images=photos, image_size=size)
    assert all(row.holds(1e-4) for row in exact.rows)
    assert ExportedModel.open(root / "camera.onnx", device="cpu").info.image_size == size
    output = root / "int8.onnx"
    options = {"images": photos, "int8_images": photos, "image_size": size}
    report = export_model(cfg, output, **options)
    num_layers = int(report.source.split()[0])
    assert num_layers > 1
    assert not any(row.holds(1e-5) for row in report.rows)
    assert sum(row.num_values for row in report.rows) > 0.8 * sum(r.num_values for r in exact.rows)
    operators = [node.op_type for node in onnx.load(output).graph.node]
    assert operators.count("DequantizeLinear") > num_layers
    assert ExportedModel.open(output, device="cpu").info.category_ids


def test_depthwise_convolutions_at_strides_1_and_2_stay_in_float():
    onnx = pytest.importorskip("onnx")
    nodes, weights = [], []

    def add(name, channels, groups, stride):
        """Appends a 3x3 convolution, whose input and output have this number of channels."""
        weight = np.zeros((channels, channels // groups, 3, 3), np.float32)
        weights.append(onnx.numpy_helper.from_array(weight, f"{name}_weight"))
        source = nodes[-1].output[0] if nodes else "images"
        settings = {"strides": [stride, stride], "pads": [1, 1, 1, 1], "group": groups}
        inputs = [source, f"{name}_weight"]
        nodes.append(onnx.helper.make_node("Conv", inputs, [f"{name}_map"], name, **settings))

    add("stem", 16, 1, 2)
    add("early", 16, 16, 1)
    add("dense", 16, 1, 1)
    add("strided", 16, 16, 2)
    add("late", 16, 16, 1)
    add("grouped", 16, 4, 1)
    shapes = {"images": (1, 16, 128, 128), "grouped_map": (1, 16, 32, 32)}
    (given, found) = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    graph = onnx.helper.make_graph(nodes, "g", [given], [found], weights)
    model = onnx.helper.make_model(graph)
    assert _find_layers(onnx.shape_inference.infer_shapes(model)) == [
        "stem",
        "dense",
        "strided",
        "late",
    ]


def test_a_file_without_large_layers_is_not_quantized(tmp_path):
    onnx = pytest.importorskip("onnx")
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    path = tmp_path / "relu.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    with pytest.raises(UserError, match="without them"):
        quantize_onnx(path, [])


FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # by default some CPUs compute in bfloat16


@pytest.mark.slow
def test_openvino_agrees_with_onnxruntime(root, tmp_path):
    openvino = pytest.importorskip("openvino")
    cfg = make_config("two_maps")
    cfg.MODEL.WEIGHTS = save_model(tmp_path / "run", cfg)
    write_model(build_predictor(cfg).model, cfg, tmp_path / "m.onnx")
    exported = ExportedModel.open(tmp_path / "m.onnx", device="cpu")
    compiled = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU", FLOAT32)
    for file in find_inputs([str(root / "photos")]):
        image = read_rgb(file.path)[:, :, ::-1]
        images = np.stack([image, image[::-1]])
        expected, found = exported.run(images), compiled({"images": images})
        for i in range(2):
            row = Agreement(1)
            of_image = ({k: out[k][i : i + 1] for k in expected} for out in (found, expected))
            compare_detections(row, *of_image, 0.05, image.shape[:2], 1e-4)
            # With random weights, suppression may choose the other one of two boxes.
            assert row.num_values > row.unmatched <= 2
            assert max(row.score, row.relative_box) < 1e-3


main = load_tool("export").main


def _train(cfg, folder):
    """Writes the weights that a training run writes; returns the backbone's state."""
    cfg.MODEL.CLASS_NAMES, cfg.MODEL.CATEGORY_IDS = ["cat", "dog", "bird"], [1, 2, 3]
    cfg.INPUT.FORMAT, cfg.INPUT.MIN_SIZE_TEST = "RGB", 64
    cfg.DATALOADER.NUM_WORKERS = 0
    model = build_model(cfg)
    info = WeightsInfo.from_config(cfg, iteration=7, commit="c0ffee", pretrain_only_modules=["x"])
    save_weights(str(folder / "model_final.safetensors"), model.state_dict(), info)
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    return {key: value.clone() for key, value in backbone.state_dict().items()}


def _words(folder, *more):
    words = ["--backbone", "--weights", str(folder), *more]
    return [*words, "--output", f"{folder}/b.safetensors"]


def test_a_bare_backbone_loads_into_any_config_that_has_it(tmp_path):
    expected = _train(on_timm(RETINANET, "resnet18"), tmp_path)
    main(_words(tmp_path))
    state, info = read_weights(f"{tmp_path}/b.safetensors")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert (info.class_names, info.category_ids, info.pretrain_only_modules) == ((), (), ())
    assert (info.iteration, info.commit, info.pixel_format) == (7, "c0ffee", "RGB")
    for other in (MF_DETR, RETINANET):
        checkpointer = SafeCheckpointer(build_model(on_timm(other, "resnet18")))
        checkpointer.load(f"{tmp_path}/b.safetensors")
        group = checkpointer.report.groups["backbone"]
        assert group.num_loaded == group.num_tensors
        assert checkpointer.report.unexpected == ()


def test_recalibration_changes_only_the_statistics_of_batch_norm(tmp_path, capsys):
    images = make_folder(tmp_path / "images", 6)
    before = _train(on_timm(RETINANET, "resnet18"), tmp_path)
    flags = ["--recalibrate-bn", "6", "--images", str(images)]
    main([*_words(tmp_path, *flags), "MODEL.DEVICE", "cpu"])
    state, _ = read_weights(f"{tmp_path}/b.safetensors")
    assert state.keys() == before.keys()
    for key, value in state.items():
        if "running" in key:
            assert not torch.equal(value, before[key]), key
        elif "num_batches" not in key:
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert "--overwrite" in refuse(main, _words(tmp_path), capsys)


def test_invalid_input_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"stem.weight": torch.zeros(1)}, "bare.pth")
    for weights, output, more, named in (
        ("none.pth", "b.safetensors", [], "none.pth"),
        ("bare.pth", "b.safetensors", [], "bare.pth"),
        ("bare.pth", "b.pth", [], "b.pth"),
        ("x", "b.safetensors", ["--recalibrate-bn", "0"], "recalibrate"),
        ("x", "b.safetensors", ["--config-file", "c.yaml"], "--config-file"),
        ("x", "b.safetensors", ["--images", "."], "recalibrate"),
    ):
        words = ["--backbone", "--weights", weights, *more, "--output", output]
        assert named in refuse(main, words, capsys)
        assert not Path("b.safetensors").exists()
