# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/demo.py from its command line, with two steps on a handful of images."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.data import ToySpec, register_toy_set
from tests.tool_modules import load_tool

NAMES = ("demo_test_train", "demo_test_val")


@pytest.fixture
def tiny_sets(tmp_path: Path) -> Iterator[None]:
    for name in NAMES:
        register_toy_set(name, ToySpec(name=name, num_images=4, image_size=64), tmp_path / "cache")
    yield
    for name in NAMES:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


@pytest.fixture
def demo() -> ModuleType:
    return load_tool("demo")


@pytest.mark.usefixtures("tiny_sets")
def test_two_steps_end_in_a_report_and_say_where_it_is(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    overrides = {
        "DATASETS.TRAIN": f"('{NAMES[0]}',)",
        "DATASETS.TEST": f"('{NAMES[1]}',)",
        "SOLVER.MAX_ITER": "2",
        "SOLVER.IMS_PER_BATCH": "2",
        "SOLVER.WARMUP_ITERS": "0",
        "DATALOADER.NUM_WORKERS": "0",
        "INPUT.MIN_SIZE_TRAIN": "(64,)",
        "INPUT.MIN_SIZE_TEST": "64",
        "MODEL.DEVICE": "cpu",
        "MODEL.MOBILE_FORMER.BLOCKS": str([["lite", 16, 8, 0], *3 * [["down", 8, 8, 8]]]),
        "MODEL.MOBILE_FORMER.STEM_CHANNELS": "8",
        "MODEL.FPN.OUT_CHANNELS": "8",
    }
    arguments = ["--output", str(output), *(word for pair in overrides.items() for word in pair)]
    demo.main(arguments)
    first = capsys.readouterr().out
    *_, ap, ap50, took, where = first.strip().splitlines()
    assert [line.split()[0] for line in (ap, ap50, took, where)] == ["AP", "AP50", "took", "open"]
    assert Path(where.split()[1]) == output / "report.html"
    assert "step     2 of 2" in first
    page = (output / "report.html").read_text()
    assert page.count("<figure>") >= 4
    assert {p.suffix for p in (output / "pictures").iterdir()} == {".png"}
    assert len(list((output / "pictures").iterdir())) == 4
    assert (output / "predictions.jpg").is_file()
    config = (output / "run" / "config.yaml").read_text()
    assert "CATEGORY_IDS:\n  - 1\n" in config
    results = output / "run" / "inference" / NAMES[1] / "coco_instances_results.json"
    assert isinstance(json.loads(results.read_text()), list)

    demo.main(arguments)
    assert "is there already: training again" in capsys.readouterr().out


def test_help_says_that_it_trains_again(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    assert caught.value.code == 0
    assert "trains again" in " ".join(capsys.readouterr().out.split())
