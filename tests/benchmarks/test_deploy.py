# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/deploy.py: its rows, and small files that run in processes of their own."""

import pytest

from benchmarks.deploy import Figures, compare, list_files, measure, write_yolo
from benchmarks.exported_file import ONNXRUNTIME, open_file
from benchmarks.timing import Sample
from benchmarks.workers import LeftOut


def write_sum(path, *, is_integer):
    """Writes a file that returns the sum of its input (1, 2, 3)."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    kind = onnx.TensorProto.UINT8 if is_integer else onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats"], ["sum"], keepdims=0),
    ]
    given = helper.make_tensor_value_info("pixels", kind, [1, 2, 3])
    returned = helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "sum", [given], [returned])
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def test_a_file_gets_noise_of_the_type_of_its_input(tmp_path):
    pytest.importorskip("onnxruntime")
    sums = []
    for is_integer in (True, False):
        path = write_sum(tmp_path / "sum.onnx", is_integer=is_integer)
        (total,) = open_file(ONNXRUNTIME, str(path), threads=1)()
        sums.append(float(total))
    assert sums[0] > 1
    assert sums[0] == pytest.approx(256 * sums[1])


def test_files_run_in_turns_and_a_damaged_one_is_left_out(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"no graph")
    paths = {"ours": write_sum(tmp_path / "ours.onnx", is_integer=True), "yolo26n": damaged}
    figures = measure(ONNXRUNTIME, paths, threads=1, rounds=3, clock="wall")
    assert [*figures] == ["ours"]
    assert 0 < figures["ours"].seconds.least < figures["ours"].first
    assert figures["ours"].mib > 10
    assert "yolo26n, onnxruntime is left out" in capsys.readouterr().out


def test_rows_are_of_each_file_against_yolo26_n():
    seconds = {"ours": 0.2, "ours_480": 0.1, "yolo26n": 0.15, "d_fine_n": 0.3}
    figures = {name: Figures(Sample.of([s]), 10 * s, 100 * s) for name, s in seconds.items()}
    rows = {row.name: row for row in compare(figures, "openvino")}
    expected = {}
    for name, ratio in {"ours": 0.75, "ours_480": 1.5, "d_fine_n": 0.5}.items():
        for what in ("time", "first_answer", "memory"):
            expected[f"deploy/{what}_openvino_{name}_vs_yolo26n"] = ratio
    assert {name: row.ratio for name, row in rows.items()} == pytest.approx(expected)
    assert rows["deploy/time_openvino_ours_vs_yolo26n"].ours == 0.2
    assert rows["deploy/first_answer_openvino_ours_vs_yolo26n"].ours == 2
    assert rows["deploy/memory_openvino_ours_vs_yolo26n"].peer == 15


def test_a_peer_that_cannot_be_installed_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path))
    monkeypatch.setattr("benchmarks.deploy.sys.executable", "/bin/false")
    with pytest.raises(LeftOut):
        list_files(64)["yolo11n"](tmp_path / "yolo11n.onnx")
    with pytest.raises(LeftOut):
        write_yolo("yolo26n.yaml", 64, tmp_path / "yolo26n.onnx")
