# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention, reconstructions, spectra and correlation: by construction, by hand, as figures."""

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.attention import (
    choose_blocks,
    crop_squares,
    draw_attention,
    find_mobile_former,
    list_blocks,
    read_bridges,
)
from qbheat_det.analysis.beyond import carry, draw_beyond, find_generator, measure_errors
from qbheat_det.analysis.figures import NotApplicable
from qbheat_det.analysis.plotting import to_rgb
from qbheat_det.analysis.pretraining import (
    draw_correlation,
    draw_reconstructions,
    measure_spatial_correlation,
    reconstruct_images,
)
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.analysis.spectrum import (
    NAMES,
    commutator,
    complex_share,
    describe_models,
    draw_spectrum,
    inverse_error,
    magnitude_correlation,
    read_linear_models,
    rotate_models,
)
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

from .conftest import check_files
from .tiny_runs import truncate

DIM = 6


def draw(seed, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, dim, dtype=torch.float64, generator=generator)


def with_eigenvalues(values, seed=0):
    """A matrix that is not symmetric, of given real eigenvalues."""
    basis = draw(seed, len(values))
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.inverse()


def test_energies_and_inverse_errors_are_those_by_hand():
    values = {"A1": [1.0, -2.0], "A2": [3.0, 0.5], "B1": [1.0, 1.5], "B2": [-2.0, 0.5]}
    matrices = {name: with_eigenvalues(eigenvalues) for name, eigenvalues in values.items()}
    spectrum = describe_models({"centre": (0.25, matrices)})
    magnitudes = spectrum.eigenvalues["centre"]["A1"].abs()
    assert_close(magnitudes, torch.tensor([2.0, 1.0]).double() / 0.25)
    # Both directions of an axis count: (3 + 3.5) / (2.5 + 2.5).
    assert spectrum.summary["energy_A_centre"] == pytest.approx(6.5 / 0.25)
    assert spectrum.summary["energy_ratio_centre"] == pytest.approx(6.5 / 5.0)

    identity = torch.eye(DIM, dtype=torch.float64)
    forth = 0.1 * draw(4)
    back = torch.linalg.inv(identity + forth) - identity
    assert inverse_error(forth, back) == pytest.approx(0.0, abs=1e-12)
    # The opposite matrix misses by M squared, and the same one by twice M.
    assert inverse_error(1e-4 * forth, -1e-4 * forth) < 1e-4
    assert inverse_error(1e-4 * forth, 1e-4 * forth) == pytest.approx(1.0, abs=1e-4)
    assert inverse_error(1e-6 * draw(5, 200), 1e-6 * draw(6, 200)) == pytest.approx(0.707, abs=0.02)
    assert math.isnan(inverse_error(0 * forth, 0 * forth))


def test_ranks_and_complex_eigenvalues_are_those_of_the_matrices_that_were_built():
    def build(blocks, seed):
        """Returns float32 (12, 12) of the blocks in an orthogonal basis; zeros fill the rest."""
        matrix = torch.zeros(12, 12, dtype=torch.float64)
        diagonal = torch.block_diag(*blocks)
        matrix[: len(diagonal), : len(diagonal)] = diagonal
        basis = torch.linalg.qr(draw(seed, 12)).Q
        return (basis @ matrix @ basis.T).float()

    def turn(angle, radius):
        """Returns the block with the eigenvalues radius * exp(±i angle)."""
        cos, sin = math.cos(angle), math.sin(angle)
        return radius * torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)

    real = torch.diag(torch.tensor([3.0, -2.0, 1.0, 0.5], dtype=torch.float64))
    matrices = {
        "A1": build([turn(0.3, 1.0), turn(1.5, 0.1), real], 1),  # rank 8, 4 of 12 complex
        "A2": build([turn(0.1 * k, 0.5) for k in range(1, 7)], 2),  # rank 12, all complex
        "B1": build([real], 3),  # rank 4, none complex
        "B2": build([turn(2.0, 1e-3), real], 4),  # rank 6, 2 of 12 complex
    }
    ranks = [np.linalg.matrix_rank(matrix.numpy()) for matrix in matrices.values()]
    assert ranks == [8, 12, 4, 6]
    summary = describe_models({"centre": (0.25, matrices)}).summary
    assert (summary["channels"], summary["rank_A"], summary["rank_B"]) == (12, 8, 4)
    assert summary["complex_A"] == pytest.approx((4 / 12 + 1) / 2)
    assert summary["complex_B"] == pytest.approx((0 + 2 / 12) / 2)
    assert complex_share(torch.zeros(3, dtype=torch.complex64)) == 0.0  # before training


def make_models(factor):
    return {
        scale: (offset, {name: (factor * draw(10 * i + j)).float() for j, name in enumerate(NAMES)})
        for i, (scale, offset) in enumerate({"corner": 0.5, "centre": 0.25}.items())
    }


