"""Graph batches, hooks that call the model, and sparse gradients: as in one process, or refused in words."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, VOCABULARY, WIDTH, Classifier, chain, row_loader, token_loader
from tests.trainer.pipelines import Case, assert_parity, failure_of, fit, join_as_torchrun


@dataclass
class Graph:
    """Nodes and edges as PyTorch Geometric's `Data` has them."""

    x: Tensor  # [N, WIDTH]
    edge_index: Tensor  # [2, E]
    y: Tensor  # [N]


def graph_loader() -> DataLoader:
    rng = torch.Generator().manual_seed(0)
    graphs = [
        Graph(
            torch.randn(10, WIDTH, generator=rng),
            torch.randint(10, (2, 24), generator=rng),
            torch.randint(CLASSES, (10,), generator=rng),
        )
        for _ in range(3)
    ]
    return DataLoader(graphs, batch_size=None)


class Convolution(nn.Linear):
    """Adds up what neighbours have."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return super().forward(x).index_add(0, target, x[source]).tanh()


class OnGraphs(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Convolution() for _ in range(4)))

    def loss(self, batch: Graph) -> Tensor:
        x = batch.x
        for layer in self.net:
            x = layer(x, batch.edge_index)
        return F.cross_entropy(x[:, :CLASSES], batch.y)


def test_a_graph_is_not_cut_by_its_nodes():
    text = failure_of(Case(OnGraphs, graph_loader, {"check_loss": False}, validate=False))
    assert "The batch has a `edge_index` of shape (2, 24), which names rows by their place in the whole batch" in text
    assert "Use num_microbatches=1" in text
    assert_parity(Case(OnGraphs, graph_loader, {"num_microbatches": 1}, validate=False), stages=(2,))


@pytest.mark.parametrize(
    "nest", [lambda edges: {"a": {"edge_index": edges}}, lambda edges: [{"pos_edge_index": edges}]]
)
def test_edges_are_found_where_they_are(nest: Any):
    batch = (torch.zeros(4, 3), nest(torch.zeros(2, 9, dtype=torch.int64)))
    assert microbatch.split(batch, [4]) == [batch]
    with pytest.raises(ValueError, match=r"edge_index` of shape \(2, 9\), which names rows"):
        microbatch.split(batch, [2, 2])


class CallsItself(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self(batch[0])


class CallsItselfInValidation(Classifier):
    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self(torch.zeros(2, WIDTH))


@pytest.mark.parametrize("make", [CallsItself, CallsItselfInValidation])
def test_a_hook_that_calls_the_model_is_told_where_models_are_called(make: type[LightningModule]):
    text = failure_of(Case(make, row_loader))
    assert "is called outside of a step, where a rank has its own stages and no other. Call the model in" in text
    assert "`net." in text and "The step calls" not in text


class Sparse(LightningModule):
    """Embeds tokens by a table whose gradient has the rows of a batch alone."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.net = chain(8)
        self.head = nn.Linear(CLASSES, VOCABULARY)
        if self.tied:
            self.again = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
            self.again.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        logits = self.head(self.net(self.embed(tokens)))
        if self.tied:
            logits = logits + self.again(tokens).sum()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Lightning warns of a loader without one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tied(Sparse):
    tied = True


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_sparse_embedding_of_one_stage_trains_as_in_one_process(schedule: str):
    options = {"accumulate_grad_batches": 2}
    assert_parity(Case(Sparse, token_loader, {"schedule": schedule}, options, validate=False), stages=(2,))


SPARSE = "The gradient of `embed.weight` is sparse, which ranks do not add up. Use sparse=False."
ADDED_UP = {
    "two directions": (Sparse, lambda: PipelineStrategy("chimera", num_microbatches=2), SPARSE),
    "two stages": (Tied, lambda: PipelineStrategy("1f1b", num_microbatches=2), SPARSE),
    "copies": (Sparse, lambda: PipelineStrategy(num_microbatches=2, data_parallel_size=2), SPARSE),
    "zero 1": (Sparse, lambda: ZeROStrategy(stage=1), "A gradient of shape (11, 6) is sparse. Use sparse=False."),
    "zero 3": (Sparse, lambda: ZeROStrategy(stage=3), "`embed` makes sparse ones. Use sparse=False."),
    "divided": (
        Sparse, lambda: HybridStrategy(data_parallel_size=2, zero_stage=2), "is sparse. Use sparse=False.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED_UP)
def test_a_sparse_gradient_that_ranks_would_add_up_is_refused(name: str):
    make, strategy, words = ADDED_UP[name]

    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        fit(Case(make, token_loader, validate=False), strategy(), 2)

    with pytest.raises(Exception) as caught:
        run_ranks(run, 2, free_port(), group=False, timeout=50.0)
    assert words in str(caught.value)
