"""What DeepSpeed needs to run in a process that other code has set up: its import, its configuration, its globals.

The one idea: DeepSpeed decides at import and at its first group what kind of process it is in. So that is told it
before each, and forgotten behind a run, in order that the next may be another. Left out: whatever
`deepspeed.initialize` does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.zero.ranks import Ranks

_PERSISTENT = 100_000  # elements: stage 3 keeps smaller parameters whole, unless buckets are small themselves


@dataclass(frozen=True)
class DeepSpeedOptions:
    """How to divide.

    Args:
        stage: 1, 2 or 3.
        bucket_bytes: of the gradients that are reduced at a time.
        dtype: of parameters.
        offload: keep optimizer states (stage 3: parameters too) in the host's memory.
        master: update a copy of 32 bits, also of parameters of 16.
    """

    stage: int = 2
    bucket_bytes: int = 128 << 20
    dtype: torch.dtype = torch.float32
    offload: bool = False
    master: bool = True

    @property
    def updated(self) -> torch.dtype:
        """Of the vectors that the optimizer updates."""
        return torch.float32 if self.master else self.dtype

    @property
    def bucket_elements(self) -> int:
        """Gradients that are reduced at a time."""
        return max(1, self.bucket_bytes // self.dtype.itemsize)

    def configuration(self, device: torch.device) -> dict[str, Any]:
        """DeepSpeed's own configuration.

        The caller owns the step: gradients accumulate until the optimizer's step is called, and nobody divides them.
        Stages 1 and 2 reduce and scatter rather than all-reduce, so that they move 2P as in the paper. Stage 3 frees
        parameters behind their forward and gathers them once more, 3P: DeepSpeed itself would keep a billion elements.

        Example:
            >>> DeepSpeedOptions(stage=1).configuration(torch.device("cpu"))["zero_optimization"]["stage"]
            1
        """
        elements = self.bucket_elements
        cuda = device.type == "cuda"
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": elements,
            "allgather_bucket_size": elements,
            "overlap_comm": cuda and self.stage > 1,
            "use_multi_rank_bucket_allreduce": False,
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear for good
            "stage3_prefetch_bucket_size": elements,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": min(_PERSISTENT, elements // 80),
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.dtype == torch.bfloat16, "check_grad_overflow": False},
            "fp16": {"enabled": self.dtype == torch.float16, "loss_scale": 1.0},  # 0 would be a scale of its own
            "zero_optimization": zero,
            "steps_per_print": 1 << 60,
        }


@contextmanager
def vectors_of(dtype: torch.dtype) -> Iterator[None]:
    """Let what DeepSpeed divides have vectors of this dtype; by itself it has 16 bits for its own Adam alone."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    own = ZeROOptimizer._configure_master_weights

    def configure(optimizer: Any, **_: Any) -> torch.dtype:
        own(optimizer)
        return dtype

    ZeROOptimizer._configure_master_weights = configure
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = own


class ShardGroups:
    """Tells DeepSpeed, as the `mpu` that it asks, among whom it divides: one group of neighbours, no part of a model.

    Args:
        ranks: the neighbours, in a group of their own.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def get_data_parallel_group(self) -> Any:
        """The neighbours."""
        return self.ranks.group

    def get_data_parallel_world_size(self) -> int:
        """How many there are."""
        return self.ranks.size

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.ranks.rank

    def get_model_parallel_group(self) -> None:
        """Nobody holds another part of the model."""

    def get_model_parallel_world_size(self) -> int:
        """So it is this rank alone."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The first of one."""
        return 0


def refuse_missing() -> None:
    """Raise if DeepSpeed is not there; it is not imported.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError("deepspeed is not installed: pip install deepspeed")


_DEVICE = "DS_ACCELERATOR"
_before: dict[str, str | None] = {}  # variables of the environment that are others for a run


def import_deepspeed(device: torch.device) -> ModuleType:
    """The package, told on what device this process computes.

    Args:
        device: without it DeepSpeed takes a GPU where there is one, whatever the Trainer computes on.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    refuse_missing()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with _told_in_environment(device):
        import deepspeed

        deepspeed.accelerator.get_accelerator()  # which it keeps
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # its import sets another
    if device.type == "cpu":
        import deepspeed.ops

        # Compiled at every first start, and used by its inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Its answer is whether oneDNN is fast with float16; PyTorch computes with it on any CPU.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


@contextmanager
def _told_in_environment(device: torch.device) -> Iterator[None]:
    """A context in which DeepSpeed's variable names the device, unless the user's does."""
    if _DEVICE in os.environ:
        yield
        return
    os.environ[_DEVICE] = device.type
    try:
        yield
    finally:
        del os.environ[_DEVICE]


def connect_deepspeed(deepspeed: ModuleType, device: torch.device, rank: Mapping[str, int]) -> None:
    """Let DeepSpeed use the process groups that are open.

    Args:
        deepspeed: the package.
        device: on which this process computes.
        rank: RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_SIZE, which DeepSpeed reads from the environment. Without the last
            it starts a program (numactl) to count a CPU host's processes whenever stage 3 reduces.
    """
    _before.update({name: os.environ.get(name) for name in rank if name not in _before})
    os.environ.update({name: str(value) for name, value in rank.items()})
    backend = "gloo" if device.type == "cpu" else "nccl"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, dist_init_required=True)
    _look_up_when_called(deepspeed.comm.comm.cdb)


def _look_up_when_called(backend: Any) -> None:
    """Its backend keeps two functions of torch.distributed as they were at its start; measurements replace them."""
    backend.all_gather_function = lambda *args, **kwargs: dist.all_gather_into_tensor(*args, **kwargs)
    backend.reduce_scatter_function = lambda *args, **kwargs: dist.reduce_scatter_tensor(*args, **kwargs)


@contextmanager
def forgotten_on_failure() -> Iterator[None]:
    """A context in which DeepSpeed is set up for a run; what it has kept is forgotten if it fails."""
    try:
        yield
    except BaseException:
        forget_groups()
        raise


@contextmanager
def answering_for(rank: int) -> Iterator[None]:
    """A context in which DeepSpeed takes itself apart behind a failure, when its groups are closed already.

    It asks them for its rank, and for nothing else.
    """
    from deepspeed.comm import comm

    before, comm.cdb = comm.cdb, SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: rank)
    try:
        yield
    finally:
        comm.cdb = before


def forget_groups() -> None:
    """Behind a run: DeepSpeed keeps groups of processes in globals, and they are closed now; and the module, in which a
    forward that failed was."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    comm.cdb = None
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._release_process_group_references(group=None)
    while _before:
        name, value = _before.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
