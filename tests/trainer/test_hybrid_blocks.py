"""Stage 3 of ZeRO gathers a block at a time within a micro-batch's forward and backward, and lets gradients go as the
last backward or W of a stage makes them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_parallel.demo.gpt import GPT, Block
from lightning_parallel.errors import StageError
from lightning_parallel.pipeline.weight_grad import waiting
from lightning_parallel.zero import collectives
from tests.trainer.hybrids import Mesh, gpt_case, on_meshes
from tests.trainer.pipelines import Record

BLOCKS = 8
THREE = {"zero_stage": 3, "gather": "microbatch"}
BLOCK_BYTES = 4 * sum(p.numel() for p in Block(16, 2, 0.0).parameters())


def gpt(kind: type[GPT] = GPT, **options: Any) -> Callable[[], GPT]:
    warnings.filterwarnings("ignore", message=".*save_hyperparameters")
    return lambda: kind(vocabulary=19, context=16, width=16, num_blocks=BLOCKS, num_heads=2, **options)


class Frozen(GPT):
    """One block does not train at all, and of another the largest weight does not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.blocks[1].requires_grad_(False)
        self.blocks[4].qkv.weight.requires_grad_(False)
        return super().configure_optimizers()


class InPairs(GPT):
    """Activation checkpoints of the user's own, each around two blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for i in range(0, BLOCKS, 2):
            x = checkpoint(lambda x, i=i: self.blocks[i + 1](self.blocks[i](x)), x, use_reentrant=False)
        return self.head(self.norm(x))


class Viewing(Block):
    """Returns a view of what it computed."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).flatten(1).unflatten(1, x.shape[1:])


class Weighed(GPT):
    """The loss reads a block's weight beside its call, and the step writes to what blocks returned."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[5] = Viewing(16, 2, 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
            x += 1e-3
        return self.head(self.norm(x)) + 1e-3 * self.blocks[BLOCKS - 1].up.weight.square().sum()


class Noted(Block):
    """Puts what it made inside into a list of the model's."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.norm_1.register_forward_hook(lambda module, args, result: self.list.append(result))
        self.list: list[Tensor] = []


