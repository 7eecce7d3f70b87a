"""The colours of every picture: timelines, memory, staleness, the pages of docs and the notebooks.

The one idea: everybody can tell two colours apart that may lie side by side, and can read what is written on them.
``tests/unit/test_palette.py`` computes both. Neighbours differ by 15 or more in CIEDE2000, also as people with
protanopia, deuteranopia or tritanopia see them; text on a bar has a WCAG contrast of 4.5 or more. This is plain data:
nothing here imports matplotlib.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

PAPER, INK, MUTED = "#ffffff", "#15181e", "#5c6370"  # the page, what is written, and what is written less loudly
IDLE = "#eef0f4"  # a rank's track where it does nothing
LINE = INK  # waits and sends: thin lines that touch bars of every colour
GREY = "#93969b"
READABLE = 4.5  # the least contrast of text, WCAG 2.2, success criterion 1.4.3

# Of each action on a rank's first stage, or in replica 0, and on its second: what is darker comes first.
ACTIONS: Mapping[str, tuple[str, str]] = {
    "F": ("#194cb5", "#9084e5"),
    "B": ("#983427", "#d398a9"),
    "I": ("#26836f", "#68d6ff"),
    "W": ("#e76717", "#fbdea0"),
    "U": ("#613e5b", "#613e5b"),  # an update's stage is not told by its colour
}
BLUE, RED, GREEN, ORANGE, PLUM = (ACTIONS[kind][0] for kind in "FBIWU")

# Of each axis of a mesh along which ranks talk. Several joined, such as "pipelinextensor", take the others in turn.
LANES: Mapping[str, str] = {"pipeline": LINE, "data": "#3a6f23", "tensor": "#aa37b4", "replicas": "#dcbc2a"}
OTHER_LANES = (GREY, "#68d6ff")

# Of each kind of memory. Any of them may be empty, so that every two may touch.
MEMORY: Mapping[str, str] = {
    "parameters": BLUE,
    "buffers": PLUM,
    "optimizer": ORANGE,
    "gradients": RED,
    "activations": "#fbdea0",
    "other": GREY,
}
AGES, GAPS, BOUND = BLUE, GREEN, RED  # of staleness

CYCLE = (BLUE, ORANGE, GREEN, RED, PLUM)  # of lines and bars that mean nothing of the above
STYLE: Mapping[str, Any] = {
    "axes.prop_cycle": f"cycler('color', {list(CYCLE)})",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": IDLE,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "font.size": 9.0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "patch.edgecolor": PAPER,  # a hairline between bars
    "patch.force_edgecolor": True,
    "patch.linewidth": 0.9,
    "figure.constrained_layout.use": True,
}
"""matplotlib's settings for pictures of one's own in these colours: ``plt.rcParams.update(STYLE)``."""


def lane_colours(axes: Iterable[str]) -> dict[str, str]:
    """The colour of each of a picture's lanes.

    Example:
        >>> lane_colours(["data", "pipelinextensor"])
        {'data': '#3a6f23', 'pipelinextensor': '#93969b'}
    """
    names = list(dict.fromkeys(axes))
    others = [name for name in names if name not in LANES]
    return {name: LANES.get(name) or OTHER_LANES[others.index(name) % len(OTHER_LANES)] for name in names}


def luminance(colour: str) -> float:
    """Relative luminance of a colour such as "#3b6fb6": 0 is black, 1 is white.

    Source:
        Web Content Accessibility Guidelines 2.2, "relative luminance".
    """
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21.

    Example:
        >>> contrast("#ffffff", "#000000")
        21.0

    Source:
        Web Content Accessibility Guidelines 2.2, "contrast ratio".
    """
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def ink_on(colour: str) -> str:
    """What to write on a colour with: ``PAPER`` or ``INK``, whichever is read more easily.

    Example:
        >>> ink_on("#194cb5") == PAPER, ink_on("#fbdea0") == INK
        (True, True)
    """
    return max(PAPER, INK, key=lambda ink: contrast(ink, colour))


def version() -> str:
    """Changes when a colour or a setting does, so that a stored picture can be seen to be older."""
    told = [PAPER, INK, MUTED, IDLE, LINE, dict(ACTIONS), dict(LANES), OTHER_LANES, dict(MEMORY), AGES, GAPS, BOUND]
    return hashlib.sha256(repr([*told, dict(STYLE)]).encode()).hexdigest()[:16]
