"""Colours by number: contrast of text, and differences between neighbours as people with and without a colour
deficiency see them."""

import math
from itertools import combinations

import pytest

from lightning_parallel.measure.palette import (
    ACTIONS,
    AGES,
    BOUND,
    CYCLE,
    GAPS,
    IDLE,
    INK,
    LANES,
    LINE,
    MEMORY,
    MUTED,
    OTHER_LANES,
    PAPER,
    ink_on,
    lane_colours,
)

APART, READABLE = 15.0, 4.5  # CIEDE2000; WCAG 2.2, success criterion 1.4.3

# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, IEEE TVCG
# 15(6), 2009: the matrices of severity 1.0, for linear RGB.
VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
# IEC 61966-2-1: sRGB to CIE XYZ, white point D65.
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))

# Sharma, Wu and Dalal, The CIEDE2000 Color-Difference Formula, Color Research and Application 30(1), 2005, table 1: the
# pairs that tell faulty programs: two Lab colours and their difference.
SHARMA = """
50.0000 2.6772 -79.7751 50.0000 0.0000 -82.7485 2.0425
50.0000 3.1571 -77.2803 50.0000 0.0000 -82.7485 2.8615
50.0000 2.8361 -74.0200 50.0000 0.0000 -82.7485 3.4412
50.0000 -1.3802 -84.2814 50.0000 0.0000 -82.7485 1.0000
50.0000 -1.1848 -84.8006 50.0000 0.0000 -82.7485 1.0000
50.0000 -0.9009 -85.5211 50.0000 0.0000 -82.7485 1.0000
50.0000 0.0000 0.0000 50.0000 -1.0000 2.0000 2.3669
50.0000 -1.0000 2.0000 50.0000 0.0000 0.0000 2.3669
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0009 7.1792
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0010 7.1792
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0011 7.2195
50.0000 2.4900 -0.0010 50.0000 -2.4900 0.0012 7.2195
50.0000 -0.0010 2.4900 50.0000 0.0009 -2.4900 4.8045
50.0000 -0.0010 2.4900 50.0000 0.0010 -2.4900 4.8045
50.0000 -0.0010 2.4900 50.0000 0.0011 -2.4900 4.7461
50.0000 2.5000 0.0000 50.0000 0.0000 -2.5000 4.3065
50.0000 2.5000 0.0000 73.0000 25.0000 -18.0000 27.1492
50.0000 2.5000 0.0000 61.0000 -5.0000 29.0000 22.8977
50.0000 2.5000 0.0000 56.0000 -27.0000 -3.0000 31.9030
50.0000 2.5000 0.0000 58.0000 24.0000 15.0000 19.4535
50.0000 2.5000 0.0000 50.0000 3.1736 0.5854 1.0000
50.0000 2.5000 0.0000 50.0000 3.2972 0.0000 1.0000
50.0000 2.5000 0.0000 50.0000 1.8634 0.5757 1.0000
50.0000 2.5000 0.0000 50.0000 3.2592 0.3350 1.0000
60.2574 -34.0099 36.2677 60.4626 -34.1751 39.4387 1.2644
63.0109 -31.0961 -5.8663 62.8187 -29.7946 -4.0864 1.2630
61.2901 3.7196 -5.3901 61.4292 2.2480 -4.9620 1.8731
35.0831 -44.1164 3.7933 35.0232 -40.0716 1.5901 1.8645
22.7233 20.0904 -46.6940 23.0331 14.9730 -42.5619 2.0373
36.4612 47.8580 18.3852 36.2715 50.5065 21.2231 1.4146
90.8027 -2.0831 1.4410 91.1528 -1.6435 0.0447 1.4441
90.9257 -0.5406 -0.9208 88.6381 -0.8985 -0.7239 1.5381
6.7747 -0.2908 -2.4247 5.8714 -0.0985 -2.2286 0.6377
2.0776 0.0795 -1.1350 0.9033 -0.0636 -0.5514 0.9082
"""