class Inside(GPT):
    """The loss is made of what is inside the last block, and not of what it returns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[BLOCKS - 1] = Noted(16, 2, 0.0)

    def _loss(self, batch: Any) -> Tensor:
        return super()._loss(batch).detach() + self.blocks[BLOCKS - 1].list.pop().square().mean()


class Low(nn.Module):
    """A product of a sum of a weight and of a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16) / 64)
        self.a, self.b = nn.Parameter(torch.randn(4, 16) / 8), nn.Parameter(torch.randn(64, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a)


class Adapted(GPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.up = Low()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (gpt(), {}),
    "frozen": (gpt(Frozen, tie_embeddings=False), {}),
    "blocks computed again": (gpt(), {"recompute": "block"}),
    "stages computed again": (gpt(), {"recompute": "stage"}),
    "the user's checkpoints": (gpt(InPairs), {}),
    "weights made of weights": (gpt(Adapted), {}),
    "what is inside a block": (gpt(Inside), {}),
    "weights read outside, views written to": (gpt(Weighed), {}),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["one stage", "1f1b", "interleaved_1f1b", "zb_v"])
def test_by_block_is_by_step_to_the_bit(schedule: str):
    """Elements are reduced in one way however they are laid out; only a norm's sum would depend on it."""
    pipeline, named = (1, {}) if schedule == "one stage" else (2, {"schedule": schedule})
    jobs = []
    for make, options in KINDS.values():
        case = gpt_case(gradient_clip_val=None).but(make=make, at_end=kept)
        ways = ({"zero_stage": 3}, {**THREE, "bucket_mb": 1e-3})
        jobs += [(case, Mesh(2, pipeline, 1, {**named, **options, **way})) for way in ways]
    answers = iter(on_meshes(jobs, timeout=380.0))
    for kind, by_step, by_block in zip(KINDS, answers, answers, strict=True):
        for ours, theirs in zip(by_block, by_step, strict=True):
            assert_equal(ours, theirs, kind)
        assert set().union(*(ours.extra for ours in by_block)) == ({BLOCKS - 1} if "outside" in kind else set()), kind


def kept(trainer: Trainer, module: LightningModule) -> set[int]:
    """Which blocks were found not to be at work in their calls alone."""
    return trainer.strategy._states.windows._uses.kept


def assert_equal(ours: Record, theirs: Record, what: str) -> None:
    assert all(map(torch.equal, ours.losses, theirs.losses)), what
    for name, value in theirs.own.items():
        assert torch.equal(ours.own[name], value), (what, name)
    for state, other in zip(ours.optimizers, theirs.optimizers, strict=True):
        assert state.keys() == other.keys()
        for number, fields in other.get("state", {}).items():
            assert all(torch.equal(state["state"][number][field], value) for field, value in fields.items())


class OfAnother(GPT):
    """What comes behind the last block reads weights of the first, whose stage lies on the same rank in a V."""

    def forward(self, tokens: Tensor) -> Tensor:
        inner = super().forward(tokens)
        return inner + 1e-3 * self.blocks[0].up.weight.square().sum() + 1e-3 * self.embedding.weight.square().sum()


@pytest.mark.slow
def test_a_stage_may_read_weights_of_another_on_its_rank():
    case = gpt_case(gradient_clip_val=None).but(make=gpt(OfAnother, tie_embeddings=False))
    ways = ({"zero_stage": 3}, {**THREE, "bucket_mb": 1e-3})
    by_step, by_block = on_meshes([(case, Mesh(2, 2, 1, {"schedule": "zb_v", **way})) for way in ways])
    for ours, theirs in zip(by_block, by_step, strict=True):
        assert_equal(ours, theirs, "weights of another stage")


class Later(GPT):
    """Reads weights beside their blocks' calls from the second step on: of blocks before, behind and right behind what
    was called last, and within another one's call; then of one more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[3].of_another = (self.blocks[1].up,) if batch_idx else ()
        loss = super().training_step(batch, batch_idx)
        for block in range(batch_idx):
            loss = loss + 1e-3 * self.blocks[block].up.weight.detach().square().sum() * loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("norm", self.blocks[4].up.weight.norm() if batch_idx else torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            if self.trainer.global_step and number in (2, 5):
                x = x * (1 + self.blocks[number].down.weight.mean()) + self.blocks[6].norm_2.weight.float()
            x = block(x)
        return self.head(self.norm(x))


class Borrowing(Block):
    """Adds what a linear layer of another block makes of its input."""

    of_another: Any = ()  # no list of modules, which would be its own

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        inner = super().forward(x, mask)
        return sum((F.linear(x, linear.weight).mean(-1, True) for linear in self.of_another), inner)


def later() -> GPT:
    model = gpt(Later, tie_embeddings=False)()
    model.blocks[3].__class__ = Borrowing
    return model


@pytest.mark.parametrize("recompute", ["none", pytest.param("block", marks=pytest.mark.slow)])
def test_what_is_first_read_in_a_later_step_is_gathered_there(recompute: str):
    validation = {"val_check_interval": 3, "limit_val_batches": 2}
    case = gpt_case(gradient_clip_val=None, **validation).but(make=later, at_end=kept, validate=True)
    ways = ({"zero_stage": 3}, {**THREE, "bucket_mb": 1e-3})
    by_step, by_block = on_meshes([(case, Mesh(2, 1, 1, {"recompute": recompute, **way})) for way in ways])
    for ours, theirs in zip(by_block, by_step, strict=True):
        assert_equal(ours, theirs, recompute)
        assert ours.extra == {0, 1, 4, 6} and ours.final["logged/norm"] == theirs.final["logged/norm"] != 1


class LaterOfAnother(OfAnother):
    """Reads weights of the other stage from the second step on."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if self.trainer.global_step else GPT.forward(self, tokens)


@pytest.mark.slow
def test_a_later_step_may_read_weights_of_another_stage_on_its_rank():
    case = gpt_case(gradient_clip_val=None).but(make=gpt(LaterOfAnother, tie_embeddings=False))
    ways = ({"zero_stage": 3}, {**THREE, "bucket_mb": 1e-3})
    by_step, by_block = on_meshes([(case, Mesh(2, 2, 1, {"schedule": "zb_v", **way})) for way in ways])
    for ours, theirs in zip(by_block, by_step, strict=True):
        assert_equal(ours, theirs, "weights of another stage, later")


class Alone(GPT):
    """Copies read weights of different blocks in the second step, or one copy alone reads one."""

    of_second: int | None = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        block = self.of_second if self.global_rank else 0
        return loss + self.blocks[block].up.weight.square().sum() if batch_idx and block is not None else loss


class QuiteAlone(Alone):
    of_second = None


@pytest.mark.parametrize("kind", [Alone, pytest.param(QuiteAlone, marks=pytest.mark.slow)])
def test_a_copy_that_reads_alone_is_told(kind: type[Alone]):
    words = (
        "reads parameter `blocks.[01].up.weight` outside of its block's call, for the first time, and another copy"
        if kind is Alone
        else "(?s)waited for another one.*the other copies of the model to read parameter `blocks.0.up.weight` too"
    )
    with pytest.raises(ValueError if kind is Alone else StageError, match=words):
        on_meshes([(gpt_case().but(make=gpt(kind)), Mesh(2, 1, 1, THREE))])


class InHook(GPT):
    """A hook of the backward reads a weight of a block that has been freed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            loss.register_hook(lambda gradient: gradient * (1 + self.blocks[0].up.weight.square().sum()))
        return loss


def reads_between_steps(trainer: Trainer, module: LightningModule) -> str:
    weight = module.blocks[0].up.weight
    assert weight.shape == (64, 16) and isinstance(weight, nn.Parameter) and weight.grad is not None
    with trainer.strategy.whole_parameters():
        assert weight.norm().isfinite()
    with pytest.raises(ValueError) as told:
        weight.norm()
    return str(told.value)


def test_whoever_reads_a_freed_parameter_is_told():
    mesh, words = Mesh(2, 1, 1, THREE), "reads parameter `blocks.0.up.weight`, of which zero_stage=3 leaves this rank"
    [records] = on_meshes([(gpt_case(gradient_clip_val=None).but(make=gpt(), at_end=reads_between_steps), mesh)])
    assert all(f"`norm` {words}" in record.extra for record in records)
    with pytest.raises(ValueError, match=f"`square` {words}"):
        on_meshes([(gpt_case().but(make=gpt(InHook)), mesh)])


class Watched(Callback):
    """Counts bytes by hand: whole vectors that gathers filled and that still have memory, and gradients."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.whole: list[int] = []  # blocks whose parameters have memory, whenever a gather begins
        self.gradients: list[int] = []  # bytes, whenever a gradient was made
        self._vectors: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._counts = False
        self._blocks: dict[str, list[nn.Parameter]] = {}
        for entry, parameter in trainer.strategy.pipeline.own:
            if entry.name.startswith("blocks."):
                self._blocks.setdefault(entry.name.split(".")[1], []).append(parameter)
        gather, reduce = collectives._ALL_GATHER, collectives._REDUCE_SCATTER
        self._before = {gather: getattr(dist, gather), reduce: getattr(dist, reduce)}
        setattr(dist, gather, self._gather)
        setattr(dist, reduce, self._reduce)
        own = [parameter for _, parameter in trainer.strategy.pipeline.own]
        self._handles = [p.register_post_accumulate_grad_hook(self._made) for p in own if p.requires_grad]

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self._counts = index > 0  # the first step finds out how blocks are used, with all of them whole

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._counts = False

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)
        for handle in self._handles:
            handle.remove()

    def _gather(self, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._vectors[whole.untyped_storage()._cdata] = (whole.untyped_storage(), whole.nbytes)
        if self._counts:
            alive = {number for number, (storage, size) in self._vectors.items() if storage.nbytes() >= size}
            held = [{p.untyped_storage()._cdata for p in block} for block in self._blocks.values()]
            self.whole.append(sum(bool(alive & storages) for storages in held))
        return self._before[collectives._ALL_GATHER](whole, *args, **kwargs)

    def _reduce(self, out: Tensor, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._storages.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        self._count()
        return self._before[collectives._REDUCE_SCATTER](out, whole, *args, **kwargs)

    def _made(self, parameter: nn.Parameter) -> None:
        if type(parameter.grad) is Tensor:
            self._storages.append((StorageWeakRef(parameter.grad.untyped_storage()), parameter.grad.nbytes))
            self._count()

    def _count(self) -> None:
        self._storages = [(storage, size) for storage, size in self._storages if not storage.expired()]
        if self._counts:
            of = {storage.cdata: size for storage, size in self._storages}
            self.gradients.append(sum(of.values()))


def watched(trainer: Trainer, module: LightningModule) -> tuple[list[int], list[int]]:
    found = next(callback for callback in trainer.callbacks if isinstance(callback, Watched))
    return found.whole, found.gradients


@pytest.mark.parametrize("schedule", ["one stage", pytest.param("zb_v", marks=pytest.mark.slow)])
def test_two_blocks_are_whole_and_few_gradients(schedule: str, monkeypatch: pytest.MonkeyPatch):
    """A block at work, and the one that comes; gradients of a block, and those of as many as are on their way."""
    pipeline, named = (1, {}) if schedule == "one stage" else (2, {"schedule": schedule})
    monkeypatch.setattr(waiting, "IN_ONE_CALL", 1)  # W makes products of so many bytes before it hands them over
    case = gpt_case(gradient_clip_val=None, callbacks=lambda: [Watched()])
    jobs = []
    for recompute in ("none", "block"):
        options = {**THREE, **named, "num_microbatches": 1, "recompute": recompute}
        jobs.append((case.but(make=gpt(tie_embeddings=False), at_end=watched), Mesh(2, pipeline, 1, options)))
    for records in on_meshes(jobs):
        for whole, gradients in (record.extra for record in records):
            assert len(whole) >= BLOCKS // pipeline and max(whole) == 2
            # What is made, what it is copied to, two on their way, and what lies outside of blocks.
            assert BLOCK_BYTES <= max(gradients) < 4.5 * BLOCK_BYTES, max(gradients) / BLOCK_BYTES