def test_rotated_models_have_the_learned_singular_values_and_share_opposites():
    models = make_models(0.3)
    (_, one), (_, again) = (rotate_models(models)["corner"] for _ in range(2))
    other = models["corner"][1]
    for name in NAMES:
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])
        expected = torch.linalg.svdvals(models["corner"][1][name])
        assert_close(torch.linalg.svdvals(one[name]), expected)
    offset, matrices = models["corner"]
    opposite = {"corner": (offset, {**matrices, "A2": -matrices["A1"]})}
    _, rotated = rotate_models(opposite)["corner"]
    assert torch.equal(rotated["A2"], -rotated["A1"])
    assert not torch.equal(rotated["B2"], -rotated["B1"])


def test_linear_models_are_read_from_a_checkpoint(tmp_path):
    path = tmp_path / "weights.pth"
    state = {f"predictor.scales.centre.{name}": torch.randn(3, 3) for name in ("A1", "B1")}
    torch.save({"model": state}, path)
    ((scale, (offset, models)),) = read_linear_models(path, "run").items()
    assert (scale, offset, len(models)) == ("centre", 0.25, 8)
    assert_close(models["A1"], state["predictor.scales.centre.A1"])
    assert_close(models["A2"], -models["A1"])
    torch.save({"predictor.scales.corner.A1": torch.randn(3, 3)}, path)
    with pytest.raises(UserError, match=r"weights\.pth"):
        read_linear_models(path, "run")


def test_commutator_and_correlation_equal_hand_computed_values():
    a, b = with_eigenvalues([1.0, 2, 3, 4]), with_eigenvalues([0.5, -1, 2, 7])
    assert commutator(a, b) == pytest.approx(0.0, abs=1e-12)  # of one basis
    up = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # AB - BA = diag(1, -1), of norms 1
    assert commutator(5 * up, 0.1 * up.T) == pytest.approx(math.sqrt(2))
    falling, steep = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([9.0, 1.0, 1.0, 1.0])
    # Deviations (1.5, .5, -.5, -1.5) and (6, -2, -2, -2): 12 / (sqrt(5) sqrt(48)).
    assert magnitude_correlation(falling, steep) == pytest.approx(12 / math.sqrt(240))
    assert math.isnan(magnitude_correlation(falling, torch.ones(4)))


def test_checkpoints_and_their_controls_have_rows(tiny, tmp_path):
    run, detector = tiny.get("qb_heat"), tiny.get("retinanet")
    earlier = Run.open(run.folder / "model_0000009.pth", label="early", device="cpu")
    (tmp_path / "b.pth").write_bytes(b"PK\x03\x04 and no more")
    broken = Run.open(tmp_path / "b.pth", label="broken")
    figure = draw_spectrum([earlier, run, detector, broken], FigureOptions())
    check_files(figure, tmp_path)
    assert [row[0] for row in figure.table.rows] == [
        "early",
        "early, rotated",
        "qb_heat",
        "qb_heat, rotated",
    ]
    # The same matrices, scaled by 1/4: energies grow with them.
    early, late = (figure.data["rows"][row]["energy_A_centre"] for row in ("early", "qb_heat"))
    assert early == pytest.approx(late / 4, rel=1e-4)
    assert ["retinanet" in figure.data["left_out"][0], "b.pth" in figure.data["left_out"][1]]
    with pytest.raises(NotApplicable, match="retinanet"):
        draw_spectrum([detector], FigureOptions())


def test_it_is_the_mean_over_all_pairs_of_positions():
    torch.manual_seed(0)
    maps = torch.randn(3, 5, 2, 3)
    expected = []
    for features in maps.flatten(2).numpy():
        matrix = np.abs(np.corrcoef(features.T))
        expected.append([matrix[i, j] for i in range(6) for j in range(6) if i != j])
    assert_close(measure_spatial_correlation(maps), torch.tensor(expected).mean(dim=1).float())

    maps = torch.zeros(1, 2, 2, 2)
    maps[0, 0, 0] = 1.0  # two of four positions, equal: one pair of six
    assert_close(measure_spatial_correlation(maps), torch.tensor([1 / 6]))
    equal = torch.full((1, 720, 2, 2), 0.1)  # whose mean is not 0.1 to the last bit
    assert_close(measure_spatial_correlation(equal), torch.zeros(1))
    with pytest.raises(NotApplicable, match="two positions"):
        measure_spatial_correlation(torch.zeros(1, 2, 1, 1))


