"""Whatever is sent arrives as it was: every dtype, any layout, no elements at all, and headers beside the tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.stage.boundary import Contract, RecvBoundary, SendBoundary
from lightning_parallel.pipeline.transport.channel import Channel
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta, describe
from tests.harness import run_ranks

CPU = torch.device("cpu")
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip


def values() -> list[Tensor]:
    """One tensor of each dtype, then every layout."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=g)
    dtypes = [torch.arange(5).remainder(2).to(dtype) for dtype in DTYPES]
    numbers = torch.view_as_complex(torch.randn(3, 2, generator=g))
    layouts = [
        base.t(), base[:, ::2], base[1:, 1:], base[0].expand(3, 6), base[..., None], base[0, 0], base[:0],
        torch.empty(0, 3, 0), numbers.conj(), numbers.conj().imag, base.view(2, 2, 6).permute(2, 0, 1), base.flip(0),
        torch.tensor([float("nan"), -0.0]),
        base.as_strided((2, 2), (1, 1)), torch.full((2,), True)[::2],
    ]  # fmt: skip
    return dtypes + layouts


def channels(rank: int, *pairs: tuple[int, int]) -> list[Channel]:
    """A channel for each (source, target), in one order on every rank."""
    made = [Channel(source, target, tag, CPU) for tag, (source, target) in enumerate(pairs)]
    for channel in made:
        channel.warm_up(rank)
    return made


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_and_layout_arrives_as_it_was():
    def transfer(rank: int) -> bool:
        [channel] = channels(rank, (0, 1))
        sent = values()
        if rank == 0:
            channel.send(sent, [describe(t) for t in sent])
            channel.flush()
            return True
        received = channel.post([describe(t) for t in sent], "everything").wait()
        for ours, theirs in zip(received, sent, strict=True):
            assert (ours.dtype, ours.shape, bits(ours)) == (theirs.dtype, theirs.shape, bits(theirs))
            dense = theirs.numel() == theirs.untyped_storage().nbytes() // theirs.itemsize
            assert ours.stride() == theirs.stride() if dense else ours.is_contiguous()
        return True

    assert run_ranks(transfer, 2) == [True, True]


def test_receives_posted_early_get_what_was_sent_in_that_order():
    def transfer(rank: int) -> list[float]:
        there, back = channels(rank, (0, 1), (1, 0))
        meta = [TensorMeta((2,), (1,), torch.float32)]
        mine, theirs = (there, back) if rank == 0 else (back, there)
        receipts = [theirs.post(meta, f"value {i}") for i in range(8)]
        for i in range(8):
            mine.send([torch.full((2,), float(10 * rank + i))])
        got = [float(receipt.wait()[0][0]) for receipt in receipts]
        mine.flush()
        return got

    assert run_ranks(transfer, 2) == [[float(10 + i) for i in range(8)], [float(i) for i in range(8)]]


def test_what_was_sent_may_be_changed_by_nobody_but_its_copy_may():
    def transfer(rank: int) -> list[float]:
        [channel] = channels(rank, (0, 1))
        if rank == 0:
            strided = torch.arange(6.0).view(2, 3).t()
            channel.send([strided])  # not contiguous: its bytes were copied
            strided.zero_()
            channel.flush()
            return []
        return channel.post([TensorMeta((3, 2), (2, 1), torch.float32)], "a copy").wait()[0].flatten().tolist()

    assert run_ranks(transfer, 2)[1] == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_objects_travel_beside_tensors():
    header = {"values": {0: (TensorMeta((2,), (1,), torch.bfloat16), True)}, "text": "é" * 1000, "none": None}

    def transfer(rank: int) -> object:
        [channel] = channels(rank, (0, 1))
        if rank == 0:
            channel.send([torch.ones(2)])
            channel.send_object(header)
            channel.send_object([1, 2])
            channel.flush()
            return None
        first, second = channel.receive_object("a header"), channel.receive_object("another")
        return first, second, channel.post([TensorMeta((2,), (1,), torch.float32)], "a value").wait()[0].tolist()

    assert run_ranks(transfer, 2)[1] == (header, [1, 2], [1.0, 1.0])


