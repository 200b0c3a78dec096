# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run with help in training: what it exports, who takes it over, and how it is evaluated."""

from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import ExactCheckpointer, SafeCheckpointer, read_weights
from qbheat_det.engine import Trainer, build_config

from .tiny_training import MF_DETR, make_data, parse, state, train

HELP = {
    "MODEL.MF_DETR.DENOISING.GROUPS": "2",
    "MODEL.MF_DETR.QUERY_GROUPS.COUNT": "2",
    "SOLVER.MAX_ITER": "2",
}
OF_HELP = "auxiliary_queries."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run, and its data."""
    data = make_data(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("run")
    train(folder, data, {**MF_DETR, **HELP})
    return folder, data


def test_help_is_in_the_checkpoint_and_not_in_the_export(run: tuple[Path, Path]) -> None:
    folder, _ = run
    kept = state(folder)["model"]
    exported, _ = read_weights(str(folder / "model_final.safetensors"))
    assert {name for name in kept if name not in exported} == {
        name for name in kept if name.startswith(OF_HELP)
    }
    assert any(name.startswith(OF_HELP) for name in kept)
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, kept[name], rtol=0, atol=0)


@pytest.mark.parametrize("file", ["model_final.pth", "model_final.safetensors"])
@pytest.mark.parametrize(
    "opts",
    [{}, HELP, {**HELP, "MODEL.MF_DETR.QUERY_GROUPS.COUNT": "4"}],
    ids=["paper's config", "own config", "other help"],
)
def test_weights_are_evaluated_and_taken_over_with_help_or_without(
    run: tuple[Path, Path], opts: dict[str, str], file: str, tmp_path: Path
) -> None:
    folder, data = run
    cfg = build_config(parse(tmp_path, data, {**MF_DETR, **opts}))
    exported, _ = read_weights(str(folder / "model_final.safetensors"))
    for kind in (ExactCheckpointer, SafeCheckpointer):
        model = Trainer.build_model(cfg)
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        checkpointer = kind(model, class_names=cfg.MODEL.CLASS_NAMES)
        checkpointer.load(str(folder / file))
        assert checkpointer.report is not None
        assert checkpointer.report.unexpected == ()
        found = model.state_dict()
        for name, tensor in exported.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
        if kind is SafeCheckpointer:  # a new run's help is new, whichever file it starts from
            for name in found.keys() - exported.keys():
                torch.testing.assert_close(found[name], fresh[name], rtol=0, atol=0, msg=name)


def test_a_checkpoint_gives_a_model_with_the_same_help_all_it_had(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, data = run
    cfg = build_config(parse(tmp_path, data, {**MF_DETR, **HELP}))
    model = Trainer.build_model(cfg)
    ExactCheckpointer(model, class_names=cfg.MODEL.CLASS_NAMES).load(
        str(folder / "model_final.pth")
    )
    for name, tensor in state(folder)["model"].items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
