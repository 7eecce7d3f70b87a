"""What came in for a run goes when the run does, and gives back what the run left."""

import gc
import weakref

import torch

from lightning_parallel.pipeline.stage.boundary import Contract, ReceivedValues
from lightning_parallel.pipeline.transport.tensor_meta import describe


def contract(*places: object, grad: bool = True) -> Contract:
    meta = describe(torch.ones(2))
    return Contract(dict.fromkeys(places, (meta, grad)), {}, needed=places)  # type: ignore[arg-type]


def test_each_sender_gets_the_gradients_of_what_it_sent():
    near, far, plain = contract(0, 1), contract(("net.0", 0)), contract(2, grad=False)
    inbox = ReceivedValues.of(
        [(near, [torch.ones(2), torch.ones(2)]), (far, [torch.ones(2)]), (plain, [torch.ones(2)])], True
    )
    assert not inbox.values[2].requires_grad
    (inbox.values[0] * 2 + inbox.values["net.0", 0] * 3).sum().backward()
    assert [g.tolist() for g in inbox.take_gradients(near)] == [[2.0, 2.0], [0.0, 0.0]]
    assert [g.tolist() for g in inbox.take_gradients(far)] == [[3.0, 3.0]]
    assert inbox.take_gradients(plain) == []


def test_without_a_backward_there_are_zeros():
    inbox = ReceivedValues.of([(contract(0), [torch.ones(2)])], True)
    assert [g.tolist() for g in inbox.take_gradients(contract(0))] == [[0.0, 0.0]]


def test_several_values_are_let_go():
    """Outputs of one node hold it: were it to hold them, they would stay for ever."""
    inbox = ReceivedValues.of([(contract(0, 1), [torch.ones(2), torch.ones(2)])], True)
    sum(inbox.values.values()).sum().backward()  # type: ignore[union-attr]
    gone = weakref.ref(inbox)
    del inbox
    gc.collect()
    assert gone() is None
