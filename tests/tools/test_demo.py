# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/demo.py from its command line, with two steps on a handful of images."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.checkpoint import read_weights
from qbheat_det.data import ToySpec, prepare_toy_set, register_image_folders, register_toy_set
from tests.tool_modules import load_tool

NAMES = ("demo_test_train", "demo_test_val")
BOTH = {
    "SOLVER.EPOCHS": "0.0",
    "SOLVER.CHECKPOINT_EPOCHS": "0.0",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.WARMUP_ITERS": "0",
    "DATALOADER.NUM_WORKERS": "0",
    "MODEL.DEVICE": "cpu",
    "MODEL.MOBILE_FORMER.BLOCKS": str([["lite", 16, 8, 0], *3 * [["down", 8, 8, 8]]]),
    "MODEL.MOBILE_FORMER.STEM_CHANNELS": "8",
}
PRETRAINING = {
    "DATASETS.TRAIN": f"('{NAMES[0]}_images',)",
    "DATASETS.TEST": f"('{NAMES[1]}_images',)",
    "SOLVER.WARMUP_EPOCHS": "0.0",
    "TEST.EVAL_EPOCHS": "0.5",
    "INPUT.PRETRAIN.SIZE": "64",
    "MODEL.QB_HEAT.FEATURE_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DIM": "16",
}
DETECTION = {
    "DATASETS.TRAIN": f"('{NAMES[0]}',)",
    "DATASETS.TEST": f"('{NAMES[1]}',)",
    "TEST.EVAL_PERIOD": "1",
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": "64",
    "MODEL.FPN.OUT_CHANNELS": "8",
}


@pytest.fixture
def tiny_sets(tmp_path: Path) -> Iterator[None]:
    for name in NAMES:
        spec = ToySpec(name=name, num_images=4, image_size=64)
        register_toy_set(name, spec, tmp_path / "cache")
        images = prepare_toy_set(spec, tmp_path / "cache") / "images"
        register_image_folders(f"{name}_images", [str(images)])
    yield
    for name in NAMES:
        for registered in (name, f"{name}_images"):
            DatasetCatalog.remove(registered)
            MetadataCatalog.remove(registered)


@pytest.fixture
def demo() -> ModuleType:
    return load_tool("demo")


@pytest.mark.usefixtures("tiny_sets")
def test_two_steps_of_each_end_in_a_report_and_say_where_it_is(
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "FIGURES", ("curves", "reconstructions"))
    output = tmp_path / "demo"
    arguments = ["--output", str(output)]
    for flag, opts in (("--pretraining", PRETRAINING), ("--detection", DETECTION)):
        arguments += [flag, *(word for pair in (BOTH | opts).items() for word in pair)]
    demo.main(arguments)
    said = capsys.readouterr().out
    assert said.strip().endswith(f"open  {output / 'report.html'}")
    figures = {path.stem for path in (output / "report").glob("*.json")}
    assert figures == {"curves", "reconstructions"}
    for folder, backbone in (("qb_heat", "final"), ("random", "random")):
        config = (output / f"probe_{folder}" / "config.yaml").read_text()
        assert "CATEGORY_IDS:\n  - 1\n" in config
        before, _ = read_weights(str(output / f"backbone_model_{backbone}.safetensors"))
        after, _ = read_weights(str(output / f"probe_{folder}" / "model_final.safetensors"))
        for name, tensor in before.items():
            if not name.endswith("num_batches_tracked"):  # frozen norms count nothing
                kept = after[f"backbone.bottom_up.{name}"]
                torch.testing.assert_close(kept, tensor, rtol=0, atol=0)


def test_a_folder_that_is_not_of_the_demo_is_left_alone(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pretraining").mkdir()
    weights = tmp_path / "pretraining" / "model_final.pth"
    weights.write_bytes(b"a week of training")
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--output", str(tmp_path)])
    assert stopped.value.code == 2
    assert "--output" in capsys.readouterr().err
    assert weights.read_bytes() == b"a week of training"
