# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Statistics of the raw outputs of models on two synthetic images.

``fingerprints.json`` has those of the shipped entries, from the time of their measurement. They
show whether code, pre-processing and weights still give what was measured. To write the statistics
of new entries: ``python -m tests.model_zoo.fingerprints``.
"""

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qbheat_det.core.seeding import undisturbed
from qbheat_det.data import build_mapper
from qbheat_det.model_zoo import get_checkpoint, list_entries
from qbheat_det.model_zoo.sources import open_trained
from qbheat_det.modeling.contracts import PretrainingObjective, get_backbone

FILE = Path(__file__).with_name("fingerprints.json")
TOLERANCE = 1e-3
"""Relative to an output's standard deviation. The rounding of float32 changes outputs by about
1e-5, flipped channels or a different resize by more than 1e-1."""
# Odd sizes need rounding in the resize. Landscape and portrait need padding in detection batches.
_SIZES = ((331, 467), (419, 283))
_NUM_VALUES, _NUM_SCORES = 10, 5
# Modules with raw outputs, in the order of computation.
_MODULES = ("backbone", "head", "predictor", "decoder")


def compute_fingerprint(model, cfg):
    """Runs a detector, a classifier or a pre-training objective on the synthetic images.

    Returns mean, standard deviation and ten values by name of the output; five scores by image.
    """
    found = {}
    mapper = build_mapper(cfg, is_train=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as hooks:
        batch = []
        for number, (height, width) in enumerate(_SIZES):
            file = Path(folder) / f"{number}.png"
            Image.fromarray(_draw(height, width, number)).save(file)
            record = {"image_id": number, "height": height, "width": width, "label": 0}
            batch.append(mapper({"file_name": str(file), **record}))
        for name, module in model.named_modules():
            if name in _MODULES:

                def record_output(_, inputs, output, name=name):
                    # Now, because RetinaNet applies the sigmoid to its logits in place.
                    for key, tensor in _list_tensors(name, output):
                        found.setdefault(key, _summarise(tensor))

                hooks.enter_context(module.register_forward_hook(record_output))
        with undisturbed(model):
            torch.manual_seed(0)
            if isinstance(model, PretrainingObjective):  # adds feature maps of whole images
                get_backbone(model)(model.preprocess_image(batch))
            for number, result in enumerate(model(batch)):
                for key, tensor in _list_tensors(f"image{number}", result):
                    found[key] = _summarise(tensor)
                if "instances" in result:
                    scores = result["instances"].scores.sort(descending=True).values
                    best = [*scores[:_NUM_SCORES].tolist(), *[0.0] * _NUM_SCORES][:_NUM_SCORES]
                    found[f"image{number}.scores"] = best
    return found


def find_differences(expected, found):
    """Returns the names of the outputs that differ by more than the tolerance, in order."""
    wrong = []
    for name, before in expected.items():
        now = found.get(name, [])
        tolerance = 0.02 if name.endswith(".scores") else TOLERANCE * (before[1] or abs(before[0]))
        tolerance += 1e-5 * max(map(abs, before))  # the numbers have six digits
        is_close = len(now) == len(before) and np.allclose(now, before, rtol=0, atol=tolerance)
        wrong += [] if is_close else [name]
    return wrong + sorted(found.keys() - expected.keys())


def _draw(height, width, number):
    """Draws a synthetic RGB image (H, W, 3) with waves, uniform boxes and fine noise."""
    y, x, channel = (axis.astype(np.int64) for axis in np.ogrid[:height, :width, :3])
    phase = 3 * x * (channel + 1) + 2 * y * (3 - channel) + 97 * number
    wave = np.abs(phase % 510 - 255)  # 0 … 255 and back
    noise = (x * 73856093) ^ (y * 19349663) ^ ((channel + 3 * number + 1) * 83492791)
    noise = (((noise ^ (noise >> 13)) * 40503) & 0xFFFFFF) >> 19  # 0 … 31
    image = (wave * 7) // 8 + noise
    for box in range(6):
        top, left = (height * (37 * box % 71)) // 100, (width * (53 * box % 73)) // 100
        bottom, right = top + height // (4 + box), left + width // (3 + box % 4)
        image[top:bottom, left:right] = [(90 * box + 60 * c) % 256 for c in range(3)]
    return image.astype(np.uint8)


def _list_tensors(name, output):
    """Yields the floating-point tensors in nested mappings and sequences."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield name, output
    elif isinstance(output, Mapping | list | tuple):
        for key, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _list_tensors(f"{name}.{key}", value)


def _summarise(output):
    values = output.detach().double().cpu().flatten()
    sample = values
    if len(values) > _NUM_VALUES:  # steps of the golden section: spread over all channels
        steps = [(step * 2654435769 % 2**32) * len(values) >> 32 for step in range(_NUM_VALUES)]
        sample = values[steps]
    numbers = [values.mean(), values.std(correction=0), *sample]
    return [float(f"{float(number):.6g}") for number in numbers]


def main():
    """Adds the missing statistics of shipped entries to the file."""
    known = json.loads(FILE.read_text())
    for entry in list_entries():
        if entry.distribution is None and entry.name not in known:
            trained = open_trained(get_checkpoint(entry.name), device="cpu")
            known[entry.name] = compute_fingerprint(trained.model, trained.cfg)
    lines = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(values)}" for key, values in own.items())
        + "\n}"
        for name, own in known.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
