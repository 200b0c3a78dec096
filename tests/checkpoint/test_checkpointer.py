# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loading with an account of every tensor, and resuming from what is whole."""

import logging
import os
from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import ExactCheckpointer, SafeCheckpointer, WeightsInfo
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import CLASSES, TinyDetector, save_detector


class _Counter:
    """Something besides the model that a run keeps."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO)


def _state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_complete_file_fills_the_model_and_the_log_counts_its_tensors(tmp_path, caplog):
    stored = save_detector(tmp_path / "w.safetensors")
    model = TinyDetector(seed=9)
    checkpointer = SafeCheckpointer(model, str(tmp_path / "none"), class_names=CLASSES)
    assert not checkpointer.has_checkpoint()
    rest = checkpointer.load(str(tmp_path / "w.safetensors"))
    torch.testing.assert_close(_state(model), stored, rtol=0, atol=0)
    assert "9/9 backbone tensors; 4/4 decoder tensors" in caplog.text
    assert rest["info"]["class_names"] == list(CLASSES)
    assert checkpointer.info == WeightsInfo(class_names=CLASSES)
    # Pixel statistics, RetinaNet's normaliser and BatchNorm's counters are optional.
    optional = {"pixel_mean": torch.zeros(3, 1, 1), "loss_normalizer": torch.tensor(100.0)}
    kept = {key: tensor for key, tensor in stored.items() if "num_batches" not in key}
    torch.save(kept | optional, tmp_path / "w.pth")
    exact = ExactCheckpointer(TinyDetector())
    exact.load(str(tmp_path / "w.pth"))
    assert str(exact.report) == "8/8 backbone tensors; 4/4 decoder tensors"


def test_other_classes_keep_their_rows_by_name_and_are_listed(tmp_path, caplog):
    stored = save_detector(tmp_path / "w.safetensors", ("cat", "dog", "bird"))
    model = TinyDetector(2, seed=9)
    fresh = _state(model)
    checkpointer = SafeCheckpointer(model, class_names=("zebra", "dog"))
    checkpointer.load(str(tmp_path / "w.safetensors"))
    for name in ("decoder.class_embed.weight", "decoder.class_embed.bias"):
        expected = torch.stack([fresh[name][0], stored[name][1], stored[name][3]])
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=0)
    assert str(checkpointer.report) == (
        "9/9 backbone tensors; 4/4 decoder tensors\n"
        "classes kept by name (1): dog; new (1): zebra; dropped (2): cat, bird"
    )
    assert str(checkpointer.report) in caplog.text


def test_weights_of_other_classes_are_neither_resumed_nor_evaluated(tmp_path):
    info = WeightsInfo(class_names=CLASSES).to_dict()
    SafeCheckpointer(TinyDetector(), str(tmp_path)).save("model_0000001", iteration=1, info=info)
    for names in (("dog", "cat", "bird"), ("cat", "dog", "cow")):
        for kind in (SafeCheckpointer, ExactCheckpointer):
            checkpointer = kind(TinyDetector(), str(tmp_path), class_names=names)
            with pytest.raises(UserError, match=r"model_0000001\.pth"):
                checkpointer.resume(checkpointer.find_checkpoint_to_resume())


def test_unnamed_classes_are_loaded_in_order_if_their_number_fits(tmp_path):
    path = str(tmp_path / "w.pth")
    torch.save(TinyDetector(seed=1).state_dict(), path)
    model = TinyDetector()
    checkpointer = SafeCheckpointer(model, class_names=CLASSES)
    checkpointer.load(path)
    torch.testing.assert_close(_state(model), _state(TinyDetector(seed=1)), rtol=0, atol=0)
    assert "does not name its classes" in str(checkpointer.report)
    with pytest.raises(UserError, match=r"w\.pth.*class_embed"):
        SafeCheckpointer(TinyDetector(2), class_names=("cat", "dog")).load(path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"backbone.stem.0.weight": None}, r"1 missing \(backbone.stem.0.weight\)"),
        ({"classifier.weight": torch.zeros(2)}, r"1 unexpected \(classifier.weight\)"),
        (
            {"backbone.expand.weight": torch.zeros(4, 5)},
            r"1 of another shape \(backbone.expand.weight \(4, 5\) instead of \(4, 4\)\)",
        ),
    ],
)
def test_a_part_that_is_filled_only_partly_is_an_error_unless_allowed(tmp_path, change, fault):
    state = _state(TinyDetector(seed=1))
    state = {k: t for k, t in {**state, **change}.items() if t is not None}
    torch.save({"model": state}, tmp_path / "w.pth")
    model = TinyDetector()
    before = _state(model)
    with pytest.raises(UserError, match=f"{fault}.*--allow-partial"):
        SafeCheckpointer(model).load(str(tmp_path / "w.pth"))
    torch.testing.assert_close(_state(model), before, rtol=0, atol=0)

    partial = SafeCheckpointer(model, allow_partial=True)
    partial.load(str(tmp_path / "w.pth"))
    after = _state(model)
    for name in before:
        same_shape = name in state and state[name].shape == before[name].shape
        expected = state[name] if same_shape else before[name]
        torch.testing.assert_close(after[name], expected, rtol=0, atol=0)
    with pytest.raises(UserError, match=fault):
        ExactCheckpointer(model, allow_partial=True).load(str(tmp_path / "w.pth"))


def test_another_architecture_and_nan_are_always_refused(tmp_path):
    # Two names and shapes agree by accident.
    state = {f"layer{i}.0.conv1.weight": torch.zeros(4, 4, 3, 3) for i in range(20)}
    state |= {"expand.weight": torch.zeros(4, 4), "expand.bias": torch.zeros(4)}
    torch.save(state, tmp_path / "resnet.pth")
    model = TinyDetector()
    before = _state(model)
    spoilt = _state(model)
    spoilt["backbone.expand.bias"][2] = float("nan")
    torch.save(spoilt, tmp_path / "nan.pth")
    for name, named in (("resnet.pth", "2 of its 22"), ("nan.pth", r"backbone\.expand\.bias")):
        for allow_partial in (False, True):
            with pytest.raises(UserError, match=rf"{name}.*{named}"):
                SafeCheckpointer(model, allow_partial=allow_partial).load(str(tmp_path / name))
    torch.testing.assert_close(_state(model), before, rtol=0, atol=0)


def _run_of(folder, iterations):
    """A run's folder: each checkpoint's counter is its iteration, and its weights its seed."""
    for iteration in iterations:
        counter = _Counter()
        counter.value = iteration
        model = TinyDetector(seed=iteration)
        checkpointer = SafeCheckpointer(model, str(folder), counter=counter)
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)


def _resume(folder):
    model, counter = TinyDetector(seed=99), _Counter()
    checkpointer = SafeCheckpointer(model, str(folder), counter=counter)
    return model, counter, checkpointer.resume(checkpointer.find_checkpoint_to_resume())


def test_resuming_restores_all_and_a_new_run_the_weights_alone(tmp_path):
    _run_of(tmp_path, (3, 7))
    model, counter, rest = _resume(tmp_path)
    torch.testing.assert_close(_state(model), _state(TinyDetector(seed=7)), rtol=0, atol=0)
    assert (counter.value, rest["iteration"]) == (7, 7)
    counter = _Counter()
    checkpointer = SafeCheckpointer(TinyDetector(), str(tmp_path / "new"), counter=counter)
    checkpointer.load(str(tmp_path / "model_0000007.pth"), checkpointables=[])
    assert counter.value == 0
    # Weights without the rest of a run, and a damaged file alone, are not resumed from.
    SafeCheckpointer(TinyDetector(), str(tmp_path / "bare")).save("model_0000003", iteration=3)
    for _ in range(2):
        with pytest.raises(UserError, match=r"model_0000003\.pth"):
            _resume(tmp_path / "bare")
        _cut(tmp_path / "bare" / "model_0000003.pth")


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    """Damage inside a tensor, which PyTorch does not see."""
    content = bytearray(path.read_bytes())
    found = content.find(TinyDetector(seed=11).state_dict()["backbone.expand.weight"].numpy())
    content[found] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_last_checkpoint_is_replaced_by_the_newest_whole_one(tmp_path, caplog, damage):
    _run_of(tmp_path, (3, 7, 11))
    os.utime(tmp_path / "model_0000003.pth")  # copying changes times, so they say nothing
    torch.save({"model": TinyDetector(seed=50).state_dict()}, tmp_path / "weights.pth")
    damage(tmp_path / "model_0000011.pth")
    model, counter, rest = _resume(tmp_path)
    torch.testing.assert_close(_state(model), _state(TinyDetector(seed=7)), rtol=0, atol=0)
    assert (counter.value, rest["iteration"]) == (7, 7)
    (warning,) = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert "model_0000011.pth" in warning.getMessage()


def test_a_missing_or_wrong_tag_does_not_keep_a_run_from_resuming(tmp_path):
    _run_of(tmp_path, (3, 7))
    for tag in (None, b"", b"\xff\xfe", b"model_0000009.pth", b"../elsewhere/model_0000007.pth"):
        (tmp_path / "last_checkpoint").unlink(missing_ok=True)
        if tag is not None:
            (tmp_path / "last_checkpoint").write_bytes(tag)
        assert _resume(tmp_path)[2]["iteration"] == 7
