# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A training script for LazyConfigs, as Detectron2's tools/lazyconfig_train_net.py."""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import (
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import inference_on_dataset, print_csv_format

import qbheat_det  # noqa: F401  (registers qbheat:// for the checkpointer)


def do_test(cfg, model):
    evaluator = instantiate(cfg.dataloader.evaluator)
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), evaluator)
    print_csv_format(results)
    return results


def do_train(args, cfg):
    model = instantiate(cfg.model)
    model.to(cfg.train.device)
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    train_loader = instantiate(cfg.dataloader.train)
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer = SimpleTrainer(model, train_loader, optimizer)
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter)
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer),
            hooks.EvalHook(cfg.train.eval_period, lambda: do_test(cfg, model)),
            hooks.PeriodicWriter(writers, period=cfg.train.log_period),
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
    start_iter = 0
    if args.resume and checkpointer.has_checkpoint():
        start_iter = trainer.iter + 1
    trainer.train(start_iter, cfg.train.max_iter)


def main(args):
    cfg = LazyConfig.load(args.config_file)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    default_setup(cfg, args)
    if not args.eval_only:
        do_train(args, cfg)
        return
    model = instantiate(cfg.model)
    model.to(cfg.train.device)
    DetectionCheckpointer(model).load(cfg.train.init_checkpoint)
    do_test(cfg, model)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args=(args,))
