"""What a message refuses ends in it, and what it proposes runs."""

import re
from pathlib import Path

import pytest

from tests.harness import said_by
from tests.remedies.messages import messages
from tests.remedies.offers import OFFERS

MESSAGES = {message.key: message for message in messages()}


def form(text: str) -> re.Pattern[str]:
    """A message with anything where it says something of the run."""
    return re.compile(".*".join(map(re.escape, re.split(r"\{[^{}]*\}", text))), re.DOTALL)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow) if offer.is_slow else key for key, offer in OFFERS.items()]
)
def test_what_a_message_proposes_runs(key: str, tmp_path: Path):
    with pytest.raises(Exception) as caught:
        OFFERS[key].refused(tmp_path)
    said = said_by(caught.value)
    assert form(MESSAGES[key].text).search(said), said
    OFFERS[key].followed(tmp_path)
