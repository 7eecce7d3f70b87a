"""Fields of a batch that are no row fields, and no constants either: found by stage and by name, or declared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.trainer.pipelines import Case, assert_parity, failure_of, many_on_stages

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(11, (3, 8, 6), generator=GENERATOR)
ALONE = torch.arange(0, 49, 6)  # every row a document
PACKED = torch.cat([torch.arange(0, 24, 6), torch.tensor([25, 26, 27, 33, 35, 48])])  # row 4 begins with the end of 3
ROWS = torch.randn(3, 6, 6, 8, generator=GENERATOR)
TABLE = torch.randn(6, 8, generator=GENERATOR)


class Module(LightningModule):
    """Logs in validation what it is trained on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Packed(Module):
    """Documents that end anywhere, told by where they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(8, 11)

    def logits(self, batch: Any) -> Tensor:
        ids, starts = batch["ids"], torch.as_tensor(batch["cu_seqlens"])
        h = self.embedding(ids)
        places = torch.arange(ids.numel())
        document = torch.searchsorted(starts[1:-1].contiguous(), places, right=True).view_as(ids)
        for block in self.blocks:
            h = block(h, document[:, :, None] == document[:, None, :])
        return self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["ids"].flatten())


class PackedAtFirst(Packed):
    """Only the first stage's blocks mix by documents."""

    def logits(self, batch: Any) -> Tensor:
        every = torch.ones(6, 6, dtype=torch.bool)
        ids, starts = batch["ids"], batch["cu_seqlens"]
        document = torch.searchsorted(starts[1:-1].contiguous(), torch.arange(ids.numel()), right=True).view_as(ids)
        h = self.blocks[0](self.embedding(ids), document[:, :, None] == document[:, None, :])
        for block in self.blocks[1:]:
            h = block(h, every)
        return self.head(h)


def packed(starts: Sequence[Any], name: str = "cu_seqlens") -> DataLoader:
    return DataLoader([{"ids": x, name: s} for x, s in zip(IDS, starts, strict=True)], batch_size=None)


class Net(Module):
    """Four layers on what a function makes of the batch."""

    def __init__(self, read: Callable[[Any], Tensor] = lambda b: b["x"] + b["pos"]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(self.read(batch)) - 1).pow(2).mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.read(batch))


def loader(*batches: Any) -> DataLoader:
    return DataLoader(list(batches), batch_size=None)


def refused(case: Case) -> str:
    return failure_of(case, 2)


def test_documents_packed_from_the_first_batch_on_are_refused_by_the_stage_and_the_field():
    for make in (Packed, PackedAtFirst):
        text = refused(Case(make, lambda: packed([PACKED] * 3), {"num_microbatches": 4}, validate=False))
        assert "Stage 0 (`blocks.0` to `blocks.1`) hands on other values for the whole batch of 8 rows" in text
        assert "It reads the field 'cu_seqlens' of the batch ((10,), torch.int64)" in text
        assert "use num_microbatches=1" in text


@pytest.mark.parametrize(
    "starts", [[ALONE, PACKED, PACKED], pytest.param([ALONE, ALONE, PACKED], marks=pytest.mark.slow)]
)
def test_documents_packed_later_are_refused_before_the_step(starts):
    text = refused(Case(Packed, lambda: packed(starts), {"num_microbatches": 4}, validate=False))
    assert "It reads the field 'cu_seqlens'" in text


def test_other_offsets_of_the_same_shape_are_refused_by_name():
    moved = ALONE.clone()
    moved[3] += 1
    text = refused(Case(Packed, lambda: packed([ALONE, moved, ALONE]), {"num_microbatches": 4}, validate=False))
    assert (
        "The batch's field 'cu_seqlens' has 9 entries in a batch of 8 rows, and others than in batches before" in text
    )
    assert 'batch_fields={"cu_seqlens": "whole"}' in text


def test_a_declared_field_that_moves_is_compared_again():
    strategy = {"num_microbatches": 4, "batch_fields": {"cu_seqlens": "whole"}}
    moved = ALONE.clone()
    moved[4] += 1  # row 3's last document goes on in row 4, another micro-batch
    text = refused(Case(Packed, lambda: packed([ALONE, moved, ALONE]), strategy, validate=False))
    assert "It reads the field 'cu_seqlens'" in text


def test_documents_in_validation_are_refused_too():
    case = Case(Packed, lambda: packed([ALONE] * 3), {"num_microbatches": 4}, validation=lambda: packed([PACKED] * 3))
    assert "It reads the field 'cu_seqlens'" in refused(case)


