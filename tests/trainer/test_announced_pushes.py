"""Members of an island tell the hub what a push holds before it can be made: else its rows would be trained on twice
where a member dies just then. `n_push` steps share a push, and so do fewer where all meet."""

import pytest
import torch

from lightning_parallel.parameter_server.from_torch import Rates, groups_of, update_of
from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.trainer.versions import Versions
from lightning_parallel.parameter_server.trainer.worker import Pace, ServerWorker
from lightning_parallel.parameter_server.worker.island import Follower
from lightning_parallel.parameter_server.worker.reading import Result


class Records(Follower):
    """A member that does not talk to servers, and notes which pushes would be made."""

    def push(self, vector, tick=True, lr=None, copy=True):
        super().push(vector, tick, lr, copy)
        self.events.append(("push", self.seq, vector is not None))


def member(n_push):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    table = Table.of(groups_of(optimizer))
    session = Records(None, 3)
    versions = Versions(2, None, lambda since: {}, lambda value: [value])
    rates = Rates(optimizer, update_of(optimizer, table.widths))
    worker = ServerWorker(session, table, optimizer, rates, Pace(n_push, 100), 1, versions)
    worker._read = (Result(torch.zeros(3), 0, {}, 0, (), ()), 0, 0.0)
    session.events = events = []
    worker.before_push = lambda number, seq: events.append(("told", seq, len(events)))
    worker.together = lambda: events.append(("together", session.seq, False))
    return worker, events


@pytest.mark.parametrize("n_push", [1, 2, 3])
@pytest.mark.parametrize("steps", range(1, 8))
def test_what_a_push_holds_is_told_before_the_gradients_become_one(n_push, steps):
    """Or, where all meet between two pushes, before the members wait for each other and one of them pushes."""
    worker, events = member(n_push)

    def run():
        worker.announce()
        events.append(("together", worker.session.seq, False))  # the gradients are everybody's from here on
        worker.parameters[0][0].grad = torch.ones(3)
        return worker.optimizer.step()

    for _ in range(steps):
        worker.step(run)
    worker.pause()
    pushes = [place for place, (kind, _, holds) in enumerate(events) if kind == "push" and holds]
    assert len(pushes) == -(-steps // n_push)
    for place in pushes:
        kinds = [kind for kind, _, _ in events[:place]]
        last = len(kinds) - 1 - kinds[::-1].index("together")
        assert events[last - 1][:2] == ("told", events[place][1])
