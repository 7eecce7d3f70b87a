"""What a worker does to a vector before it is sent: choose elements, choose a number format, keep what was left behind.

The one idea: a push goes through selectors (which elements) and a precision (which bits), and the difference between
what was to be sent and what the servers will decode is kept and added to the next push. So nothing is lost, whatever
is combined. ``decode`` needs no state. Left out: codings that need one (``keys.py`` has the one that servers help
with).
"""

from lightning_parallel.parameter_server.filters.codec import decode, precision_of
from lightning_parallel.parameter_server.filters.pipeline import Filters
from lightning_parallel.parameter_server.filters.precision import BFloat16, Float16, Float32, Int8, Precision
from lightning_parallel.parameter_server.filters.selectors import RandomSkip, Selector, SignificantlyModified, TopK

__all__ = [
    "BFloat16",
    "Filters",
    "Float16",
    "Float32",
    "Int8",
    "Precision",
    "RandomSkip",
    "Selector",
    "SignificantlyModified",
    "TopK",
    "decode",
    "precision_of",
]
