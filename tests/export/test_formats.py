# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files of each format agree with PyTorch at sizes they were not written at, or are refused."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from PIL import Image
from qbheat_det.engine.exporting.deployable import DeployableModel
from qbheat_det.engine.exporting.export import ExportReport, export_model
from qbheat_det.engine.exporting.export_info import METADATA_KEY
from qbheat_det.engine.exporting.formats import write_torchscript

from qbheat_det.checkpoint import WeightsInfo, load_run_config, save_weights
from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.exporting import ExportedModel, ExportInfo
from qbheat_det.engine.exporting import export as export_module
from tests.export.tiny_models import build, make_config, save
from tests.tool_modules import load_tool

SUFFIXES = {"onnx": ".onnx", "torchscript": ".ts", "torch-export": ".pt2"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs and, in ``photos``, noise of three sizes."""
    root = tmp_path_factory.mktemp("formats")
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for index, (width, height) in enumerate([(90, 75), (61, 100), (130, 40)]):
        noise = rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(root / "photos" / f"{index}.png")
    for kind in ("two_maps", "mf_detr"):
        save(root / kind, kind)
    return root


def _config(root: Path, kind: str) -> CfgNode:
    return load_run_config(str(root / kind / "model_final.safetensors"), device="cpu")


def _export(root: Path, kind: str, format: str) -> tuple[ExportReport, ExportedModel]:
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    output = root / f"{kind}{SUFFIXES[format]}"
    cfg = _config(root, kind)
    report = export_model(cfg, output, format=format, images=[str(root / "photos")])
    return report, ExportedModel.open(output, device="cpu")


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("two_maps", "onnx"),
        ("two_maps", "torchscript"),
        pytest.param("two_maps", "torch-export", marks=pytest.mark.slow),
        ("mf_detr", "torchscript"),
        pytest.param("mf_detr", "onnx", marks=pytest.mark.slow),
    ],
)
def test_a_file_of_each_format_gives_what_pytorch_gives(root: Path, kind: str, format: str) -> None:
    report, model = _export(root, kind, format)
    assert [row.batch_size for row in report.agreement] == [1, 2, 8]
    assert [row.num_images for row in report.agreement] == [3, 4, 8]
    assert all(row.num_values > 5 * row.num_images for row in report.agreement)
    assert all(row.holds(1e-4) for row in report.agreement)
    cfg = _config(root, kind)
    assert model.info.class_names == tuple(cfg.MODEL.CLASS_NAMES)
    assert model.info.category_ids == tuple(cfg.MODEL.CATEGORY_IDS)
    assert (model.info.pixel_format, model.info.tolerance) == ("RGB", 1e-4)
    assert model.info.model == cfg.MODEL.META_ARCHITECTURE
    # Of another size again; one image gives what it gives among others.
    images = np.random.default_rng(1).integers(0, 256, (3, 41, 57, 3), dtype=np.uint8)
    together, (alone,) = model(images), model(images[2:])
    assert len(alone) == len(together[2]) > 0
    torch.testing.assert_close(alone.scores, together[2].scores, rtol=1e-4, atol=1e-5)


def _save_model(path: Path, cfg: CfgNode) -> CfgNode:
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    save_weights(str(path), build(cfg).state_dict(), info)
    return load_run_config(str(path), device="cpu")


def test_fcos_and_bare_backbones_are_files_too(root: Path) -> None:
    fcos = make_config(
        "two_maps",
        MODEL__META_ARCHITECTURE="SyncFCOS",
        MODEL__FCOS__NUM_CLASSES=3,
        MODEL__FCOS__NUM_CONVS=1,
        MODEL__FCOS__IN_FEATURES=["p3", "p4"],
        MODEL__FCOS__NORM="",
        MODEL__FCOS__PRIOR_PROB=0.5,
    )
    sizes = make_config("mf_detr").MODEL.MOBILE_FORMER
    names = ("BLOCKS", "STEM_CHANNELS", "EXPANDED_CHANNELS", "NUM_TOKENS", "TOKEN_DIM")
    opts = [word for name in names for word in (f"MODEL.MOBILE_FORMER.{name}", str(sizes[name]))]
    opts += ["MODEL.MOBILE_FORMER.VARIANT", "custom", "MODEL.DEVICE", "cpu"]
    opts += ["INPUT.MIN_SIZE_TEST", "48"]
    encoder = load_config(get_config_path("demo/toy_qb_heat.yaml"), opts)
    for name, cfg in (("fcos", fcos), ("encoder", encoder)):
        own = _save_model(root / f"{name}.safetensors", cfg)
        output, photos = root / f"{name}.ts", [str(root / "photos")]
        report = export_model(own, output, format="torchscript", images=photos)
        assert all(row.num_values > 5 * row.num_images for row in report.agreement)
        images = np.random.default_rng(1).integers(0, 256, (2, 41, 57, 3), dtype=np.uint8)
        exported = ExportedModel.open(output)
        if name == "fcos":
            assert min(len(found) for found in exported(images)) > 0
        else:
            assert {len(values) for values in exported(images).values()} == {2}


def test_a_classifier_is_a_program_of_torch_export(root: Path) -> None:
    cfg = make_config(
        "two_maps",
        MODEL__META_ARCHITECTURE="ImageClassifier",
        MODEL__BACKBONE__NAME="TwoMaps",
        MODEL__CLASSIFIER__IN_FEATURE="s16",
        MODEL__CLASSIFIER__NUM_CLASSES=3,
        INPUT__DATASET_MAPPER_NAME="classify",
        INPUT__PRETRAIN__SIZE=32,
        INPUT__CLASSIFY__TEST_CROP=1.0,
    )
    model = build(cfg)
    cfg = _save_model(root / "classifier.safetensors", cfg)
    output = root / "classifier.pt2"
    report = export_model(cfg, output, format="torch-export", images=[str(root / "photos")])
    assert [row.num_values for row in report.agreement] == [9, 12, 24]
    exported = ExportedModel.open(output)
    assert (exported.info.task, exported.info.outputs) == ("classification", ("scores",))
    # Of the model's own size, so that nothing is resized.
    images = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    with torch.no_grad():
        wanted = model([{"image": torch.from_numpy(x).permute(2, 0, 1)} for x in images])
    scores = torch.from_numpy(exported(images))
    torch.testing.assert_close(scores, torch.stack([found["scores"] for found in wanted]))
    for strange in (images[:0], images[:, :0], images[..., :2]):
        with pytest.raises(ValueError, match="with N, H and W of 1 or more"):
            exported(strange)
    _check_that_nothing_in_it_is_run(output, root)


class _Touch:
    """What a stranger's pickle may hold: unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


def _check_that_nothing_in_it_is_run(program: Path, folder: Path) -> None:
    changed, trace = folder / "changed.pt2", folder / "it_was_run"
    with zipfile.ZipFile(program) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickles = [name for name in members if "/data/" in name and members[name][:2] == b"PK"]
    assert pickles
    stream = io.BytesIO()
    torch.save((_Touch(trace),), stream)
    library = f"{pickles[0].split('/')[0]}/data/aotinductor/model/a.so"
    for name, content in [*((name, stream.getvalue()) for name in pickles), (library, b"\x7fELF")]:
        with zipfile.ZipFile(changed, "w") as archive:
            for member, old in (members | {name: content}).items():
                archive.writestr(member, old)
        with pytest.raises(UserError, match="cannot be opened"):
            ExportedModel.open(changed)
        assert not trace.exists()


def test_a_file_that_does_not_agree_is_refused_and_not_left_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = export_module.build_deployable

    def build_another(*args: object, **kwargs: object) -> DeployableModel:
        deployable = build(*args, **kwargs)  # type: ignore[arg-type]
        deployable.encoder.normalise.mean.add_(1)
        return deployable

    monkeypatch.setattr(export_module, "build_deployable", build_another)
    output = root / "other" / "detector.ts"
    with pytest.raises(UserError, match=r"'.*detector.ts' is not written.*\(--tolerance\)\nbatch"):
        export_model(
            _config(root, "two_maps"), output, format="torchscript", images=[str(root / "photos")]
        )
    assert not output.parent.exists()


def test_the_tool_exports_by_the_ending_and_says_how_far_it_is(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = str(root / "two_maps" / "model_final.safetensors")
    output = str(root / "tool.ts")
    arguments = ["--weights", weights, "--images", str(root / "photos"), "--output", output]
    tool = load_tool("export")
    tool.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "batch",
        "images",
        "detections",
        "score",
        "box",
        "(px)",
        "unmatched",
    ]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "8"]
    assert "scores to 0.0001" in lines[4]
    for changed, sentence in (
        (arguments, r"tool.ts' exists: choose another name, or say --overwrite"),
        ([*arguments[:-1], str(root / "x.pb")], r"ends in none of .onnx, .ts and .pt2"),
        ([*arguments[:-1], str(root / "x.ts"), "--format", "onnx"], r"must end in .onnx"),
    ):
        with pytest.raises(SystemExit, match="2"):
            tool.main(changed)
        assert sentence in capsys.readouterr().err


