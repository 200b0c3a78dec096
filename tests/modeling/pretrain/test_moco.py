# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MoCo-v2 as a whole: its steps against a second implementation, its files, what is refused."""

import copy

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import nn
from torch.nn import functional as F

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, save_weights
from qbheat_det.modeling.pretrain import MoCo
from qbheat_det.modeling.pretrain.moco import FeatureQueue, MomentumCopy
from qbheat_det.modeling.pretrain.projection_head import ProjectionHead

SIZE = 8


class TinyBackbone(Backbone):
    """A convolution of stride 4, with BatchNorm or without."""

    def __init__(self, *, norm=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()

    def forward(self, x):
        return {"map": self.norm(self.stem(x))}

    def output_shape(self):
        return {"map": ShapeSpec(channels=6, stride=4)}


def make_model(*, norm=True, queue=12, **values):
    torch.manual_seed(1)
    backbone = TinyBackbone(norm=norm)
    return MoCo(
        backbone=backbone,
        head=ProjectionHead(
            input_shape=backbone.output_shape(), in_feature="map", hidden_dim=7, dim=5
        ),
        queue=FeatureQueue(size=queue, dim=5),
        in_feature="map",
        image_size=SIZE,
        pixel_mean=(120.0, 110.0, 100.0),
        pixel_std=(60.0, 50.0, 40.0),
        **values,
    )


def make_batch(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def view():
        return torch.randint(256, (3, SIZE, SIZE), generator=generator, dtype=torch.uint8)

    return [{"image": view(), "image_key": view(), "file_name": f"{i}.jpg"} for i in range(count)]


def reference_run(model, batches, lr):
    """Algorithm 1 of the paper, with its order: the copy follows before the keys are made."""
    query = nn.ModuleList([copy.deepcopy(model.backbone), copy.deepcopy(model.head)])
    key = copy.deepcopy(query)
    queue = [row.clone() for row in model.queue.keys]
    losses = []

    def embed(pair, batch, name):
        images = torch.stack([entry[name].float() for entry in batch])
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((120.0, 110, 100), (60.0, 50, 40)))
        return F.normalize(pair[1](pair[0]((images - mean) / std)), dim=1)

    for batch in batches:
        with torch.no_grad():
            for k, q in zip(key.parameters(), query.parameters(), strict=True):
                k.copy_(0.9 * k + 0.1 * q)
            keys = embed(key, batch, "image_key")
        queries = embed(query, batch, "image")
        total = torch.zeros(())
        for q, k in zip(queries, keys, strict=True):
            similarities = torch.stack([q @ k, *(q @ other for other in queue)]) / 0.2
            total = total - F.log_softmax(similarities, dim=0)[0] / len(batch)
        query.zero_grad()
        total.backward()
        with torch.no_grad():
            for parameter in query.parameters():
                parameter -= lr * parameter.grad
        queue = [*queue[len(batch) :], *keys]
        losses.append(float(total))
    return losses


def run(model, batches, lr):
    """The same as the trainer does it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)["loss_contrastive"]
        loss.backward()
        optimizer.step()
        model.after_step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("norm", [False, True])
def test_a_run_is_that_of_the_papers_algorithm(norm):
    batches = [make_batch(seed=seed) for seed in range(7)]
    model = make_model(norm=norm, momentum=0.9)
    expected = reference_run(model, batches, lr=0.3)
    assert max(expected) - min(expected) > 0.1
    found = run(model, batches, lr=0.3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_groups_give_what_processes_of_that_share_would():
    batch, model = make_batch(6), make_model(norm_groups=2)
    order = torch.tensor([4, 0, 3, 1, 5, 2])
    found = model(batch, order)["loss_contrastive"]
    other = make_model()  # the same weights
    images, keys = (other.preprocess_image(batch, key=key) for key in ("image", "image_key"))
    queries = torch.cat([other.embed(images[:3]), other.embed(images[3:])])
    shuffled = torch.cat([other.embed_keys(keys[order[:3]]), other.embed_keys(keys[order[3:]])])
    own = torch.stack([shuffled[order.tolist().index(i)] for i in range(6)])
    logits = torch.cat([(queries * own).sum(1, keepdim=True), queries @ other.queue.keys.T], 1)
    expected = F.cross_entropy(logits / 0.2, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, make_model()(batch)["loss_contrastive"])


def test_its_own_files_bring_a_copy_of_their_own(tmp_path):
    trained, path = make_model(momentum=0.9), tmp_path / "moco.safetensors"
    run(trained, [make_batch(seed=seed) for seed in range(3)], 0.3)
    info = WeightsInfo(pretrain_only_modules=MoCo.pretrain_only_modules)
    save_weights(str(path), trained.state_dict(), info)
    model = make_model(momentum=0.9)
    SafeCheckpointer(model).load(str(path))
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    assert not torch.equal(model.momentum_backbone.copied.stem.weight, model.backbone.stem.weight)
    other = nn.ModuleDict({"backbone": TinyBackbone(), "head": nn.Linear(2, 2)})
    SafeCheckpointer(other).load(str(path))
    torch.testing.assert_close(other["backbone"].stem.weight, trained.backbone.stem.weight)


def test_a_copy_of_equal_weights_keeps_its_bits_and_its_own_statistics():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    follower = MomentumCopy(module, momentum=0.999)
    module(torch.randn(8, 3))
    for _ in range(3):
        follower.follow(module)
    for a, b in zip(follower.copied.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(follower.copied[1].running_mean, torch.zeros(4), rtol=0, atol=0)
