"""A value goes straight to the stages that use it: counted in bytes, looked for in memory, and equal to one process."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_parallel import CommunicationMonitor
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_dataset, row_loader
from tests.trainer.pipelines import Case, Record, assert_same, many_on_stages, on_stages, one_process
from tests.trainer.test_skip_connections import BLOCKS, SKIP, Auxiliary, EncoderDecoder, TwoViews, UNet

ROWS, WIDE = 2, 97  # of a micro-batch of 8 rows in 4; of a value that nothing else is as wide as
VALUE = ROWS * WIDTH * 4  # bytes of what a block returns


class Sent(Callback):
    """Adds up, in the last of three steps, the bytes of tensors that this rank sends, by target."""

    def __init__(self) -> None:
        self.to: Counter[int] = Counter()
        self._isend = dist.isend

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2:
            self._isend, dist.isend = dist.isend, self._count

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            dist.isend = self._isend

    def _count(self, tensor: Tensor, target: int, **options: Any) -> Any:
        self.to[target] += tensor.nbytes
        return self._isend(tensor, target, **options)


def sent(trainer: Any, module: Any) -> Any:
    """Bytes by the stage they went to, and all of them as the monitor counts."""
    [by_hand] = [c for c in trainer.callbacks if isinstance(c, Sent)]
    [monitor] = [c for c in trainer.callbacks if isinstance(c, CommunicationMonitor)]
    last = trainer.world_size - 1  # the last stage is on rank 0
    return {last - rank: n for rank, n in by_hand.to.items()}, monitor.last["pipeline", "send", "forward"].nbytes


def test_every_value_crosses_once_for_each_stage_that_uses_it():
    """Stages: down 0, 1 | down 2, 3 | up 0, 1 | up 2, 3.

    down.0 goes from stage 0 to 3; down.1, which stage 1 uses, from there to 3; down.2 to stage 2; the argument of up.0,
    which is twice as wide, is made where its parts are; of the argument of up.2 up.1 makes one half, and the stage that
    uses it joins them.
    """
    case = Case(
        UNet, row_loader, {**SKIP, "blocks": BLOCKS, "partition": [2, 2, 2, 2]},
        {"callbacks": lambda: [CommunicationMonitor(), Sent()]}, validate=False, at_end=sent,
    )  # fmt: skip
    forward = {(0, 1): 1, (0, 3): 1, (1, 2): 2 + 1, (1, 3): 1, (2, 3): 1}
    found = [record.extra for record in on_stages(case, 4)[::-1]]
    for stage, (by_hand, monitored) in enumerate(found):
        ahead = {there: 4 * VALUE * n for (here, there), n in forward.items() if here == stage}
        back = {here: 4 * VALUE * n for (here, there), n in forward.items() if there == stage}
        assert monitored == sum(ahead.values()) + sum(back.values())
        assert monitored == sum({**ahead, **back}.values())
        if stage < 3:
            assert by_hand == {**ahead, **back}
        else:  # rank 0 also tells the others what was logged
            told = {there: by_hand[there] - back.get(there, 0) for there in by_hand}
            assert told == dict.fromkeys(range(3), told[1])


class Looks(nn.Linear):
    """Notes whether its rank holds something as wide as the value that only the first and the last stage know."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls, self.found = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        real = [t for t in gc.get_objects() if isinstance(t, Tensor) and not isinstance(t, Phantom) and not t.is_meta]
        self.found += any(tuple(t.shape) == (ROWS, WIDE) for t in real)
        return super().forward(x)