def test_without_a_cut_packed_documents_train():
    assert_parity(Case(Packed, lambda: packed([ALONE, PACKED, PACKED]), {"num_microbatches": 1}), stages=(2,))


POSITIONS = Case(
    Net, lambda: loader(*({"x": x, "pos": TABLE} for x in ROWS)), {"num_microbatches": 6}, validate=False
)  # fmt: skip


def test_a_table_with_as_many_entries_as_rows():
    text = refused(POSITIONS)
    assert "The field 'pos' of the batch has 6 entries, as many as the batch has rows, and was cut" in text
    assert 'Say PipelineStrategy(batch_fields={"pos": "whole"})' in text
    assert_parity(POSITIONS.but(strategy={"batch_fields": {"pos": "whole"}}), stages=(2,))


class Masked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x, batch["mask"])
        return x.pow(2).mean()


MASKED = Case(
    Masked, lambda: loader(*({"x": x, "mask": torch.ones(6, 6).tril().bool()} for x in ROWS)),
    {"num_microbatches": 3}, validate=False,
)  # fmt: skip


def test_a_mask_with_as_many_entries_as_rows():
    text = refused(MASKED)
    assert "The field 'mask' of the batch has 6 entries" in text
    assert 'PipelineStrategy(batch_fields={"mask": "whole"})' in text
    assert_parity(MASKED.but(strategy={"batch_fields": {"mask": "whole"}}), stages=(2,))


class Views(NamedTuple):
    x: Tensor
    pos: Tensor


@pytest.mark.parametrize(
    ("batch", "read", "declared"),
    [
        (lambda x: (x, TABLE), lambda b: b[0] + b[1], {1: "whole"}),
        (lambda x: {"in": {"x": x, "pos": TABLE}}, lambda b: b["in"]["x"] + b["in"]["pos"], {"in.pos": "whole"}),
        (lambda x: Views(x, TABLE), lambda b: b.x + b.pos, {"pos": "whole"}),
        (lambda x: {"table": TABLE[:3], "x": x}, lambda b: b["x"] + b["table"].sum(0), {"table": "whole"}),
        (lambda x: {"x": x[:, 0], "k": x[:, :2].flatten(0, 1)},
         lambda b: b["x"] + b["k"].view(-1, 2, 8).sum(1), {"k": "rows"}),
    ],
    ids=["position", "nested", "named tuple", "a table in front", "two entries a row"],
)  # fmt: skip
def test_declared_fields_train_as_in_one_process(batch, read, declared: Mapping[Any, Any]):
    case = Case(
        lambda: Net(read), lambda: loader(*map(batch, ROWS)), {"num_microbatches": 3, "batch_fields": declared},
        validate=False,
    )  # fmt: skip
    assert_parity(case, stages=(2,))


def test_a_field_that_is_a_constant_stays_one_where_a_short_batch_has_as_many_rows():
    """Its 6 entries are no rows, in a batch of 8 as in one of 6."""
    batches = [{"x": torch.cat([x, x[:2]]), "pos": TABLE} for x in ROWS[:2]] + [{"x": ROWS[2], "pos": TABLE}]
    assert_parity(Case(Net, lambda: loader(*batches), {"num_microbatches": 2}, validate=False), stages=(2,))


def test_a_field_with_rows_in_one_batch_and_none_in_another_is_refused():
    batches = [{"x": x[:, 0], "pos": x[:, 1]} for x in ROWS]
    batches[1]["pos"] = batches[1]["pos"][:1]
    text = refused(Case(Net, lambda: loader(*batches), {"num_microbatches": 2}, validate=False))
    assert "The batch's field 'pos' has 1 entries for 6 rows, and one a row in batches before" in text


def test_sampled_negatives_of_all_rows_are_declared():
    """Other ones in every batch, and the same for all rows of it."""

    def read(batch: Any) -> Tensor:
        return batch["x"] + batch["negatives"].sum(0)

    batches = [{"x": x[:, 0], "negatives": x[:5, 1]} for x in ROWS]
    case = Case(lambda: Net(read), lambda: loader(*batches), {"num_microbatches": 2}, validate=False)
    assert "'negatives' has 5 entries in a batch of 6 rows, and others than in batches before" in refused(case)
    assert_parity(case.but(strategy={"batch_fields": {"negatives": "whole"}}), stages=(2,))


