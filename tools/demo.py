#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-train a backbone without labels, freeze it, teach a decoder to detect, and show all of it.

QB-Heat on the toy set's pictures without their boxes; then RetinaNet's decoder on the frozen
backbone, and the same on the frozen random backbone that pre-training began with. BatchNorm's
statistics of both are estimated on the same whole images. Ends with an illustrated report.

The set is drawn on first use, so nothing is downloaded. It takes minutes on two cores, and running
the demo again trains again. Inside, it is the training of tools/train_net.py and the prediction of
tools/predict.py; the report shows the commands.

examples:
  python tools/demo.py
  python tools/demo.py --output output/longer --pretraining SOLVER.EPOCHS 40
"""

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# What Detectron2's own imports say would otherwise be the first thing that the demo shows.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

from detectron2.config import CfgNode  # noqa: E402
from detectron2.data import DatasetCatalog, MetadataCatalog  # noqa: E402
from detectron2.engine import HookBase  # noqa: E402

import qbheat_det.analysis.story_report as story_report  # noqa: E402
from qbheat_det.analysis.detection_pictures import (  # noqa: E402
    DrawnBoxes,
    draw_side_by_side,
    tile_pictures,
)
from qbheat_det.analysis.html_report import Picture, write_report  # noqa: E402
from qbheat_det.analysis.story_report import PRETRAINED, RANDOM, Probe, Story  # noqa: E402
from qbheat_det.checkpoint import load_run_config  # noqa: E402
from qbheat_det.config import get_config_path  # noqa: E402
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.engine import Trainer, build_config, setup  # noqa: E402
from qbheat_det.engine.media import read_bgr, write_image  # noqa: E402
from qbheat_det.engine.predict import build_predictor  # noqa: E402
from qbheat_det.export import export_backbone  # noqa: E402

NUM_PICTURES = 12
NUM_RECALIBRATED = 400  # whole images for BatchNorm's statistics
SCORE_THRESHOLD = 0.2
MARK = ".of_the_demo"  # in folders that the next demo may remove


class Progress(HookBase):
    """Says every few seconds how far training is, the loss, and the time left."""

    def __init__(self, every_seconds: float = 10) -> None:
        self._every_seconds = every_seconds

    def before_train(self) -> None:
        self._start = self._said = time.monotonic()

    def after_step(self) -> None:
        now = time.monotonic()
        done, total = self.trainer.iter + 1, self.trainer.max_iter
        if now - self._said >= self._every_seconds or done == total:
            self._said = now
            loss = self.trainer.storage.history("total_loss").median(20)
            done_here = done - self.trainer.start_iter
            left = (now - self._start) / done_here * (total - done)
            left = story_report.format_duration(left)
            print(f"     step {done:>5,} of {total:,}   loss {loss:.3f}   {left} left", flush=True)


class DemoTrainer(Trainer):
    """The package's trainer, which says how far it is."""

    def build_hooks(self) -> list[HookBase | None]:
        """Progress first, since evaluation is a hook too."""
        return [Progress(), *super().build_hooks()]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/demo"), help="folder (default: output/demo)"
    )
    for stage in ("pretraining", "detection"):
        parser.add_argument(
            f"--{stage}",
            nargs="+",
            default=[],
            metavar="KEY VALUE",
            help=f"config overrides of {stage}",
        )
    return parser.parse_args(argv)


