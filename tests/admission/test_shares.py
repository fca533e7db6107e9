"""What a strict tenant is given of the scheduler's bounds, and what is left to others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpager import errors

from .engine import commit_samples, make


def test_a_strict_tenant_has_the_part_that_its_blocks_are_of_the_pool() -> None:
    _, scheduler = make(num_blocks=32, max_running=8, max_batch_tokens=64, max_waiting=16)
    strict = scheduler.add_tenant("strict", guaranteed=8, isolation="strict")
    other = scheduler.add_tenant("other")
    assert (strict.max_running, other.max_running) == (2, None)
    for tenant, places in ((strict, 4), (other, 12)):
        for i in range(places):
            scheduler.submit(tenant, range(100 * i, 100 * i + 30), max_tokens=1)
        with pytest.raises(errors.RefusedError, match=f"{places} requests waiting, the limit is {places}"):
            scheduler.submit(tenant, range(30), max_tokens=1)
    batch = scheduler.step()
    counts = np.diff(batch.query_start)
    assert (counts[batch.sequence_ids >> 40 > 0].sum(), counts.sum()) == (16, 64)


def test_ids_of_a_strict_tenant_count_its_own_requests() -> None:
    _, scheduler = make()
    strict = scheduler.add_tenant("strict", guaranteed=8, isolation="strict")
    other = scheduler.add_tenant("other")
    ids = [scheduler.submit(tenant, range(4), max_tokens=1) for tenant in (strict, other, other, strict)]
    assert ids == [(1 << 40) + 1, 1, 2, (1 << 40) + 2]
    with pytest.raises(errors.InvalidArgumentError, match="never issued"):
        scheduler.abort((1 << 40) + 3)
    assert scheduler.abort((1 << 40) + 2)
    batch = scheduler.step()
    ended = [*batch.finished, *commit_samples(scheduler, batch).finished]
    assert {end.request_id for end in ended} == {*ids}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"max_running": 7},
            r"7 of max_running: 6 are not given to other strict tenants, and 1 must be left",
        ),
        ({"max_batch_tokens": 60}, r"60 of max_batch_tokens: 48 are not given"),
        ({"max_waiting": 13}, r"13 of max_waiting: 12 are not given"),
        ({"max_running": 4, "max_batch_tokens": 3}, r"it has max_batch_tokens 3 and max_running 4"),
        ({"max_running": 1, "max_batch_tokens": 47}, r"others keep max_batch_tokens 1 and max_running 5"),
        ({"max_running": 0}, r"of which there must be 1 at least"),
    ],
)
def test_shares_that_do_not_fit_are_refused_with_the_numbers(options: dict[str, Any], text: str) -> None:
    _, scheduler = make(max_running=8, max_batch_tokens=64, max_waiting=16)
    scheduler.add_tenant("first", guaranteed=8, isolation="strict")
    scheduler.add_tenant("other")
    with pytest.raises(errors.InvalidArgumentError, match=text):
        scheduler.add_tenant("second", guaranteed=8, isolation="strict", **options)
    assert scheduler.add_tenant("second", guaranteed=8, isolation="strict").max_running == 2


def test_what_strict_tenants_have_others_never_had() -> None:
    _, scheduler = make(max_running=4, max_batch_tokens=64)
    other = scheduler.add_tenant("other")
    with pytest.raises(errors.InvalidArgumentError, match="are shares of a strict tenant"):
        scheduler.add_tenant("scoped", max_running=2)
    for i in range(4):
        scheduler.submit(other, range(i, i + 4), max_tokens=4)
    commit_samples(scheduler, scheduler.step())
    with pytest.raises(errors.WrongStateError, match="leaves 3 running places to others, who have 4"):
        scheduler.add_tenant("strict", guaranteed=8, isolation="strict")
    while scheduler.has_work():
        commit_samples(scheduler, scheduler.step())
    scheduler.add_tenant("strict", guaranteed=8, isolation="strict", max_running=3, max_batch_tokens=3)
    with pytest.raises(errors.RefusedError, match="2 samples, and 1 sequence may run at once"):
        scheduler.submit(other, range(4), n=2)


def test_strict_tenants_may_have_everything_and_then_others_find_nothing() -> None:
    _, scheduler = make(num_blocks=32)
    scheduler.add_tenant("strict", guaranteed=32, isolation="strict")
    with pytest.raises(
        errors.InvalidArgumentError, match="strict tenants leave max_running 0, max_waiting 0"
    ):
        scheduler.add_tenant("other")