class Ranked(Net):
    """Predicts by the rank of a row among all."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"]).sum(-1).argsort(0).argsort(0).float()


class Centred(Net):
    """Its first layer's output is centred over the batch, in predictions too."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net[0](batch["x"])
        x = x - x.mean(0)
        for layer in self.net[1:]:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "words"),
    [(Ranked, "What the step returns for the whole batch"), (Centred, "Rows of a batch do not stay apart there")],
)
def test_predictions_that_rows_share_are_refused(make, words):
    from lightning_parallel import PipelineStrategy
    from tests.harness import free_port, rank_outcomes
    from tests.trainer.pipelines import join_as_torchrun, make_trainer

    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        trainer = make_trainer(PipelineStrategy(num_microbatches=3), 2)
        trainer.predict(make(), loader(*({"x": x[:, 0]} for x in ROWS)))

    outcomes = rank_outcomes(run, 2, free_port(), group=False)
    assert any(words in f"{outcome.error} {outcome.text}" for outcome in outcomes)


class SimCLR(Module):
    """Two views of all rows in one call, and a loss over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def pairs(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 0], x[:, 1]])

    def positives(self, rows: int) -> Tensor:
        return torch.arange(2 * rows).roll(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = F.normalize(self.encoder(self.pairs(batch["x"])), dim=-1)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, self.positives(len(batch["x"])))


class SimCLRByRow(SimCLR):
    """Both views of a row lie side by side."""

    def pairs(self, x: Tensor) -> Tensor:
        return x[:, :2].flatten(0, 1)

    def positives(self, rows: int) -> Tensor:
        return torch.arange(2 * rows).view(-1, 2).flip(1).flatten()


class Siamese(SimCLR):
    """The same two views, and a loss that is a mean over rows: it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = self.encoder(self.pairs(batch["x"])).chunk(2)
        return (a - b).pow(2).mean() + (a - 1).pow(2).mean()


class VICReg(SimCLR):
    """Its variance is one over all rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = self.encoder(self.pairs(batch["x"])).chunk(2)
        return (a - b).pow(2).mean() + (1 - torch.cat([a, b]).std(0)).relu().mean()


class TripletOfAll(SimCLR):
    """Three views, and the hardest negative among all rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, p, n = self.encoder(torch.cat([batch["x"][:, i] for i in range(3)])).chunk(3)
        return ((a - p).pow(2).sum(-1) - torch.cdist(a, n).min(1).values + 1).relu().mean()


def views() -> DataLoader:
    return loader(*({"x": x} for x in ROWS))


@pytest.mark.parametrize("make", [SimCLR, SimCLRByRow, VICReg, TripletOfAll])
@pytest.mark.parametrize("num_microbatches", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loss_over_all_rows_of_several_views_is_refused(make, num_microbatches):
    text = refused(Case(make, views, {"num_microbatches": num_microbatches}, validate=False))
    assert "The loss of the whole batch is" in text and "is not a mean over rows" in text
    assert "num_microbatches=1" in text


def test_weights_do_not_silence_it():
    text = refused(Case(SimCLR, views, {"num_microbatches": 2, "loss_weight": lambda batch: 1.0}, validate=False))
    assert "The loss is not a mean over rows" in text


def test_a_loss_over_all_rows_trains_uncut_and_a_mean_of_two_views_trains_cut():
    assert_parity(Case(SimCLR, views, {"num_microbatches": 1}, validate=False), stages=(2,))
    assert_parity(Case(Siamese, views, {"num_microbatches": 3}, validate=False), stages=(2,))


class Vae(Net):
    """Draws noise in the step: held still for the comparison."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        level = torch.rand(len(x), 1, 1)
        noise = torch.randn_like(x)
        return (self.net(x + level * noise) - noise).pow(2).mean()


def test_a_step_that_draws_noise_is_compared():
    def no_warnings(case: Case) -> None:
        assert all(len(record.losses) == 3 for record in many_on_stages([case], 2)[0])

    no_warnings(Case(Vae, views, {"num_microbatches": 3}, validate=False))


class FailsOnMany(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch["x"]) > 2:
            raise IndexError("too many rows")
        return self.net(batch["x"]).pow(2).mean()


def test_what_cannot_be_compared_is_refused_until_that_is_said():
    case = Case(FailsOnMany, views, {"num_microbatches": 3}, validate=False)
    text = refused(case)
    assert "could not be compared with the whole batch" in text and "IndexError: too many rows" in text
    records = many_on_stages([case.but(strategy={"check_loss": False})], 2)[0]
    assert len(records[0].losses) == 3