def test_runs_are_compared_on_the_same_images_in_a_chart_for_each_map(tiny, photos, tmp_path):
    runs = [tiny.get(name) for name in ("masking", "untrained", "classifier", "retinanet")]
    runs.append(truncate(runs[0], tmp_path))
    figure = draw_correlation(runs, FigureOptions(images=photos), correlated_images=3)
    check_files(figure, tmp_path)
    correlations = figure.data["runs"]
    assert list(correlations) == ["masking", "untrained", "classifier", "retinanet"]
    assert "cut" in figure.data["left_out"][0]
    assert correlations["masking"]["map"] == "s16_expanded"
    assert correlations["retinanet"]["map"] == "s16"
    run = runs[0]
    image = crop_squares(run.cfg, [str(photos / "2.png")])[0]["image"]

    def measure(run):
        with torch.no_grad():
            maps = run.model.backbone(((image - run.model.pixel_mean) / run.model.pixel_std)[None])
        return float(measure_spatial_correlation(maps["s16_expanded"]))

    assert correlations["masking"]["values"][2] == pytest.approx(measure(run), abs=1e-5)
    # An untrained encoder gets statistics of the images.
    assert correlations["untrained"]["values"][2] != pytest.approx(measure(runs[1]), abs=1e-4)
    is_control = [correlation["is_control"] for correlation in correlations.values()]
    assert is_control == [False, True, False, False]
    first, second = (figure.images[f"histograms_{name}"] for name in ("s16_expanded", "s16"))
    assert b"untrained" in first.content
    assert b"retinanet" not in first.content
    assert b"retinanet" in second.content


def test_a_generator_gives_the_learned_step_and_its_square_root():
    step, identity = 0.08 * draw(8), torch.eye(DIM, dtype=torch.float64)
    generator = find_generator(step, 0.25)
    assert_close(carry(identity, generator, 0.25).T, identity + step)
    half = carry(identity, generator, 0.125).T
    assert_close(half @ half, identity + step)
    # I + M has the eigenvalues -0.5 and 1.2: two steps of 0.5 square them.
    generator = find_generator(torch.diag(torch.tensor([-1.5, 0.2])), 0.5)
    found = carry(torch.tensor([[2.0, 1.0]]), generator, 1.0)
    assert_close(found, torch.tensor([[0.5, 1.44]], dtype=torch.float64))
    with pytest.raises(NotApplicable, match="singular"):
        find_generator(-torch.eye(3), 0.5)


def test_errors_beyond_the_frame_are_those_of_a_loop_over_positions(tiny):
    model = tiny.get("qb_heat").model  # 4 x 4 positions of 16 pixels: the frame has 2 x 2
    images = torch.randn(3, 3, 96, 96)
    dim = model.predictor.dim
    models = {"centre": (0.25, {name: 0.02 * draw(i, dim) for i, name in enumerate(NAMES)})}
    result = measure_errors(images, model, models)
    assert result.distances == [0.25, 0.5]
    with torch.no_grad():
        frame = model.encode(images[..., 32:64, 32:64]).double()
        for index, steps in enumerate((1, 2)):
            sums = {"learned": 0.0, "border": 0.0, "mean": 0.0, "variance": 0.0}
            move = 16 * steps
            for name, (row, column) in {
                "A1": (32, 32 + move),
                "A2": (32, 32 - move),
                "B1": (32 + move, 32),
                "B2": (32 - move, 32),
            }.items():
                moved = model.encode(images[..., row : row + 32, column : column + 32]).double()
                places = {"A1": [(0, 1), (1, 1)], "A2": [(0, 0), (1, 0)]}
                places |= {"B1": [(1, 0), (1, 1)], "B2": [(0, 0), (0, 1)]}
                true = torch.stack([moved[:, y, x] for y, x in places[name]])
                sums["variance"] += (true - true.mean(dim=(0, 1))).square().sum()
                one_step = torch.eye(dim, dtype=torch.float64) + models["centre"][1][name]
                for y, x in places[name]:
                    z = frame[:, y, x]
                    carried = z
                    for _ in range(steps):
                        carried = carried @ one_step.T
                    sums["learned"] += (carried - moved[:, y, x]).square().sum()
                    sums["border"] += (z - moved[:, y, x]).square().sum()
                    mean = frame.mean(dim=(1, 2))
                    sums["mean"] += (mean - moved[:, y, x]).square().sum()
            for title, errors in result.errors.items():
                key = title.split(",")[0].split()[0]
                expected = float(sums[key] / sums["variance"])
                assert errors[index] == pytest.approx(expected, rel=1e-4)


def test_features_beyond_the_frame_are_drawn_for_qb_heat_only(tiny, photos, tmp_path):
    run, detector = tiny.get("qb_heat"), tiny.get("retinanet")
    figure = draw_beyond([detector, run], FigureOptions(images=photos))
    check_files(figure, tmp_path)
    assert list(figure.data["runs"]) == ["qb_heat"]
    assert len(figure.table.rows) == 4  # two scales and two controls
    with pytest.raises(NotApplicable, match="retinanet"):
        draw_beyond([detector], FigureOptions(images=photos))


