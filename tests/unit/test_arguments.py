"""Arguments of a wrong type or range are refused where a strategy is made, with the argument's name."""

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from lightning_parallel.parameter_server.filters import TopK
from lightning_parallel.pipeline.partition.blocks import block_names


class Lazy(LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(3)


def test_a_block_within_another_is_refused():
    with pytest.raises(ValueError, match=r"blocks= names `0\.0`, which lies in `0`, beside it"):
        block_names(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), 2, ["0", "0.0"])


@pytest.mark.parametrize("make", [PipelineStrategy, ZeROStrategy, ParameterServerStrategy])
def test_parameters_without_shapes_are_refused_before_ranks_meet(make):
    with pytest.raises(ValueError, match=f"{make.__name__} deals .+ sizes, and `head.weight` has none"):
        make().connect(Lazy())


@pytest.mark.parametrize(
    ("strategy", "arguments", "words"),
    [
        (PipelineStrategy, {"schedule": "mine.csv"}, r"schedule='mine.csv': there is no such file in .+ Give the path"),
        (PipelineStrategy, {"schedule": Path("/no/mine.csv")}, "schedule='/no/mine.csv': there is no such file"),
        (PipelineStrategy, {"schedule": "auto", "memory_limit": "8GB"}, "memory_limit is a number of bytes above 0"),
        (PipelineStrategy, {"timeout": timedelta(0)}, r"timeout=datetime.timedelta\(0\): .+ above 0"),
        (PipelineStrategy, {"stages": {"inp": "a"}}, "stages is a mapping of names to numbers of stages"),
        (HybridStrategy, {"tensor_plan": {"up": 1}}, "tensor_plan is .auto. or a mapping of name patterns to styles"),
        (HybridStrategy, {"tensor_plan": {1: "colwise"}}, "tensor_plan is .auto. or a mapping of name patterns"),
        (ZeROStrategy, {"stage": [1]}, r"ZeROStrategy\(stage=\[1\]\): stage is 1, 2 or 3"),
        (ZeROStrategy, {"stage": True}, r"ZeROStrategy\(stage=True\): stage is 1, 2 or 3"),
        (ZeROStrategy, {"bucket_mb": float("inf")}, r"ZeROStrategy\(bucket_mb=inf\): bucket_mb is a size above 0"),
        (HybridStrategy, {"bucket_mb": True}, r"HybridStrategy\(bucket_mb=True\): bucket_mb is a size above 0"),
        (HybridStrategy, {"mesh_order": None}, "mesh_order=None: give data, pipeline, tensor in some order"),
        (ParameterServerStrategy, {"consistency": ["ssp"]}, r"consistency=\['ssp'\]: use one of bsp, ssp"),
        (ParameterServerStrategy, {"lease": -1}, r"\(lease=-1\): lease is a number of seconds above 0"),
        (ParameterServerStrategy, {"lease": "10"}, r"\(lease='10'\): lease is a number of seconds above 0"),
        (ParameterServerStrategy, {"filters": "topk"}, r"\(filters='topk'\): filters is a list of selectors and"),
        (ParameterServerStrategy, {"filters": TopK(0.5)}, r"\(filters=TopK\(share=0.5\)\): filters is a list of"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(strategy, arguments, words):
    with pytest.raises(ValueError, match=words):
        strategy(**arguments)
