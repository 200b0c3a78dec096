# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files that are whole or not there; text for people; how tools end."""

import argparse
import errno
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from detectron2.utils import comm

import qbheat_det
from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.core import files
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.files import check_writable, remove_leftovers, write_atomically
from qbheat_det.core.text import escape_controls, format_bytes, format_duration, join_first
from qbheat_det.inference.results import Predictions
from tests.checkpoint.tiny_models import TinyDetector
from tests.tool_modules import load_tool


def test_names_in_foreign_files_do_not_control_the_terminal(capsys):
    assert escape_controls("é\ta\n\x1b[2J\x9b\x07\r\x00") == "é\ta\n\\x1b[2J\\x9b\\x07\\x0d\\x00"

    @exit_on_user_error
    def fail():
        raise UserError("the class '\x1b]0;title\x07' is unknown")

    with pytest.raises(SystemExit):
        fail()
    assert capsys.readouterr().err == "error: the class '\\x1b]0;title\\x07' is unknown\n"
    predictions = Predictions(skipped=[("\x1b[2J.jpg", "not an image")])
    args = argparse.Namespace(threshold=0.3, output="", json=None)
    load_tool("predict").print_report(predictions, args)
    assert "skipped \\x1b[2J.jpg: not an image" in capsys.readouterr().err


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def _largest_file(num_bytes):
    """The operating system's own refusal to let a file grow on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_new_file_takes_the_place_of_the_old_one_and_makes_its_folder(tmp_path):
    path, before = tmp_path / "new" / "file", os.umask(0o027)
    try:
        for content in (b"old", b"new"):
            write_atomically(path, lambda stream, content=content: stream.write(content))
            assert path.read_bytes() == content
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert _names(path.parent) == ["file"]


def test_a_checkpoint_beyond_the_size_limit_leaves_the_earlier_one(tmp_path):
    model = torch.nn.Linear(1000, 1000)
    checkpointer = SafeCheckpointer(model, str(tmp_path))
    checkpointer.save("model_0000001", iteration=1)
    before = (tmp_path / "model_0000001.pth").read_bytes()
    for name in ("model_0000001", "model_0000003"):
        with _largest_file(1_000_000), pytest.raises(UserError, match=name):
            checkpointer.save(name, iteration=2)
    assert (tmp_path / "model_0000001.pth").read_bytes() == before
    assert _names(tmp_path) == ["last_checkpoint", "model_0000001.pth"]
    assert checkpointer.get_checkpoint_file() == str(tmp_path / "model_0000001.pth")


def test_a_defect_while_writing_keeps_its_traceback_and_leaves_nothing(tmp_path):
    def write(stream):
        stream.write(b"half")
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        write_atomically(tmp_path / "file", write)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("name", ["folder", "file/x/report.json", "x" * 300])
def test_what_cannot_be_written_is_found_before_the_work_with_the_same_advice(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for attempt in (check_writable, lambda path: write_atomically(path, lambda stream: None)):
        with pytest.raises(UserError, match=f"'.*{name}'"):
            attempt(tmp_path / name)
    check_writable(tmp_path / "new" / "folder" / "file")
    assert _names(tmp_path) == ["file", "folder"]


# The package's own start, which imports PyTorch, is left out to save seconds.
_WRITER = """
import sys, time, types
sys.modules["qbheat_det"] = types.ModuleType("qbheat_det")
sys.modules["qbheat_det"].__path__ = [sys.argv[2]]
from qbheat_det.core.files import write_atomically
def write(stream):
    stream.write(b"half of it")
    stream.flush()
    print("writing", flush=True)
    time.sleep(60)