@pytest.fixture(scope="module")
def backbone(tiny):
    return find_mobile_former(tiny.get("mf_detr").model)


def test_the_bridges_of_an_image_sum_to_one_over_pixels_and_over_tokens(backbone):
    blocks = read_bridges(backbone, torch.randn(1, 3, 40, 56))
    assert [block.number for block in blocks] == [2, 3, 4]
    for block, stride in zip(blocks, (2, 4, 8), strict=True):
        size, half = (40 // stride, 56 // stride), (-(-20 // stride), -(-28 // stride))
        assert (block.to_former_stride, block.to_mobile_stride) == (stride, 2 * stride)
        assert block.to_former.shape == (1, 2, 6, *size)
        assert block.to_mobile.shape == (1, 2, 6, *half)
        assert_close(block.to_former.sum(dim=(3, 4)), torch.ones(1, 2, 6))
        assert_close(block.to_mobile.sum(dim=2), torch.ones(1, 2, *half))


def test_the_paper_s_blocks_are_chosen_of_its_networks_and_the_last_of_each_stage_of_others(
    backbone,
):
    with torch.device("meta"):
        paper = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s16"])
    assert choose_blocks(paper) == [3, 6, 10, 12]
    assert list(list_blocks(backbone).values())[1:] == [
        ("stages.2.0", 4, 8),
        ("stages.3.0", 8, 16),
    ]
    assert choose_blocks(backbone) == [2, 3, 4]
    assert find_mobile_former(nn.Linear(1, 1)) is None


def test_attention_of_several_models_is_drawn_in_the_same_images(tiny, photos, tmp_path):
    runs = [tiny.get(name) for name in ("resnet", "untrained", "mf_detr")]
    options = FigureOptions(images=photos, num_images=1)
    figure = draw_attention(runs, options, attention_heads="apart")
    check_files(figure, tmp_path)
    assert "resnet" in figure.data["left_out"][0]
    assert figure.data["blocks"] == {"untrained": [2, 3, 4], "mf_detr": [2, 3, 4]}
    with pytest.raises(NotApplicable, match="resnet"):
        draw_attention(runs[:1], options)


def test_visible_pixels_are_the_image_s_and_masked_ones_grey_or_made(tiny, photos):
    run = tiny.get("untrained")
    entries = crop_squares(run.cfg, [str(photos / f"{i}.png") for i in range(2)])
    with torch.no_grad():
        made = reconstruct_images(run.model, entries, pixel_format=run.cfg.INPUT.FORMAT)
        outputs = run.model(entries, ["top_left", "top_right"])
    assert [row["place"] for row in made.losses["corner"]] == ["top_left", "top_right"]
    for i, output in enumerate(outputs):
        visible = output["visible"].numpy()
        image = to_rgb(entries[i]["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        np.testing.assert_array_equal(made.columns["input"][i], image)
        shown, completed = made.columns["visible corner"][i], made.columns["from the corner"][i]
        np.testing.assert_array_equal(shown[visible], image[visible])
        np.testing.assert_array_equal(completed[visible], image[visible])
        assert (shown[~visible] == 128).all()
        pixels = to_rgb(output["reconstruction"], run.cfg.INPUT.FORMAT).clip(0, 255).round()
        np.testing.assert_array_equal(completed[~visible], pixels.astype(np.uint8)[~visible])
        loss = float(output["loss_reconstruction"])
        assert made.losses["corner"][i]["loss"] == pytest.approx(loss)


def test_each_run_has_a_grid_of_the_same_images(tiny, photos, tmp_path):
    runs = [tiny.get(name) for name in ("qb_heat", "retinanet", "untrained", "masking")]
    runs.insert(0, truncate(runs[0], tmp_path))
    options = FigureOptions(images=photos, num_images=2)
    figure = draw_reconstructions(runs, options)
    check_files(figure, tmp_path)
    assert list(figure.images) == ["grid_1", "grid_2", "grid_3"]
    assert [Path(name).name for name in figure.data["images"]] == ["0.png", "1.png"]
    reconstructions = figure.data["runs"]
    for view, mean in reconstructions["qb_heat"]["mean_losses"].items():
        assert mean == pytest.approx(
            fmean(row["loss"] for row in reconstructions["qb_heat"]["losses"][view])
        )
    assert [row[0] for row in figure.table.rows] == ["qb_heat", "untrained", "masking"]
    assert figure.table.rows[2][1:3] == ("-", "-")
    assert [
        name in text
        for name, text in zip(("cut", "retinanet"), figure.data["left_out"], strict=True)
    ]
    again = draw_reconstructions(runs[4:], options)
    # Masks are drawn from the seed.
    assert again.data["runs"]["masking"] == reconstructions["masking"]
    with pytest.raises(NotApplicable, match="classifier"):
        draw_reconstructions([tiny.get("classifier")], options)
