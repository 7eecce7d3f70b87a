"""Random numbers that do not depend on the layout: one stream per (seed, batch, micro-batch, module).

The one idea: a module that computes on this stage draws from a stream of its own, and behind it, computed here or not,
the step goes on with the stream that follows this module. Masks drawn in the step after another stage's dropout, mixup
and LayerDrop then agree on all stages, and on any number of stages. Outside a step the generators are as the user left
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """A well-mixed seed from several integers (the splitmix64 finalizer over a running sum).

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = 0
    for number in numbers:
        x = (x + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return x & _MASK


def share_generators(broadcast: Callable[[Any], Any]) -> None:
    """Set the host's generators (torch, Python, numpy) as they are on the rank that broadcasts.

    Shuffling loaders then deal the same rows to all ranks, and the rows that one process would see.
    """
    state, python, np = broadcast((torch.get_rng_state(), random.getstate(), numpy.random.get_state()))
    torch.set_rng_state(state)
    random.setstate(python)
    numpy.random.set_state(np)


class RandomStreams:
    """The generators of one process, set to a step's stream by `begin`, to a module's by `start`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self._host, self._device = torch.default_generator, None
        if device.type == "cuda":
            torch.cuda.init()
            self._device = torch.cuda.default_generators[device.index or 0]
        self._seeders = [generator.manual_seed for generator in (self._host, self._device) if generator is not None]

    @property
    def state(self) -> tuple[Any, ...]:
        """Of every generator, to be put back."""
        generators = [self._host] if self._device is None else [self._host, self._device]
        return [generator.get_state() for generator in generators], random.getstate(), numpy.random.get_state()

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        of_torch, python, np = state
        for generator, value in zip([self._host, self._device], of_torch, strict=False):
            assert generator is not None
            generator.set_state(value)
        random.setstate(python)
        numpy.random.set_state(np)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Give every generator back as it was found, so that loaders and hooks draw what they would have drawn."""
        state = self.state
        try:
            yield
        finally:
            self.state = state

    def begin(self, batch: int, microbatch: int) -> int:
        """Set all generators (Python's and numpy's too) for the start of a step; returns the key of its streams."""
        key = mix(self.seed, batch, microbatch)
        random.seed(key)
        numpy.random.seed(key & 0xFFFFFFFF)
        self.start(key)
        return key

    @property
    def stream(self) -> int:
        """What the host's generator was set to last, here or by who put a state back that was taken before."""
        return self._host.initial_seed()

    def start(self, stream: int) -> None:
        """Set torch's generators to `key ^ own(module)` or `key ^ behind(module)`, with the key of `begin`."""
        for seed in self._seeders:
            seed(stream)


def own(module: int) -> int:
    """What tells the stream of a module's own numbers from others of the same key."""
    return mix(2 * module)


def behind(module: int) -> int:
    """What tells the stream with which the step goes on behind a module, whether it computed here or elsewhere."""
    return mix(2 * module + 1)


def repeated(before_this: int) -> int:
    """What tells the streams of a module's second and later calls in a step from those of its first."""
    return mix(before_this, 1) if before_this else 0
