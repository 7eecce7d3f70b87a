"""torchvision's and timm's models as their authors wrote them, cut by blocks="auto": each trains as in one process.

The operators of PyPI's torchvision do not load beside a CPU build of torch 2.13. Its models need none of them, and it
can be imported once they are declared. Since other libraries import torchvision where they find it, these two lie in a
folder of their own; `make test-vision` puts them there.
"""

import importlib.util
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
    pytest.skip("torchvision and timm are not installed: make test-vision", allow_module_level=True)

_OPERATORS = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_declared = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("qnms", *_OPERATORS, *(f"_{name}_backward" for name in _OPERATORS)):
    with suppress(RuntimeError):  # it is there
        _declared.define(f"{_name}(Tensor x) -> Tensor")

import timm  # noqa: E402
import torchvision  # noqa: E402

from tests.trainer.modules import CLASSES, Classifier  # noqa: E402
from tests.trainer.pipelines import Case, assert_same, many_on_stages, one_process  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXACT = {"rtol": 1e-8, "atol": 1e-10}  # double precision, sums in another order
OPTIONS = {"precision": "64-true", "max_steps": 2}


def pictures(rows: int, times: int) -> DataLoader:
    """16 pictures of 32 x 32, so many at a time."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows * times, 3, 32, 32, generator=g), torch.arange(rows * times) % CLASSES
    return DataLoader(list(zip(x.split(rows), y.split(rows), strict=True)), batch_size=None)


def vgg() -> Classifier:
    """VGG 11 but for the width of its classifier, whose weights are nine tenths of it."""
    with torch.device("meta"):
        network = torchvision.models.vgg11(num_classes=CLASSES)
    network.features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"])
    network.avgpool = nn.AdaptiveAvgPool2d(1)
    network.classifier = nn.Sequential(nn.Linear(512, 64), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(64, CLASSES))
    return Classifier(network)


def vit() -> Classifier:
    shape = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2}
    return Classifier(timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **shape))


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("make", [vgg, vit])
def test_models_without_batch_norm(make, num_stages: int):
    case = Case(make, lambda: pictures(8, 2), trainer=OPTIONS)
    [records] = many_on_stages([case], num_stages, timeout=250.0)
    assert_same(records, one_process(case), EXACT, EXACT)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_resnet_18_trains_as_its_micro_batches_do(num_stages: int):
    """One process that takes the micro-batches one by one and adds up their gradients normalises as the pipeline."""
    make = lambda: Classifier(torchvision.models.resnet18(num_classes=CLASSES))  # noqa: E731
    case = Case(make, lambda: pictures(8, 2), trainer=OPTIONS, validate=False)
    apart = case.but(loader=lambda: pictures(2, 8), trainer={"accumulate_grad_batches": 4})
    theirs, [records] = one_process(apart), many_on_stages([case], num_stages, timeout=250.0)
    losses = torch.stack(theirs.losses).unflatten(0, (2, 4)).sum(1)  # Lightning divides each by four
    torch.testing.assert_close(torch.stack(records[0].losses), losses, **EXACT)
    for name, value in theirs.weights.items():
        if "running" not in name and "num_batches" not in name:  # they move once a batch, by all of it
            torch.testing.assert_close(records[0].weights[name], value, **EXACT, msg=name)