def test_a_graph_of_pytorch_stays_on_the_cpu(tmp_path: Path) -> None:
    for name in ("x.ts", "x.pt2"):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=r"runs where it was exported, on the CPU"):
            ExportedModel.open(tmp_path / name, device="cuda")


def test_a_file_that_is_not_what_it_says_is_refused_in_a_sentence(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    info = ExportInfo("classification", ("scores",), "RGB")
    for taken, given in (("x", "scores"), ("images", "y")):
        tensors = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, ["n", "h", "w", 3])
            for name in (taken, given)
        ]
        node = onnx.helper.make_node("Identity", [taken], [given])
        graph = onnx.helper.make_graph([node], "graph", tensors[:1], tensors[1:])
        model = onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8
        )
        onnx.helper.set_model_props(model, {METADATA_KEY: info.to_json()})
        onnx.save(model, tmp_path / "x.onnx")
        with pytest.raises(UserError, match=rf"takes \['{taken}'\] and gives \['{given}'\], where"):
            ExportedModel.open(tmp_path / "x.onnx", device="cpu")

    class Twice(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return images, images

    images = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    write_torchscript(Twice(), images, tmp_path / "x.ts", info.to_json())
    with pytest.raises(
        UserError, match=r"x.ts' does not give what it says of images \(1, 2, 2, 3\)"
    ):
        ExportedModel.open(tmp_path / "x.ts")(images.numpy())
    with pytest.raises(UserError, match=r"on the device cpu or cuda, not 'cuda:0'"):
        ExportedModel.open(tmp_path / "x.ts", device="cuda:0")


def test_what_is_no_exported_file_is_refused_in_a_sentence(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = root / "two_maps" / "model_final.safetensors"
    with pytest.raises(UserError, match=r"is no exported file: they end in \.onnx"):
        ExportedModel.open(weights)
    with pytest.raises(UserError, match=r"'.*none.onnx' does not exist"):
        ExportedModel.open(tmp_path / "none.onnx")
    for suffix in SUFFIXES.values():
        damaged = tmp_path / f"damaged{suffix}"
        damaged.write_bytes(b"not a model")
        with pytest.raises(UserError, match=r"cannot be opened; it may be truncated"):
            ExportedModel.open(damaged, device="cpu")
    with zipfile.ZipFile(damaged, "w") as archive:  # the last of them, of torch.export
        archive.writestr("x/version", "1")
    with pytest.raises(UserError, match=r"cannot be opened; it may be truncated"):
        ExportedModel.open(damaged)
    assert "Traceback" not in capfd.readouterr().err