def ciede2000(one, other):
    """The difference of two colours (L*, a*, b*), with k_L = k_C = k_H = 1."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25**7))
    a1, a2 = a1 * stretch, a2 * stretch
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn, hue = h2 - h1, h1 + h2
    if c1 * c2 == 0:
        turn = 0.0
    elif abs(turn) <= 180:
        hue /= 2
    else:
        turn -= math.copysign(360, turn)
        hue = (hue + 360) / 2 if hue < 360 else (hue - 360) / 2
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    cosines = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(weight * math.cos(math.radians(times * hue + shift)) for weight, times, shift in cosines)
    square = (lightness - 50) ** 2
    d_l = (l2 - l1) / (1 + 0.015 * square / math.sqrt(20 + square))
    d_c = (c2 - c1) / (1 + 0.045 * chroma)
    d_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    rotation = 60 * math.exp(-(((hue - 275) / 25) ** 2))
    r = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(math.radians(rotation))
    return math.sqrt(d_l**2 + d_c**2 + d_h**2 + r * d_c * d_h)


def linear(colour):
    """Linear RGB of "#rrggbb"."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour, vision="normal"):
    """CIE L*a*b* of what a person of this vision sees."""
    seen = [min(1.0, max(0.0, channel)) for channel in times(VISIONS[vision], linear(colour))]
    ratios = [part / white for part, white in zip(times(XYZ, seen), times(XYZ, (1, 1, 1)), strict=True)]
    x, y, z = (r ** (1 / 3) if r > (6 / 29) ** 3 else r / (3 * (6 / 29) ** 2) + 4 / 29 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one, other):
    darker, lighter = sorted(times(XYZ, linear(colour))[1] for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def closest(colours, vision):
    """The two most similar of several colours, and their difference."""
    return min((ciede2000(lab(one, vision), lab(two, vision)), one, two) for one, two in combinations(colours, 2))


@pytest.mark.parametrize("line", SHARMA.strip().splitlines())
def test_differences_are_those_of_the_published_pairs(line):
    *colours, expected = map(float, line.split())
    assert ciede2000(colours[:3], colours[3:]) == pytest.approx(expected, abs=1e-4)
    assert ciede2000(colours[3:], colours[:3]) == pytest.approx(expected, abs=1e-4)


def test_lab_and_contrast_are_those_of_known_colours():
    assert lab("#ff0000") == pytest.approx((53.24, 80.09, 67.20), abs=0.01)  # of sRGB's red, D65
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)  # the grey of WCAG's examples
    for vision in VISIONS:  # a grey is the same grey to everybody
        assert lab("#808080", vision) == pytest.approx(lab("#808080"), abs=0.01)


# Lists of colours any two of which may lie side by side in some picture.
NEIGHBOURS = {
    "timelines": [*dict.fromkeys(shade for shades in ACTIONS.values() for shade in shades), IDLE, LINE],
    "memory": [*MEMORY.values(), IDLE],
    "lanes": [*LANES.values(), *OTHER_LANES, PAPER],
    "staleness": [AGES, GAPS, BOUND, PAPER],
    "plots": [*CYCLE, PAPER],
}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("picture", NEIGHBOURS)
def test_neighbours_are_told_apart(picture, vision):
    difference, one, two = closest(NEIGHBOURS[picture], vision)
    assert difference >= APART, f"{one} beside {two}"


@pytest.mark.parametrize(
    "colour", sorted({shade for shades in ACTIONS.values() for shade in shades} | {*MEMORY.values()})
)
def test_text_on_a_bar_is_read(colour):
    assert contrast(colour, ink_on(colour)) >= READABLE


def test_text_on_the_page_is_read():
    for ink in (INK, MUTED, BOUND):
        assert contrast(ink, PAPER) >= READABLE


def test_lines_and_bars_on_the_page_are_seen():
    """WCAG 2.2, success criterion 1.4.11: 3 to 1 for what a reader has to see of a graphic."""
    for colour in (*CYCLE, AGES, GAPS, BOUND, LINE):
        assert contrast(colour, PAPER) >= 3


def test_every_lane_has_a_colour_of_its_own():
    names = ["data", "pipelinextensor", "pipeline", "dataxtensor", "tensor", "replicas"]
    assert list(lane_colours(names)) == names and len(set(lane_colours(names).values())) == 6
    assert lane_colours(["dataxtensor"]) == {"dataxtensor": OTHER_LANES[0]}
