# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The last spelling of a schedule holds."""

from collections.abc import Mapping, Sequence

import pytest

from qbheat_det.config import get_cfg
from qbheat_det.config.loading import EPOCH_KEYS, switch_off_overruled_epochs
from qbheat_det.core.errors import UserError

Layers = Sequence[Mapping[str, object]]
IN_EPOCHS = {"SOLVER.EPOCHS": 12.0, "SOLVER.STEP_EPOCHS": "(8, 11)"}


@pytest.mark.parametrize(
    ("layers", "epochs", "steps"),
    [
        ([IN_EPOCHS], 12.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.MAX_ITER": "100"}], 0.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.STEPS": "()"}], 12.0, []),
        ([{"SOLVER.MAX_ITER": 7}, IN_EPOCHS], 12.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.EPOCHS": "0", "SOLVER.MAX_ITER": "5"}], 12.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.STEP_EPOCHS": "[]", "SOLVER.STEPS": "(5,)"}], 12.0, [8, 11]),
    ],
)
def test_iterations_of_a_later_layer_switch_the_epochs_of_an_earlier_one_off(
    layers: Layers, epochs: float, steps: list[int]
) -> None:
    cfg = get_cfg()
    cfg.SOLVER.EPOCHS, cfg.SOLVER.STEP_EPOCHS = 12.0, [8, 11]  # as if the layers were merged
    switch_off_overruled_epochs(cfg, layers)
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.STEP_EPOCHS) == (epochs, steps)


@pytest.mark.parametrize(("in_epochs", "in_iterations"), EPOCH_KEYS.items())
def test_one_layer_with_both_spellings_is_refused(in_epochs: str, in_iterations: str) -> None:
    layers = [{in_epochs: "(3,)", in_iterations: "(7,)"}]
    with pytest.raises(UserError, match=rf"{in_epochs} .* and {in_iterations} .* leave one out"):
        switch_off_overruled_epochs(get_cfg(), layers)


def test_the_config_of_a_finished_run_holds_both_and_keeps_its_epochs() -> None:
    cfg = get_cfg()
    cfg.SOLVER.EPOCHS, cfg.TEST.EVAL_EPOCHS = 8.0, 2.0
    keys = [*EPOCH_KEYS, *EPOCH_KEYS.values()]
    written = {key: cfg[key.split(".")[0]][key.split(".")[1]] for key in keys}
    switch_off_overruled_epochs(cfg, [written])
    assert (cfg.SOLVER.EPOCHS, cfg.TEST.EVAL_EPOCHS) == (8.0, 2.0)
