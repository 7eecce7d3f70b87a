"""A range by itself: what is lent stays as it was, and a range travels to the process that serves it."""

import pickle

import torch

from lightning_parallel.parameter_server import AddDelta
from lightning_parallel.parameter_server.messages import Entry
from lightning_parallel.parameter_server.server.history import Range


def test_weights_that_are_lent_stay_as_they_were_and_are_not_copied_when_given_back():
    part = Range(0, 2, AddDelta())
    lent, memory = part.lend(), part.weights.data_ptr()
    assert lent.data_ptr() == memory and part.lend() is lent
    part.apply(Entry(1, push=torch.ones(2)))
    assert lent.tolist() == [0.0, 0.0] and part.weights.tolist() == [1.0, 1.0]
    lent, memory = part.lend(), part.weights.data_ptr()
    del lent
    part.apply(Entry(2, push=torch.ones(2)))
    assert part.weights.data_ptr() == memory and part.weights.tolist() == [2.0, 2.0]


def test_a_range_can_be_sent_to_another_process():
    part = Range(0, 2, AddDelta())
    part.apply(Entry(1, push=torch.ones(2)))
    sent = pickle.loads(pickle.dumps(part))
    assert (sent.lsn, sent.weights.tolist()) == (1, [1.0, 1.0])
