# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstructions, spatial correlation and heat of real files of weights, beside each other."""

import io
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.analysis.exhibit import Exhibit, write_exhibit
from qbheat_det.analysis.spatial_correlation import measure_spatial_correlation
from qbheat_det.analysis.steady_heat import study_map
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.correlation import see_correlation
from qbheat_det.engine.seeing.heat import see_heat
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.reconstructions import see_reconstructions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.subject import Subject
from tests.engine.seeing.encoder_subjects import (
    classifier_config,
    cut_short,
    detector_config,
    make_pictures,
    make_subject,
    pretraining_config,
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("weights")
    made = [
        make_subject(folder, pretraining_config(), "trained"),
        make_subject(folder, pretraining_config(), "untrained", iteration=0, seed=1),
        make_subject(folder, pretraining_config("MaskTokenMasking"), "scattered"),
        make_subject(folder, classifier_config(), "classifier"),
        make_subject(folder, classifier_config("transformer"), "transformer"),
        make_subject(folder, detector_config(), "detector"),
    ]
    return {subject.label: subject for subject in made}


def read(exhibit: Exhibit, folder: Path) -> dict[str, Any]:
    """Writes an exhibit, and returns its figures as its JSON has them."""
    paths = write_exhibit(exhibit, folder)
    assert all(path.stat().st_size for path in paths)
    return dict(json.loads(paths[0].read_text())["figures"])


def size_of(content: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(content)).size


def test_checkpoints_with_the_same_views_share_a_sheet_and_others_have_their_own(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    chosen = [subjects[name] for name in ("trained", "detector", "untrained", "scattered")]
    chosen.insert(0, cut_short(subjects["trained"], tmp_path))  # which costs itself alone
    exhibit = see_reconstructions(chosen, SightOptions(images=pictures, num_images=2))
    figures = read(exhibit, tmp_path)
    assert [Path(name).name for name in figures["images"]] == ["0.png", "1.png"]
    trained = figures["subjects"]["trained"]
    assert [row["place"] for row in trained["losses"]["corner"]] == ["top_left", "top_right"]
    for view, mean in trained["mean_losses"].items():
        assert mean == pytest.approx(fmean(row["loss"] for row in trained["losses"][view]))
    shared, alone = (size_of(picture.content) for picture in exhibit.pictures.values())
    side, gap = 192, 6  # 64 pixels, three times enlarged
    assert shared[0] == 6 * (side + gap) - gap  # the label, the input, two columns for each view
    assert shared[1] > 4 * side > alone[1] > 2 * side
    assert exhibit.table is not None
    assert [row[0] for row in exhibit.table.rows] == ["trained", "untrained", "scattered"]
    assert exhibit.table.rows[2][1:3] == ("-", "-")
    assert figures["left_out"][0].startswith("'cut': ")
    assert "'detector' (detection) reconstructs no pixels" in figures["left_out"][1]
    again = see_reconstructions(chosen, SightOptions(images=pictures, num_images=2))
    assert read(again, tmp_path) == figures  # scattered masks are drawn, from the seed


def test_without_a_decoder_to_pixels_there_is_nothing_to_reconstruct(
    subjects: dict[str, Subject], pictures: Path
) -> None:
    with pytest.raises(NothingToSee, match=r"no reconstructions: 'classifier' \(classification\)"):
        see_reconstructions([subjects["classifier"]], SightOptions(images=pictures))


def test_correlation_is_that_of_the_map_by_itself_and_an_untrained_one_has_two(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    chosen = [subjects[name] for name in ("trained", "untrained", "classifier", "detector")]
    chosen.append(cut_short(subjects["trained"], tmp_path))
    options = SightOptions(images=pictures, extra={"correlated_images": 3, "size": 96})
    exhibit = see_correlation(chosen, options)
    figures = read(exhibit, tmp_path)["subjects"]
    assert list(figures) == ["trained", "untrained", "classifier", "detector"]
    assert exhibit.figures["left_out"][0].startswith("'cut': ")
    assert [figures[name]["map"] for name in ("trained", "detector")] == ["s16_expanded", "s16"]
    model = subjects["trained"].model
    pixels = np.asarray(Image.open(pictures / "2.png"))  # 96 x 96, neither cropped nor resized
    image = torch.tensor(pixels if subjects["trained"].cfg.INPUT.FORMAT == "RGB" else
                         pixels[..., ::-1].copy()).permute(2, 0, 1)  # fmt: skip
    with torch.no_grad():
        found = model.backbone(((image - model.pixel_mean) / model.pixel_std)[None])
    expected = float(measure_spatial_correlation(found["s16_expanded"]))
    assert figures["trained"]["values"][2] == pytest.approx(expected, abs=1e-5)
    assert figures["trained"]["mean"] == pytest.approx(fmean(figures["trained"]["values"]))
    control = figures["untrained"]
    assert control["is_control"]
    assert control["with_statistics_of_images"]["mean"] != pytest.approx(control["mean"], abs=1e-4)
    assert "with_statistics_of_images" not in figures["trained"]
    # The detector has no map of theirs: histograms of different maps do not stand in one chart.
    picture, other = (exhibit.pictures[f"histograms_{number}"] for number in (1, 2))
    assert b"untrained" in picture.content
    assert b"detector" not in picture.content
    assert b"s16_expanded" not in other.content
    assert picture.dark is not None
    assert picture.dark != picture.content


def test_by_default_the_correlation_is_that_of_a_map_that_all_encoders_have(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    cfg = pretraining_config()
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16", "s16_expanded", "tokens"]
    options = SightOptions(images=pictures, extra={"correlated_images": 1, "size": 64})
    exhibit = see_correlation([make_subject(tmp_path, cfg, "rich"), subjects["detector"]], options)
    assert list(exhibit.pictures) == ["histograms"]
    assert {one["map"] for one in exhibit.figures["subjects"].values()} == {"s16"}


def test_what_a_run_has_not_is_left_out_of_the_correlation_or_said(
    subjects: dict[str, Subject], pictures: Path
) -> None:
    def see(*names: str, **extra: Any) -> Exhibit:
        chosen = [subjects[name] for name in names]
        return see_correlation(chosen, SightOptions(images=pictures, extra=extra))

    exhibit = see("trained", "detector", map="s8")
    assert list(exhibit.figures["subjects"]) == ["detector"]
    assert "has no map 's8'" in exhibit.figures["left_out"][0]
    with pytest.raises(NothingToSee, match="no map 's7'"):
        see("trained", map="s7")
    with pytest.raises(NothingToSee, match="two positions"):
        see("trained", size=16)
    with pytest.raises(UserError, match="at least 1"):
        see("trained", correlated_images=0)
    with pytest.raises(NothingToSee, match="--images"):
        see_correlation([subjects["trained"]], SightOptions())


def test_heat_is_that_of_the_class_activation_of_each_image(
    subjects: dict[str, Subject], pictures: Path, tmp_path: Path
) -> None:
    options = SightOptions(images=pictures, num_images=2, extra={"heat_class": "dog"})
    chosen = [subjects[name] for name in ("trained", "transformer", "classifier")]
    chosen.append(cut_short(subjects["classifier"], tmp_path))
    exhibit = see_heat(chosen, options)
    figures = read(exhibit, tmp_path)
    rows = figures["subjects"]["classifier"]
    assert [row["class"] for row in rows] == ["dog"] * 3
    model = subjects["classifier"].model
    entries = subjects["classifier"].load_entries(3, pictures)
    with torch.no_grad():
        scores = [float(output["scores"][1]) for output in model(entries)]
        features = model.backbone(model.preprocess_image(entries))["s16_expanded"]
        maps = torch.einsum("nchw,c->nhw", features, model.decoder.classifier.weight[1, :64])
    for row, score, activation in zip(rows, scores, maps, strict=True):
        assert row["score"] == pytest.approx(score)
        expected = study_map(activation.numpy()).to_dict()
        assert row["steady"]["correlation"] == pytest.approx(
            expected["steady"]["correlation"], abs=1e-3
        )
        assert row["source"] == expected["source"]
    assert len(figures["left_out"]) == 3
    assert "Grad-CAM" in figures["left_out"][1]
    assert figures["left_out"][2].startswith("'cut': ")
    # The numbers of the two rows that are drawn: maps and the ends of their scale.
    assert ["maps" in row for row in rows] == [True, True, False]
    shown = np.array(rows[1]["maps"]["cam"])
    folded = exhibit.figures["subjects"]["classifier"][1]["scale"]
    np.testing.assert_allclose([shown.min(), shown.max()], folded, rtol=1e-3)
    deviation = [values - values.mean() for values in (shown, maps[1].double().numpy())]
    np.testing.assert_allclose(deviation[0], deviation[1], atol=2e-3 * np.abs(shown).max())
    np.testing.assert_allclose(np.array(rows[1]["maps"]["steady"])[0], shown[0], rtol=1e-9)
    width, height = size_of(exhibit.pictures["maps_1"].content)
    assert width == 7 * (160 + 6) - 6
    assert 2 * 160 < height < 3 * 160
    options = SightOptions(pictures, num_images=2, extra={"heat_class": "1"})
    by_index = see_heat([subjects["classifier"]], options)
    assert by_index.figures["subjects"] == exhibit.figures["subjects"]


def test_a_class_that_is_not_known_is_named_and_maps_too_small_are_said(
    subjects: dict[str, Subject], pictures: Path
) -> None:
    def see(*names: str, **extra: Any) -> Exhibit:
        chosen = [subjects[name] for name in names]
        return see_heat(chosen, SightOptions(images=pictures, extra=extra))

    with pytest.raises(UserError, match="knows no class 'cow', but cat, dog, bird"):
        see("classifier", heat_class="cow")
    with pytest.raises(NothingToSee, match="3 x 3 is the smallest"):
        see("classifier", heat_size=32)
    assert see("classifier", heat_size=48).figures["subjects"]["classifier"]
    with pytest.raises(NothingToSee, match=r"'trained' \(pre-training\) has no class"):
        see("trained", "detector")
