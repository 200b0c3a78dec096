# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The peers of pre-training: what their encoders see, and that they differ in the encoder only."""

import torch

from benchmarks.masked_peers import (
    MaskedConvolutionEncoder,
    TokenDroppingEncoder,
    draw_visible,
    hidden_patches,
)
from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, build
from qbheat_det.analysis.complexity import count_parameters
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

SIZE, GRID = 128, 8


def mobile_former() -> MobileFormer:
    """With weights under which tokens and dynamic ReLUs are not near their neutral start."""
    net = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s16_expanded"])
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.3)
    return net


def test_dropped_tokens_are_those_of_the_same_model_with_a_mask_in_its_attention() -> None:
    encoder = TokenDroppingEncoder(image_size=SIZE).eval()
    images = torch.randn(1, 3, SIZE, SIZE)
    visible = draw_visible(1, GRID**2, images.device)
    attended = ~hidden_patches(visible, GRID**2)
    whole = encoder.vit.forward_features(images, attn_mask=attended[:, None, None])
    torch.testing.assert_close(encoder(images, visible), whole[:, visible[0]])


def test_masked_convolutions_give_a_visible_block_what_the_block_gives_alone() -> None:
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


def test_all_have_the_same_decoder_and_each_parameter_a_gradient() -> None:
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
