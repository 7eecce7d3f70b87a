"""Pure accumulators and the trace format that the callbacks wrap: no Trainer, and no clock of their own.

``bubble`` counts waiting, ``memory`` counts bytes, ``perfetto``, ``picture`` and ``memory_picture`` draw, and ``spans``
is what the timed ones and the simulator share.
"""

from lightning_parallel.measure.spans import Span, StepTrace

__all__ = ["Span", "StepTrace"]
