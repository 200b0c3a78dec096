# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What Detectron2's tools/lazyconfig_train_net.py asks for besides model, data and optimizer."""

train = {
    "output_dir": "./output",
    "init_checkpoint": "",
    "max_iter": 90000,
    "amp": {"enabled": False},
    "ddp": {"broadcast_buffers": False, "find_unused_parameters": False, "fp16_compression": False},
    "checkpointer": {"period": 5000, "max_to_keep": 3},
    "eval_period": 5000,
    "log_period": 20,
    "device": "cuda",
}
