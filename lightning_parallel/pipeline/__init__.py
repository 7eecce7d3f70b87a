"""The pipeline machinery: schedules as data, and what generates, checks, prices and runs them.

The simulator is imported from its own module, ``lightning_parallel.pipeline.simulator``: it stands on ``measure``,
which stands on the data types here.
"""

from lightning_parallel.pipeline.schedule import Action, Kind, Schedule

__all__ = ["Action", "Kind", "Schedule"]
