"""The choice of a replica, as a function."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.replicas.policy import SLACK, choose, most_load

names = st.text("abcdef0123456789", min_size=1, max_size=8)
loads = st.dictionaries(names, st.integers(0, 500), min_size=1, max_size=12)
keys = st.text(max_size=20)


@given(keys, loads)
def test_each_replica_is_offered_once(key: str, loads: dict[str, int]) -> None:
    assert sorted(choose(key, loads)) == sorted(loads)


@given(keys, loads)
def test_none_is_filled_beyond_its_share(key: str, loads: dict[str, int]) -> None:
    """Unless the two that a beginning may spill to have as much as the first."""
    first = choose(key, loads)[0]
    home, *others = choose(key, dict.fromkeys(loads, 0))
    assert loads[first] < most_load(loads) or loads[first] <= min(
        loads[name] for name in (home, *others[:2])
    )


@given(keys, st.sets(names, min_size=2, max_size=12))
def test_a_replica_that_goes_moves_its_own_keys_only(key: str, replicas: set[str]) -> None:
    order = choose(key, dict.fromkeys(replicas, 0))
    for gone in order[1:]:
        assert choose(key, dict.fromkeys(replicas - {gone}, 0))[0] == order[0]
    assert choose(key, dict.fromkeys(replicas - {order[0]}, 0)) == order[1:]


@given(keys, st.permutations(["a", "b", "c", "d"]))
def test_every_proxy_comes_to_the_same_place(key: str, replicas: list[str]) -> None:
    assert choose(key, dict.fromkeys(replicas, 3)) == choose(key, dict.fromkeys("abcd", 3))


def test_keys_are_spread_evenly() -> None:
    loads = dict.fromkeys("abcd", 0)
    places = Counter(choose(str(number), loads)[0] for number in range(4000))
    assert all(850 < places[name] < 1150 for name in loads), places


def test_a_beginning_that_all_send_overloads_no_replica() -> None:
    loads = dict.fromkeys("abcd", 0)
    for _ in range(400):
        loads[choose("the same", loads)[0]] += 1
    assert max(loads.values()) <= most_load(loads)
    used = [load for load in loads.values() if load]
    assert len(used) == 3, "its beginning is cached on its first three places only"


def test_a_little_load_moves_no_conversation() -> None:
    home = choose("chat", {"a": 0, "b": 0})[0]
    assert choose("chat", {"a": 0, "b": 0} | {home: SLACK})[0] == home
    assert choose("chat", {"a": 0, "b": 0} | {home: 5 * SLACK})[0] != home


def test_who_spills_over_keeps_the_order_behind() -> None:
    home, second, third, *rest = choose("chat", dict.fromkeys("abcde", 0))
    loads = dict.fromkeys("abcde", 0) | {home: 100, second: 2}
    assert choose("chat", loads) == [third, second, *rest, home]