def clear(folder: Path) -> None:
    """Makes an empty folder; what an earlier demo left there is removed, anything else is not."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise UserError(f"'{folder}' is not of the demo: name another folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def start_run(config: str, output: Path, opts: Sequence[str]) -> DemoTrainer:
    """Sets a run up; of Detectron2's log, only errors reach the console from here on."""
    args = argparse.Namespace(
        config_file=get_config_path(config), opts=["OUTPUT_DIR", str(output), *opts]
    )
    args.eval_only = args.resume = False
    args.train_json = args.train_images = args.val_json = args.val_images = None
    clear(output)
    cfg = build_config(args)
    with contextlib.redirect_stdout(io.StringIO()) as hidden:
        setup(cfg, args)
    for name in ("detectron2", "fvcore"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is hidden:
                handler.setStream(sys.stdout)
                handler.setLevel(logging.ERROR)
    trainer = DemoTrainer(cfg)
    trainer.resume_or_load(resume=False)
    return trainer


def pretrain(output: Path, opts: Sequence[str]) -> tuple[CfgNode, dict[str, Path]]:
    """Pre-trains; returns the config and the backbones' files, of before and after."""
    trainer = start_run("demo/toy_qb_heat.yaml", output / "pretraining", opts)
    trainer.export("model_random")
    trainer.train()
    backbones = {}
    for name, stem in ((PRETRAINED, "model_final"), (RANDOM, "model_random")):
        weights = output / "pretraining" / f"{stem}.safetensors"
        backbones[name] = output / f"backbone_{stem}.safetensors"
        export_backbone(str(weights), backbones[name], overwrite=True, num_images=NUM_RECALIBRATED)
    return trainer.cfg, backbones


def teach_decoder(output: Path, backbone: Path, opts: Sequence[str]) -> Probe:
    """Trains the detector's decoder on a frozen backbone and evaluates it."""
    weights = ["MODEL.WEIGHTS", str(backbone)]
    trainer = start_run("demo/toy_probe.yaml", output, [*weights, *opts])
    return Probe(trainer.cfg, trainer.train().get("bbox", {}))


def draw_predictions(cfg: CfgNode, output: Path) -> list[Picture]:
    """Predicts on the first images of the test set; writes pictures and a contact sheet."""
    weights = str(Path(cfg.OUTPUT_DIR) / "model_final.pth")
    predictor = build_predictor(load_run_config(weights, device=cfg.MODEL.DEVICE))
    names = MetadataCatalog.get(cfg.DATASETS.TEST[0]).thing_classes
    drawn, pictures = [], []
    for record in DatasetCatalog.get(cfg.DATASETS.TEST[0])[:NUM_PICTURES]:
        image = read_bgr(Path(record["file_name"]))
        found = predictor(image)["instances"].to("cpu")
        found = found[found.scores >= SCORE_THRESHOLD]
        truth = DrawnBoxes.from_dataset_dict(record)
        predicted = DrawnBoxes.from_instances(found)
        picture = draw_side_by_side(image[:, :, ::-1], predicted, truth, names)
        stem = Path(record["file_name"]).stem
        write_image(output / "pictures" / f"{stem}.png", picture[:, :, ::-1])
        caption = f"Image {stem}: {len(truth.classes)} annotated, {len(found)} predicted"
        pictures.append(Picture.from_rgb(picture, alt=caption, caption=caption))
        drawn.append(picture)
    sheet = tile_pictures(drawn[:6], columns=2, gap=12)
    write_image(output / "predictions.jpg", sheet[:, :, ::-1])
    return pictures


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    start = time.monotonic()
    report_file = args.output / "report.html"
    if report_file.exists():
        print(f"{report_file} is there already: training again, and replacing it at the end")
    print(f"1/4  pre-training without boxes (full logs: {args.output}/*/log.txt)", flush=True)
    pretraining, backbones = pretrain(args.output, args.pretraining)
    probes = {}
    for number, (name, backbone) in enumerate(backbones.items(), start=2):
        print(f"{number}/4  a decoder on the frozen backbone: {name}", flush=True)
        folder = args.output / f"probe_{name.lower().replace('-', '_')}"
        probes[name] = teach_decoder(folder, backbone, args.detection)
    print(f"4/4  predicting on {NUM_PICTURES} unseen images for the report", flush=True)
    probe = probes[PRETRAINED].cfg
    pictures = draw_predictions(probe, args.output)
    story = Story(
        pretraining=pretraining,
        probes=probes,
        config_files=(
            get_config_path("demo/toy_qb_heat.yaml"),
            get_config_path("demo/toy_probe.yaml"),
        ),
        seconds=time.monotonic() - start,
        num_unlabelled=len(DatasetCatalog.get(pretraining.DATASETS.TRAIN[0])),
        num_train=len(DatasetCatalog.get(probe.DATASETS.TRAIN[0])),
        num_val=len(DatasetCatalog.get(probe.DATASETS.TEST[0])),
        score_threshold=SCORE_THRESHOLD,
    )
    write_report(story_report.describe_story(story, pictures), report_file)
    print(f"\nCOCO metrics on {story.num_val} unseen images, decoder on a frozen backbone:")
    for name, ap, ap50, _ in story_report.list_scores(probes):
        print(f"{name:<8} AP {ap:>5}   AP50 {ap50:>5}")
    print(story_report.HOW_TO_READ)
    print(f"took  {story_report.format_duration(story.seconds)}")
    print(f"open  {report_file.resolve()}")


if __name__ == "__main__":
    main()
