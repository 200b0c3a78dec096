# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MobileFormer`` against the naive second implementation, parameter by parameter."""

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.layers import FormerToMobile, MobileToFormer
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

from .reference_mobile_former import Weights, mobile_former, randomise_
from .tiny_pretraining import SMALL_ARCH

OUTPUTS = ["s2", "s4", "s8", "s16", "s16_expanded", "tokens"]

# Exact numbers of parameters: tokens, stem, blocks 1 to 12, final convolution.
PARAMETERS = {
    "3.7G": [
        *(1536, 1856, 9728, 746976, 740208, 1030464, 1054528, 1054528),
        *(2021440, 2257472, 2257472, 3281664, 4597504, 4597504, 1388160),
    ],
    "1.0G": [
        *(1536, 928, 2816, 564784, 565880, 669920, 686560, 686560),
        *(1000032, 1095520, 1095520, 1416128, 1822144, 1822144, 348480),
    ],
    "285M": [
        *(1152, 464, 896, 290680, 291324, 325904, 332304, 332304),
        *(406800, 443040, 511824, 559616, 681216, 681216, 87840),
    ],
}


@pytest.fixture(scope="module", params=list(PARAMETERS))
def variant(request):
    return str(request.param)


def random_encoder(variant):
    model = MobileFormer(arch=MOBILE_FORMER_ARCHS[variant], out_features=OUTPUTS)
    randomise_(model)
    return model.double().eval()


@pytest.fixture(scope="module")
def encoder(variant):
    return random_encoder(variant)


def image_of(*size, seed=0):
    return torch.randn(3, *size, generator=torch.Generator().manual_seed(seed)).double()


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_parameter_counts_are_the_published_ones(variant, encoder):
    blocks = [block for stage in encoder.stages for block in stage]
    parts = [encoder.stem, *blocks, encoder.expand]
    counts = [encoder.tokens.numel(), *(count(part.parameters()) for part in parts)]
    assert counts == PARAMETERS[variant]
    assert sum(counts) == count(encoder.parameters())


@pytest.mark.parametrize("size", [(64, 96), (50, 77)])
def test_outputs_equal_the_naive_implementation(variant, encoder, size):
    image, weights = image_of(*size), Weights(encoder)
    with torch.no_grad():
        outputs = encoder(image[None])
        expected = mobile_former(weights, MOBILE_FORMER_ARCHS[variant], image)
    assert weights.names_read == set(weights.tensors)
    assert list(outputs) == OUTPUTS
    for name, output in outputs.items():
        assert float(expected[name].std()) > 0.1, f"{name} is too flat to tell anything"
        assert_close(output[0], expected[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(("margin", "garbage"), [(0, 0.0), (5, 300.0)])
def test_a_padded_batch_gives_what_the_images_give_alone(margin, garbage):
    encoder = MobileFormer(arch=SMALL_ARCH, out_features=OUTPUTS)
    randomise_(encoder)
    encoder.double().eval()
    sizes = [(50, 77), (64, 33), (1, 1), (16, 96), (47, 17)]
    canvas = [max(size[axis] for size in sizes) + margin for axis in (0, 1)]
    batch = torch.full((len(sizes), 3, *canvas), garbage).double()
    images = [image_of(*size, seed=seed) for seed, size in enumerate(sizes)]
    for padded, image in zip(batch, images, strict=True):
        padded[:, : image.shape[1], : image.shape[2]] = image
    with torch.no_grad():
        together = encoder(batch, torch.tensor(sizes))
        for n, image in enumerate(images):
            for name, alone in encoder(image[None]).items():
                own = together[name][n : n + 1]
                if name != "tokens":
                    own = own[:, :, : alone.shape[2], : alone.shape[3]]
                # In double precision only a leak could be this large.
                assert_close(own, alone, rtol=1e-8, atol=1e-8, msg=f"{name} of image {n}")


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_order_of_maps_in_memory_changes_nothing(padded):
    torch.manual_seed(0)
    to_former = MobileToFormer(token_dim=12, channels=8).double()
    to_mobile = FormerToMobile(token_dim=12, channels=8).double()
    tokens = torch.randn(3, 4, 12).double()
    plain = torch.randn(3, 8, 5, 6).double().requires_grad_()
    turned = plain.detach().to(memory_format=torch.channels_last).requires_grad_()
    padding = (torch.rand(3, 1, 5, 6) < 0.3) if padded else None
    results = []
    for x in (plain, turned):
        found = to_mobile(x, to_former(tokens, x, padding))
        results.append((found, *torch.autograd.grad(found.square().sum(), x)))
    for first, second in zip(*results, strict=True):
        assert_close(first, second)
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)
