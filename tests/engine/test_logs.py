# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What runs print and write: log, metrics, TensorBoard, run.json."""

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from detectron2.utils.events import EventStorage

from qbheat_det.config import get_cfg
from qbheat_det.core import environment
from qbheat_det.core.errors import UserError
from qbheat_det.engine import logs
from qbheat_det.engine.logs import PeriodicWriter, drop_metrics_from
from qbheat_det.engine.run_record import find_duration, record_start

from .tiny_training import forget_runs


def make_config(folder):
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = str(folder), "cpu"
    cfg.SOLVER.LOG_PERIOD = cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


def run(cfg, *, start, end, max_iter=10):
    """Trains in what the hook sees, from one iteration to another; ends early like an error."""
    hook = PeriodicWriter(period=2)
    with EventStorage(start) as storage:
        hook.trainer = trainer = SimpleNamespace(
            cfg=cfg, start_iter=start, max_iter=max_iter, storage=storage,
            data_loader=SimpleNamespace(num_images=4),
        )  # fmt: skip
        hook.before_train()
        for trainer.iter in range(start, end):
            storage.iter = trainer.iter
            storage.put_scalar("total_loss", float(trainer.iter))
            storage.put_scalar("time", 1.0)
            storage.put_scalars(smoothing_hint=False, **{"reconstruction/loss": 9.0})
            hook.after_step()
        if end == max_iter:
            trainer.iter = storage.iter = max_iter
        hook.after_train()


def read(path, key="iteration"):
    lines = map(json.loads, path.read_text().splitlines())
    return [line[key] for line in lines if key in line]


def test_a_resumed_run_writes_each_line_once(tmp_path):
    cfg = make_config(tmp_path)
    run(cfg, start=0, end=7)
    assert read(tmp_path / "metrics.json") == [1, 3, 5]
    run(cfg, start=4, end=10)
    assert read(tmp_path / "metrics.json") == [1, 3, 5, 7, 9]
    assert read(tmp_path / "metrics.json", "epoch") == [1, 2, 3, 4, 5]
    run(cfg, start=0, end=4)  # a new run in the same folder
    path = tmp_path / "metrics.json"
    assert read(path) == [1, 3]

    # A run that was killed leaves half a line.
    kept = '{"iteration": 1, "a": NaN}\n{"iteration": 3}\n'
    path.write_text(f'{kept}[1]\n{{"iteration": 5}}\n{{"iterat')
    drop_metrics_from(path, 5)
    assert path.read_text() == kept


def test_tensorboard_hides_the_steps_that_are_repeated(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer as files

    # Files of one second are read by the order of this number, as text: 10 comes before 9.
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))
    run(make_config(tmp_path), start=0, end=6)
    run(make_config(tmp_path), start=4, end=10)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("total_loss")] == [1, 3, 5, 7, 9]


def test_the_line_of_the_log_has_epoch_remaining_time_and_losses_of_steps_alone(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="detectron2.utils.events"):
        run(make_config(tmp_path), start=0, end=6)
    line = caplog.messages[0]
    assert line.startswith("epoch: 1.00/5 ")
    assert "eta: 0:00:08" in line
    assert "total_loss: " in line
    assert "reconstruction" not in line
    assert read(tmp_path / "metrics.json", "reconstruction/loss") == [9.0, 9.0, 9.0]


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_start_that_ends_after_a_later_one_began_has_its_own_duration(tmp_path):
    cfg = make_config(tmp_path)
    earlier, later = record_start(cfg, {}), record_start(cfg, {})
    later(4.0)
    earlier(3.0)
    starts = json.loads((tmp_path / "run.json").read_text())
    assert [start["seconds"] for start in starts] == [3, 4]


