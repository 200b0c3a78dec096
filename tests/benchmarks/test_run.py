# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/run.py, its tables, its detectors, and the peers of pre-training."""

import json

import pytest
import torch

from benchmarks import data, gpu, pretraining, run, tables, training
from benchmarks.detectors import DETECTORS, OURS, random_images
from benchmarks.masked_peers import (
    MaskedConvolutionEncoder,
    TokenDroppingEncoder,
    draw_visible,
    hidden_patches,
)
from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, build
from benchmarks.run import BENCHMARKS
from benchmarks.tables import PAGE, fill, main
from benchmarks.timing import (
    ENVIRONMENTS,
    Result,
    Sample,
    samples_in_rounds,
    write_environment,
    write_results,
)
from qbheat_det.evaluation.complexity import count_parameters
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

PEERS = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(DETECTORS.keys() - {*OURS})]


@pytest.mark.parametrize("name", [*OURS, *PEERS])
def test_every_detector_runs_on_a_small_image(name):
    if "detr_r" in name or "d_fine" in name:
        pytest.importorskip("transformers")
    detector = DETECTORS[name]
    with torch.inference_mode():
        side = 160 if name in OURS else 320  # D-FINE selects 300 positions
        assert detector.call(detector.load()(), random_images(side, side)) is not None


def test_only_runs_what_it_names_and_quick_figures_have_their_own_folder(monkeypatch, tmp_path):
    row = Result.lower_is_better("memory/a_vs_b", 1.0, 2.0, "MiB")
    monkeypatch.setattr(training, "run", lambda quick, threads: [row])
    run.main(["--only", "training", "--quick", "--threads", "1", "--output", str(tmp_path)])
    folder = tmp_path / "quick"
    assert {*tmp_path.rglob("*.json")} == {folder / "training.json", folder / ENVIRONMENTS}
    assert json.loads((folder / "training.json").read_text())[0]["ratio"] == 2.0
    assert "1 threads" in json.loads((folder / ENVIRONMENTS).read_text())["training"]


@pytest.mark.slow
def test_quick_runs_measure_training_and_jpegs():
    names = {row.name for row in [*training.run(quick=True), *data.run(quick=True)]}
    assert names >= {f"training/{job}_step_s" for job in training.JOBS}
    assert "data/jpeg_to_batch_vs_torchvision" in names


def test_calls_take_turns_and_warm_up_is_not_timed():
    now, order = [0.0], []  # the clock stands still until a call moves it

    def call(name, seconds):
        order.append(name)
        now[0] += seconds.pop(0)

    ours, peer = [100.0, 1.0, 3.0, 2.0], [200.0, 5.0, 4.0, 9.0]
    samples = samples_in_rounds(
        {"ours": lambda: call("ours", ours), "peer": lambda: call("peer", peer)},
        rounds=3,
        warm_up=1,
        clock=lambda: now[0],
    )
    assert order == ["ours", "peer"] * 4
    assert samples == {"ours": Sample(2.0, 1.0, 3.0), "peer": Sample(5.0, 4.0, 9.0)}


TEXT = """\
Before.
<!-- bench latency 285m -->
old
<!-- end -->
Between, as `<!--` in a text.
<!-- bench memory -->
kept
<!-- end -->
After.
"""


@pytest.fixture
def folder(tmp_path):
    rows = [
        Result.lower_is_better("latency/285m_vs_peer", 0.5, 2.0, "s"),
        Result.lower_is_better("latency/3.7g_vs_peer", 1.0, 2.0, "s"),
    ]
    write_results(rows, tmp_path / "latency.json")
    write_environment("latency", tmp_path / ENVIRONMENTS)
    return tmp_path


def test_a_table_has_the_rows_it_names_and_the_machine_and_the_text_stays(folder):
    filled = fill(TEXT, folder)
    assert "| `285m_vs_peer` | 0.5 | 2 | s | 4.00 |" in filled
    assert "3.7g" not in filled
    assert "old" not in filled
    assert "Measured on: " in filled
    assert filled.startswith("Before.\n")
    assert filled.endswith(TEXT[TEXT.index("Between") :])
    assert fill(filled, folder) == filled

    page = folder / "page.md"
    page.write_text(TEXT)
    with pytest.raises(SystemExit):
        main(["--bench", str(folder), "--page", str(page), "--check"])
    assert page.read_text() == TEXT
    main(["--bench", str(folder), "--page", str(page)])
    main(["--bench", str(folder), "--page", str(page), "--check"])


def test_the_page_names_benchmarks_that_there_are():
    found = [match[1] for match in tables._BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    assert found
    assert set(found) <= set(BENCHMARKS)


SIZE, GRID = 128, 8


def mobile_former():
    """With weights under which tokens and dynamic ReLUs are not near their neutral start."""
    net = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s16_expanded"])
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.3)
    return net


def test_dropped_tokens_are_those_of_the_same_model_with_a_mask_in_its_attention():
    encoder = TokenDroppingEncoder(image_size=SIZE).eval()
    images = torch.randn(1, 3, SIZE, SIZE)
    visible = draw_visible(1, GRID**2, images.device)
    attended = ~hidden_patches(visible, GRID**2)
    whole = encoder.vit.forward_features(images, attn_mask=attended[:, None, None])
    torch.testing.assert_close(encoder(images, visible), whole[:, visible[0]])


def test_masked_convolutions_give_a_visible_block_what_the_block_gives_alone():
    net = mobile_former().eval().double()
    images = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    patches = torch.arange(GRID**2).view(GRID, GRID)
    for rows, columns in ((slice(0, 4), slice(0, 4)), (slice(2, 6), slice(3, 7))):
        visible = patches[rows, columns].flatten().expand(2, -1)
        block = images[
            ..., 16 * rows.start : 16 * rows.stop, 16 * columns.start : 16 * columns.stop
        ]
        alone = net(block)["s16_expanded"].flatten(2).transpose(1, 2)
        among_hidden = MaskedConvolutionEncoder(backbone=net)(images, visible)
        torch.testing.assert_close(among_hidden, alone)


def test_all_have_the_same_decoder_and_each_parameter_a_gradient():
    small = SETTINGS["128"].at(size=64)
    sizes = set()
    for name in ("285m", "285m_masked_convolution", "mae_vit_s"):
        model = build(CONTENDERS[name], small).train()
        images = [{"image": torch.randint(256, (3, 64, 64), dtype=torch.uint8)} for _ in range(8)]
        model(images)["loss_reconstruction"].backward()
        without = [key for key, p in model.named_parameters() if p.grad is None]
        assert not without, f"{name}: {without}"
        sizes.add(count_parameters(model.decoder))
    assert len(sizes) == 1


@pytest.fixture(autouse=True)
def _keep_torch_as_it_was():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_quick_run_measures_on_a_gpu():
    rows = {row.name: row for row in pretraining.run(quick=True)}
    assert rows["pretraining/128/285m_memory_vs_masked_convolution"].ours > 0
    names = {row.name for row in gpu.run(quick=True, threads=torch.get_num_threads())}
    assert "gpu/285m_211_deploy_b1_vs_detr_r50_eager" in names
    assert "gpu/qb_heat_285m_from_memory_vs_on_gpu" in names