class Widens(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH + WIDE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        return h[:, :WIDTH].clone(), h[:, WIDTH:].clone()


class OnlyTheLast(Classifier):
    """The loss looks at a wide value of the first block."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.blocks = nn.ModuleList([Widens(), Looks(), Looks(), nn.Linear(WIDTH, CLASSES)])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x, wide = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return nn.functional.cross_entropy(x, y) + wide.square().mean()


def looked(trainer: Any, module: Any) -> list[tuple[int, int]]:
    return [(block.calls, block.found) for block in module.blocks if isinstance(block, Looks)]


def test_stages_between_do_not_hold_it():
    """But for the micro-batch that goes through all stages once, before the first step, and leaves no trace."""
    case = Case(OnlyTheLast, row_loader, {**SKIP, "blocks": "blocks"}, {"max_steps": 2}, validate=False, at_end=looked)
    _, third, second, _ = (record.extra for record in on_stages(case, 4))
    assert second[0] == third[1] == (2 * 4, 0)


# -- as in one process -------------------------------------------------------------------------------------------------

MAKES = {"U-Net": UNet, "encoder-decoder": EncoderDecoder, "features": Auxiliary, "two views": TwoViews}


@pytest.fixture(scope="module")
def references() -> dict[str, Record]:
    return {name: one_process(Case(make, row_loader)) for name, make in MAKES.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "schedules", "names"),
    [
        (4, ["zb_v"], ["U-Net", "two views"]),
        (3, ["1f1b"], ["features"]),
        pytest.param(3, ["gpipe", "zb_h1", "naive"], list(MAKES), marks=pytest.mark.slow),
        pytest.param(4, ["1f1b", "gpipe", "interleaved_1f1b", "zb_v"], list(MAKES), marks=pytest.mark.slow),
        pytest.param(4, ["chimera", "dualpipe_v", "gems"], list(MAKES), marks=pytest.mark.slow),
        pytest.param(
            2, ["interleaved_1f1b:v=4", "looped_bfs", "zb_v", "dualpipe"], list(MAKES), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_parity(references: dict[str, Record], num_ranks: int, schedules: list[str], names: list[str]):
    """Several stages a rank, backwards in two halves, two directions."""
    asked = [(schedule, name) for schedule in schedules for name in names]
    cases = [
        Case(MAKES[n], row_loader, {**SKIP, "blocks": BLOCKS, "schedule": s, "num_microbatches": 4}) for s, n in asked
    ]
    for (schedule, name), records in zip(asked, many_on_stages(cases, num_ranks, timeout=280.0), strict=True):
        try:
            assert_same(records, references[name])
        except AssertionError as error:
            raise AssertionError(f"{name}, {schedule}: {error}") from error


class ThreeDeep(UNet):
    """For schedules of two stages a rank on three ranks."""

    def __init__(self) -> None:
        super().__init__()
        del self.down[3], self.up[3]


@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_parity_of_two_stages_a_rank_on_three_ranks(schedule: str):
    blocks = [name for name in BLOCKS if not name.endswith("3")]
    options = {**SKIP, "blocks": blocks, "schedule": schedule, "num_microbatches": 3}
    case = Case(ThreeDeep, lambda: row_loader((6, 6, 6)), options)
    assert_same(on_stages(case, 3), one_process(case))


def test_sums_of_gradients_are_those_of_one_stage_bit_by_bit():
    """A value that several stages use comes from the last of them: each adds its gradients where one process does."""
    names = list(MAKES)
    cases = [Case(make, row_loader, {**SKIP, "blocks": BLOCKS}, validate=False) for make in MAKES.values()]
    for name, cut, whole in zip(names, many_on_stages(cases, 4), many_on_stages(cases, 1), strict=True):
        assert torch.equal(torch.stack(cut[0].losses), torch.stack(whole[0].losses)), name
        assert all(torch.equal(cut[0].weights[key], value) for key, value in whole[0].weights.items()), name


class Predicts(UNet):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def predictions(trainer: Any, module: Any) -> Any:
    return trainer.test(module, row_dataset(12, 8), verbose=False), trainer.predict(module, row_dataset(12, 8))


def test_test_and_predict():
    case = Case(Predicts, row_loader, {**SKIP, "blocks": BLOCKS}, after=predictions)
    tested, predicted = one_process(case).extra
    for first, *others in many_on_stages([case, case.but({"schedule": "zb_v"})], 4):
        assert first.extra[0] == [pytest.approx(tested[0], rel=2e-5)]
        assert all(other.extra[0] == first.extra[0] for other in others)
        for ours, theirs in zip(first.extra[1], predicted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