def test_several_ranks_and_directions_do_not_mix():
    def transfer(rank: int) -> list[float]:
        pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (0, 1)]
        made = channels(rank, *pairs)
        for tag, channel in enumerate(made):
            if channel.source == rank:
                channel.send([torch.tensor(float(tag)), torch.tensor(float(tag) + 0.5)])
        got: list[float] = []
        for channel in reversed(made):
            if channel.target == rank:
                got += [float(t) for t in channel.post([TensorMeta((), (), torch.float32)] * 2, "a number").wait()]
        for channel in made:
            if channel.source == rank:
                channel.flush()
        return got

    assert run_ranks(transfer, 3) == [[1.0, 1.5], [5.0, 5.5, 3.0, 3.5, 0.0, 0.5], [4.0, 4.5, 2.0, 2.5]]


class Run:
    """What a boundary reads of a `StageRun`."""

    def __init__(self, outputs: list, needed: tuple[int, ...] = ()) -> None:
        self.outputs, self.needed, self.known, self.record = (
            dict(enumerate(outputs)), needed, {}, {"unit": describe(outputs)}
        )  # fmt: skip
        self.wanted, self.by_position = {}, set()


def boundary(rank: int, **options: bool) -> SendBoundary | RecvBoundary:
    forward, backward = channels(rank, (0, 1), (1, 0))
    return SendBoundary(0, forward, backward, **options) if rank == 0 else RecvBoundary(1, forward, backward, **options)


def test_a_boundary_agrees_once_what_travels():
    ids, mask, hidden = torch.arange(3), torch.tensor([True, False]), torch.randn(2, 3, requires_grad=True)

    def transfer(rank: int) -> object:
        side = boundary(rank)
        if isinstance(side, SendBoundary):
            for _ in range(3):
                contract = side.send(Run([ids, "text", mask, hidden, None]), "signature")
                side.await_answer(contract)
                gradient = side.post_gradients(contract, "a gradient").wait()
            side.forward.flush()
            return contract.needed, contract.with_gradient(), [g.tolist() for g in gradient]
        got = []
        for _ in range(3):
            contract, receipt = side.post("signature", "values")
            arrived = dict(zip(contract.travelling(), receipt.wait(), strict=True))
            got.append({position: value.dtype for position, value in arrived.items()})
            side.answer(Run([], (2, 3)), contract)
            side.backward.send([torch.full((2, 3), 2.0)])
        side.backward.flush()
        return got, contract.units

    departed, (got, units) = run_ranks(transfer, 2)
    assert departed == ((2, 3), (3,), [[[2.0] * 3] * 2])
    assert got[0] == {0: torch.int64, 2: torch.bool, 3: torch.float32}
    assert got[1] == got[2] == {2: torch.bool, 3: torch.float32}
    assert units["unit"][3] == TensorMeta((2, 3), (3, 1), torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
def test_another_dtype_under_the_same_signature_is_refused_or_agreed_anew(dynamic: bool):
    def transfer(rank: int) -> object:
        side = boundary(rank, dynamic_shapes=dynamic)
        dtypes = [torch.float32, torch.bfloat16]
        if isinstance(side, SendBoundary):
            try:
                for dtype in dtypes:
                    side.await_answer(side.send(Run([torch.ones(2, 3, dtype=dtype)]), "signature"))
            except ValueError as error:
                return str(error)
            return ""
        got = []
        for _ in dtypes[: 2 if dynamic else 1]:
            contract, receipt = side.post("signature", "values")
            got.append(receipt.wait()[0].dtype)
            side.answer(Run([], (0,)), contract)
        side.backward.flush()
        return got

    message, got = run_ranks(transfer, 2)
    if dynamic:
        assert message == "" and got == [torch.float32, torch.bfloat16]
    else:
        assert got == [torch.float32]
        assert message == (
            "Stage 0 sends torch.bfloat16 (2, 3) where it sent torch.float32 (2, 3) before for a batch of the same"
            " shapes. Set PipelineStrategy(dynamic_shapes=True) to agree on every transfer anew."
        )


def test_what_cannot_be_described_is_refused():
    def transfer(rank: int) -> str:
        side = boundary(rank)
        if isinstance(side, SendBoundary):
            run = Run([torch.ones(1)])
            run.record = {"unit": lambda: None}
            try:
                side.send(run, "signature")
            except RuntimeError as error:
                return str(error)
        return ""

    assert run_ranks(transfer, 2)[0].startswith("What the modules of stage 0 return cannot be described to stage 1: ")


def test_contracts_are_plain_data():
    contract = Contract(
        {0: (TensorMeta((1,), (1,), torch.int64), False), 2: (TensorMeta((1,), (1,), torch.float32), True)}, {}
    )
    assert contract.travelling() == (0, 2)
    contract.needed = (2,)
    assert contract.travelling() == contract.with_gradient() == (2,)
    assert not dist.is_initialized()
