"""The rate limits, worked by hand."""

from __future__ import annotations

from p2pllm.dht.limits import ADDRESS_PER_S, NETWORK_PER_S, OFFENCE, UNPROVEN_PER_S, Limits, RateLimit

HERE, THERE = ("192.0.2.1", 1000), ("192.0.2.2", 1000)


def spent(limits: Limits, *addresses: tuple[str, int], proven: bool = True) -> int:
    """How many requests are allowed at one moment, one address after the other."""
    count = 0
    for address in addresses:
        while limits.allows(address, 0.0, proven=proven):
            count += 1
    return count


def test_the_rate_limit_gives_a_burst_and_then_its_rate() -> None:
    limit = RateLimit(rate=2)
    assert [limit.allows("here", 0.0) for _ in range(5)] == [True] * 4 + [False]
    assert limit.allows("there", 0.0), "others are not affected"
    assert [limit.allows("here", 1.0) for _ in range(3)] == [True, True, False]
    assert [limit.allows("here", 99.0) for _ in range(5)] == [True] * 4 + [False]


def test_a_charge_takes_what_is_left_and_no_more() -> None:
    limit = RateLimit(rate=2)
    limit.charge("here", 3, 0.0)
    assert [limit.allows("here", 0.0) for _ in range(2)] == [True, False]
    limit.charge("here", 1000, 0.0)
    assert limit.allows("here", 0.5)


def test_memory_is_bounded_and_who_asked_longest_ago_is_forgotten() -> None:
    limit = RateLimit(rate=0.5)
    assert [limit.allows(0, 0.0), limit.allows(0, 0.0)] == [True, False]
    for source in range(1, 4097):
        limit.allows(source, 0.0)
    assert len(limit._buckets) == 4096
    assert limit.allows(0, 0.0)


def test_an_address_has_a_limit_and_so_has_all_of_its_host() -> None:
    assert spent(Limits(), HERE) == 2 * ADDRESS_PER_S
    ports = [("192.0.2.1", port) for port in range(1000, 1050)]
    limits = Limits()
    assert spent(limits, *ports) == 2 * NETWORK_PER_S
    assert spent(limits, THERE) == 2 * ADDRESS_PER_S


def test_of_ipv6_a_whole_64_is_one_host() -> None:
    hosts = [(f"2001:db8::{number:x}:1", 7600) for number in range(1, 50)]
    limits = Limits()
    assert spent(limits, *hosts) == 2 * NETWORK_PER_S
    assert spent(limits, ("2001:db8:0:1::1", 7600)) == 2 * ADDRESS_PER_S


def test_who_forges_an_address_does_not_use_up_what_its_owner_needs() -> None:
    limits = Limits()
    assert spent(limits, HERE, proven=False) == 2 * UNPROVEN_PER_S
    assert spent(limits, HERE) == 2 * ADDRESS_PER_S


def test_an_offence_costs_as_much_as_many_requests() -> None:
    limits = Limits()
    limits.offended(HERE, 0.0)
    assert spent(limits, HERE) == 2 * ADDRESS_PER_S - OFFENCE