write_atomically(sys.argv[1], write)
"""


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked_is_begun_anew(
    tmp_path, monkeypatch, moment
):
    lock, removed = files._lock, []

    def lock_too_late(stream):
        if not removed:
            (partial,) = tmp_path.iterdir()
            removed.append(partial)
            if moment == "while":  # the other process holds the lock, and removes it next
                monkeypatch.setattr(files, "_lock", lock)
                raise BlockingIOError
            remove_leftovers(tmp_path)
        lock(stream)

    monkeypatch.setattr(files, "_lock", lock_too_late)
    write_atomically(tmp_path / "file", lambda stream: stream.write(b"whole"))
    assert removed
    assert (tmp_path / "file").read_bytes() == b"whole"
    if moment == "before":
        assert _names(tmp_path) == ["file"]


def test_what_a_killed_write_leaves_is_never_a_checkpoint_and_goes_at_the_next_open(
    tmp_path, monkeypatch
):
    path = tmp_path / "model_0000001.pth"
    package = str(Path(qbheat_det.__file__).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), package], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        # It is being written: nobody else may remove it.
        remove_leftovers(tmp_path)
        (partial,) = tmp_path.iterdir()
        assert partial.read_bytes() == b"half of it"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    with monkeypatch.context() as patch:
        patch.setattr(comm, "is_main_process", lambda: False)
        reader = SafeCheckpointer(TinyDetector(), str(tmp_path))
    assert partial.exists()  # a process that does not write leaves the folder as it is
    assert not reader.has_checkpoint()
    assert reader.get_all_checkpoint_files() == []
    SafeCheckpointer(TinyDetector(), str(tmp_path))
    assert _names(tmp_path) == []


def test_durations_sizes_and_lists():
    seconds = (0.1204, 4.25, 190, 3900, 7199.9, 200_000)
    texts = ["120 ms", "4.2 s", "3 min 10 s", "1 h 05 min", "2 h 00 min", "2 d 8 h"]
    assert [format_duration(each) for each in seconds] == texts

    assert [format_bytes(n) for n in (512, 3.5 * 2**20, 2**41)] == ["512 B", "3.5 MiB", "2.0 TiB"]
    assert join_first([1, 2, 3]) == "1, 2, 3"
    assert join_first("abcde", 2) == "a, b and 3 more"


def end(error, capsys):
    """Returns the status and what stderr says of a tool that raises ``error``."""

    @exit_on_user_error
    def main():
        raise error

    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


def test_bad_input_is_one_line_and_an_interruption_no_traceback(capsys):
    assert end(UserError("no images in 'x'"), capsys) == (2, "error: no images in 'x'\n")

    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_wherever_it_is_met(number, capsys):
    code, said = end(OSError(number, "full", "run/metrics.json"), capsys)
    assert code == 2
    assert said.startswith("error: the disk that holds 'run/metrics.json' is full")
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(error):
    def fail():
        raise error

    wrapped = exit_on_user_error(fail)
    with pytest.raises(type(error)):
        wrapped()


_TOOL = """
import sys
from qbheat_det.core.errors import exit_on_user_error
@exit_on_user_error
def main():
    stream = open(sys.argv[1], "w")
    assert stream.fileno() > 2  # otherwise, messages of libraries would be written into it
    for _ in range(int(sys.argv[2])):
        print("a line")
        print("a message", file=sys.stderr)
main()
"""


@pytest.mark.parametrize(("closed", "lines"), [(">&-", 0), ("2>&-", 3), ("<&- >&- 2>&-", 0)])
def test_closed_streams_are_not_taken_for_files(tmp_path, closed, lines):
    command = ["sh", "-c", f'"$0" -c "$1" "$2" 3 {closed}']
    arguments = [sys.executable, _TOOL, str(tmp_path / "file")]
    run = subprocess.run([*command, *arguments], capture_output=True, check=False)
    assert run.returncode == 0
    assert run.stdout.count(b"a line") == lines


@pytest.mark.parametrize("count", ["1", "100000"])
def test_output_that_nobody_reads_ends_a_tool_without_a_traceback(tmp_path, count):
    command = [sys.executable, "-c", _TOOL, str(tmp_path / "file"), count]
    log = tmp_path / "log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 141
    assert b"Error" not in log.read_bytes()
