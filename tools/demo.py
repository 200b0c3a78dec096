#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Train a small detector on the built-in toy set, evaluate it, and write an illustrated report.

The set is drawn on first use, so nothing is downloaded. Training takes minutes on two cores, and
running the demo again trains again. Inside, it is the training of tools/train_net.py and the
prediction of tools/predict.py; the report shows both commands.

examples:
  python tools/demo.py
  python tools/demo.py --output output/longer SOLVER.MAX_ITER 3000
"""

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
import warnings
from pathlib import Path

# What Detectron2's own imports say would otherwise be the first thing that the demo shows.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

from detectron2.config import CfgNode  # noqa: E402
from detectron2.data import DatasetCatalog, MetadataCatalog  # noqa: E402
from detectron2.engine import HookBase  # noqa: E402

import qbheat_det.analysis.run_report as run_report  # noqa: E402
from qbheat_det.analysis.detection_pictures import (  # noqa: E402
    DrawnBoxes,
    draw_side_by_side,
    tile_pictures,
)
from qbheat_det.analysis.html_report import Picture, write_report  # noqa: E402
from qbheat_det.config import get_config_path  # noqa: E402
from qbheat_det.engine import Trainer, build_config, setup  # noqa: E402
from qbheat_det.engine.media import read_bgr, write_image  # noqa: E402
from qbheat_det.engine.prediction import build_predictor, load_run_config  # noqa: E402
from qbheat_det.errors import exit_with_sentence  # noqa: E402

NUM_PICTURES = 12
SCORE_THRESHOLD = 0.4


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
            left = run_report.format_duration((now - self._start) / done_here * (total - done))
            print(f"     step {done:>5,} of {total:,}   loss {loss:.3f}   {left} left", flush=True)
        if done == total:
            print("3/4  evaluating on images that were not trained on", flush=True)


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
    parser.add_argument("--config-file", help="YAML (default: configs/demo/toy_retinanet.yaml)")
    parser.add_argument(
        "opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides, last"
    )
    args = parser.parse_args(argv)
    args.config_file = args.config_file or get_config_path("demo/toy_retinanet.yaml")
    args.opts = ["OUTPUT_DIR", str(args.output / "run"), *args.opts]
    args.eval_only = args.resume = False
    args.train_json = args.train_images = args.val_json = args.val_images = None
    return args


def set_up_quietly(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Sets a run up; of Detectron2's log, only errors reach the console from here on."""
    with contextlib.redirect_stdout(io.StringIO()) as hidden:
        setup(cfg, args)
    for name in ("detectron2", "fvcore"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is hidden:
                handler.setStream(sys.stdout)
                handler.setLevel(logging.ERROR)


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


@exit_with_sentence
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    start = time.monotonic()
    report_file = args.output / "report.html"
    if report_file.exists():
        print(f"{report_file} is there already: training again, and replacing it at the end")
    shutil.rmtree(args.output / "run", ignore_errors=True)  # its own, from the last time
    cfg = build_config(args)
    set_up_quietly(cfg, args)
    print("1/4  data (drawn now if this is the first time)")
    num_train = len(DatasetCatalog.get(cfg.DATASETS.TRAIN[0]))
    num_val = len(DatasetCatalog.get(cfg.DATASETS.TEST[0]))
    print(f"2/4  training on {num_train} images (full log: {cfg.OUTPUT_DIR}/log.txt)")
    trainer = DemoTrainer(cfg)
    trainer.resume_or_load(resume=False)
    metrics = trainer.train().get("bbox", {})
    print(f"4/4  predicting on {NUM_PICTURES} of them for the report")
    pictures = draw_predictions(cfg, args.output)
    seconds = time.monotonic() - start
    run = run_report.Run(
        cfg=cfg,
        config_file=args.config_file,
        metrics=metrics,
        seconds=seconds,
        num_parameters=sum(p.numel() for p in trainer.model.parameters()),
        num_train=num_train,
        num_val=num_val,
        score_threshold=SCORE_THRESHOLD,
    )
    write_report(run_report.describe_run(run, pictures), report_file)
    print()
    print(f"AP    {metrics.get('AP', float('nan')):.1f}")
    print(
        f"AP50  {metrics.get('AP50', float('nan')):.1f}   (COCO metrics, {num_val} unseen images)"
    )
    print(f"took  {run_report.format_duration(seconds)}")
    print(f"open  {report_file.resolve()}")


if __name__ == "__main__":
    main()
