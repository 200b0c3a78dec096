# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation by two processes gathers every image exactly once."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.data import ToySpec, prepare_toy_set

from .evaluation_cases import evaluate_all
from .processes import make_args, run_in_processes

SIZES = {"an even number": 4, "an odd number": 5, "fewer than processes": 1}


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    folder = tmp_path_factory.mktemp("evaluation")
    folders = {
        name: str(prepare_toy_set(ToySpec(name="tiny", num_images=size, image_size=64), folder))
        for name, size in SIZES.items()
    }
    return make_args(folders=folders, output_dir=str(folder / "two"))


@pytest.fixture(scope="module")
def two_processes(
    args: argparse.Namespace, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run_in_processes(evaluate_all, args, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", SIZES)
def test_every_image_is_gathered_exactly_once(
    two_processes: list[dict[str, Any]], args: argparse.Namespace, name: str
) -> None:
    folder = Path(args.output_dir) / "inference" / name
    found = json.loads((folder / "coco_instances_results.json").read_text())
    truth = json.loads((Path(args.folders[name]) / "annotations.json").read_text())
    expected = [image["id"] for image in truth["images"]]
    assert len(expected) == SIZES[name]
    assert sorted(result["image_id"] for result in found) == sorted(expected)


def test_results_are_those_of_one_process_and_the_main_process_has_them(
    two_processes: list[dict[str, Any]], args: argparse.Namespace, tmp_path: Path
) -> None:
    alone = evaluate_all(make_args(folders=args.folders, output_dir=str(tmp_path)))
    main, other = two_processes
    # As text: a class without objects has an AP of nan, which is not equal to itself.
    assert json.dumps(main) == json.dumps(alone)
    assert 0 < alone["an odd number"][0]["bbox"]["AP"] < 100
    assert other == {name: [{}, {}] for name in SIZES}
