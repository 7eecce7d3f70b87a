"""Replicas lie on different hosts as long as there are any, and the first of them where it would lie without hosts."""

import pytest

from lightning_parallel.parameter_server.manager.ring import Ring


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_replicas_are_on_as_many_hosts_as_there_are(servers, hosts):
    host_of = {f"s{index}": str(index % hosts) for index in range(servers)}
    ring, plain = Ring(host_of), Ring(host_of.keys())
    for key in range(60):
        for replicas in (1, 2, 3):
            holders = ring.holders(key, replicas)
            assert len(holders) == len(set(holders)) == min(replicas, servers)
            assert len({host_of[holder] for holder in holders}) == min(replicas, servers, hosts)
            assert holders[0] == plain.holders(key, 1)[0]
            if hosts == 1:
                assert holders == plain.holders(key, replicas)


def test_what_is_left_of_a_host_that_is_gone_is_on_the_other():
    """Whichever host goes, a survivor of each chain has the range."""
    host_of = {f"s{index}": str(index % 2) for index in range(6)}
    ring = Ring(host_of)
    for gone in "01":
        assert all(any(host_of[one] != gone for one in ring.holders(key, 2)) for key in range(200))
