"""The recorder of collectives writes down what was called, and nothing once it is done."""

import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.nets.calls import recorded


def calls_of(rank: int) -> dict[str, list[str]]:
    pair = dist.new_group([0, 1])
    with recorded() as calls:
        calls.enter("reductions")
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.MAX, group=pair, async_op=True).wait()
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), op=dist.ReduceOp.SUM)
        dist.reduce(torch.ones(1), 1)
        calls.enter("others")
        dist.broadcast(torch.ones(5), 1, group=pair)
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))
        dist.barrier()
        calls.enter("objects")
        dist.all_gather_object([None, None], "a" * (1 + rank))
        dist.broadcast_object_list(["b"], 0)
        dist.gather_object("c", [None, None] if rank == 0 else None)
        calls.enter("transfers")
        works = [dist.isend(torch.ones(3), 1 - rank), dist.irecv(torch.empty(3), 1 - rank)]
        for work in works:
            work.wait()
    dist.all_reduce(torch.ones(7))
    return calls.parts


def test_lines_say_operation_group_and_bytes():
    parts, other = run_ranks(calls_of, 2)
    assert parts["reductions"] == [
        "all_reduce sum [0 1] 12 B",
        "all_reduce max [0 1] 16 B",
        "reduce_scatter sum [0 1] 8 B",
        "reduce sum to 1 [0 1] 4 B",
    ]
    assert parts["others"] == [
        "broadcast from 1 [0 1] 20 B",
        "all_gather [0 1] 8 B",
        "all_gather [0 1] 4 B",
        "barrier [0 1]",
    ]
    assert parts["objects"] == ["all_gather_object [0 1]", "broadcast_object_list [0 1]", "gather_object [0 1]"]
    assert parts["transfers"] == ["send to 1 12 B", "recv from 1 12 B"]
    assert other["transfers"] == ["send to 0 12 B", "recv from 0 12 B"]
    assert {name: other[name] for name in ("reductions", "others", "objects")} == {
        name: parts[name] for name in ("reductions", "others", "objects")
    }