def test_every_start_adds_an_entry_without_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-mine")
    monkeypatch.setattr(sys, "argv", ["train_net.py", "SEED", "1"])
    cfg = make_config(tmp_path / "new")
    record_start(cfg, {}, seed=1)(60.0)
    assert find_duration(tmp_path / "new") == 60
    stop = record_start(cfg, {}, resumed_from="model_0000019.pth", seed=1)
    assert find_duration(tmp_path / "new") is None  # the start may have been killed
    stop(5.04)
    first_stage = make_config(tmp_path / "new" / "first_stage")
    record_start(first_stage, {})(10.0)
    assert find_duration(tmp_path / "new") == 75
    text = (tmp_path / "new" / "run.json").read_text()
    assert "a-secret-of-mine" not in text
    first, second = json.loads(text)
    assert first["command"] == ["train_net.py", "SEED", "1"]
    assert (first["resumed_from"], second["resumed_from"]) == (None, "model_0000019.pth")
    assert (second["processes"], second["seed"], second["device"]) == (1, 1, "cpu")
    assert first["started"].endswith("+00:00")
    names = {"python", "torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy"}
    assert set(first["versions"]) == names
    assert first["versions"]["torch"].startswith("2.")


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"sta'])
def test_another_run_json_is_left_alone(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        record_start(make_config(tmp_path), {})
    assert path.read_text() == content


def test_commit_and_changes_are_those_of_the_code_of_this_checkout_alone(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "qbheat_det").mkdir(parents=True)
    (checkout / "qbheat_det" / "__init__.py").write_text("")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        git(checkout, *arguments)
    commit = git(checkout, "rev-parse", "HEAD")

    def find(folder):
        monkeypatch.setattr(environment, "_CHECKOUT", folder)
        return environment.find_commit.__wrapped__()

    (checkout / "log.txt").write_text("no code")
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))  # as inside a git hook
    assert find(checkout) == commit
    (checkout / "qbheat_det" / "new.py").write_text("")
    assert find(checkout) == f"{commit}-dirty"
    (checkout / "site-packages").mkdir()
    assert find(checkout / "site-packages") == ""  # of a wheel
    monkeypatch.setenv("PATH", "")
    assert find(checkout) == ""


def test_the_terminal_gets_a_summary_and_the_file_everything(tmp_path, train_afresh, capsys):
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "4", "SOLVER.LOG_PERIOD": "2"})
    printed, log = capsys.readouterr(), (tmp_path / "log.txt").read_text()
    summary = printed.err.splitlines()
    assert len(summary) <= 40
    assert sum("M parameters" in line for line in summary) == 1
    for details in ("BatchNorm2d(", "PIXEL_MEAN"):
        assert details in log
        assert details not in printed.err
    assert sum("iter: 3" in line for line in summary) == 1  # no progress bar is drawn
    for line in summary:
        assert line.removeprefix(line[:11]).removeprefix("warning: ") in log
    assert not printed.out


def test_names_of_classes_do_not_control_the_terminal(tmp_path, capsys):
    logs.open_log(tmp_path)
    logging.getLogger("qbheat_det.data").warning("class '\x1b[2Jcat' has no box")
    for text in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert "class '\\x1b[2Jcat' has no box" in text


def test_a_second_run_leaves_the_log_of_the_first_alone(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.open_log(tmp_path / name)
        logging.getLogger("qbheat_det.engine").info(f"this is the {name}")
        logging.getLogger("detectron2.data").info("hidden")
        logging.getLogger("fvcore.common").warning("shown")
        lost = RuntimeError("gloo: reset by peer")  # which the command says in a sentence
        logging.getLogger("detectron2.engine").error("in training", exc_info=lost)
    (tmp_path / "log.txt.rank1").symlink_to("/dev/full")
    logs.open_log(tmp_path, rank=1)
    logging.getLogger("qbheat_det").warning("of another process, which finds the disk full")
    forget_runs()
    for name, other in (("first", "second"), ("second", "first")):
        log = (tmp_path / name / "log.txt").read_text()
        assert all(text in log for text in (name, "hidden", "reset by peer"))
        assert other not in log
    printed = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    shown = [(f"this is the {name}", "warning: shown") for name in ("first", "second")]
    assert printed == [line for lines in shown for line in lines]


def test_results_are_json_unless_a_terminal_shows_them(capsys, monkeypatch):
    results = {"bbox": {"AP": 1 / 3, "AP-ring": float("nan")}}
    logs.print_results(results)
    assert json.loads(capsys.readouterr().out) == {"bbox/AP": 0.333333, "bbox/AP-ring": None}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    logs.print_results(results)
    assert not capsys.readouterr().out
