# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former as a timm model: features, a classifier, and timm's optimizer and transforms."""

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

import qbheat_det  # noqa: F401  (registers Mobile-Former with timm)

torch.manual_seed(0)
print(timm.list_models("*mobile_former*"), timm.list_pretrained("*mobile_former*"))

# A segmentation head on the feature maps, trained on bright squares.
backbone = timm.create_model("mobile_former_285m", features_only=True, pretrained=True)
print("channels", backbone.feature_info.channels(), "strides", backbone.feature_info.reduction())
head = nn.Conv2d(sum(backbone.feature_info.channels()[1:]), 1, 1)
images = torch.rand(4, 3, 128, 128)
masks = torch.zeros(4, 1, 128, 128)
for index in range(4):
    masks[index, :, 16 * index : 16 * index + 64, 32:96] = 1
images += 2 * masks
optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-3)
for step in range(8):
    maps = backbone(images)[1:]
    maps = [F.interpolate(x, size=maps[0].shape[-2:], mode="bilinear") for x in maps]
    logits = F.interpolate(head(torch.cat(maps, dim=1)), size=masks.shape[-2:], mode="bilinear")
    loss = F.binary_cross_entropy_with_logits(logits, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"segmentation step {step}: loss {loss.item():.4f}")

# A classifier of ten classes, fine-tuned with layer-wise learning rates.
model = timm.create_model("mobile_former_285m", pretrained=True, num_classes=10, drop_path_rate=0.1)
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config, is_training=False)
print("input", config["input_size"], "mean", config["mean"], type(transform).__name__)
optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
scales = sorted({round(group["lr_scale"], 6) for group in optimizer.param_groups})
print("layers", len(scales), "scales", scales[0], scales[-1])
labels = torch.arange(4)
for step in range(8):
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"classifier step {step}: loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    features = model.forward_features(images)
    same = torch.equal(model.forward_head(features), model(images))
    print("features", tuple(features.shape), "head of features is forward:", same)
    print("classifier", model.get_classifier())
    model.reset_classifier(0)
    vectors = model(images)
    print("vectors", tuple(vectors.shape), "classifier", model.get_classifier())
    model.reset_classifier(5)
    print("logits", tuple(model(images).shape), "num_classes", model.num_classes)
