"""Callbacks for ``Trainer(callbacks=[...])``: every measured number beside its formula."""

from lightning_parallel.callbacks.bubble import BubbleMonitor
from lightning_parallel.callbacks.communication import CommunicationMonitor
from lightning_parallel.callbacks.memory import MemoryMonitor
from lightning_parallel.callbacks.staleness import StalenessMonitor
from lightning_parallel.callbacks.timeline import TimelineExporter

__all__ = ["BubbleMonitor", "CommunicationMonitor", "MemoryMonitor", "StalenessMonitor", "TimelineExporter"]
