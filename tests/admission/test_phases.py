"""Recording where a step's time goes."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import BlockPool, PhaseTimes, PrefixIndex, Scheduler
from kvpager._core import num_allocations
from kvpager.errors import InvalidArgumentError, OutOfMemoryError


def make_scheduler(running: int) -> Scheduler:
    """A scheduler with `running` requests that decode for long, none of them admitted yet."""
    pool = BlockPool(running * 200)
    scheduler = Scheduler(
        pool,
        PrefixIndex(pool, block_size=16),
        block_size=16,
        max_batch_tokens=4096,
        max_running=running,
    )
    tenant = scheduler.add_tenant("t")
    for i in range(running):
        scheduler.submit(tenant, np.arange(20 + i, dtype=np.int32), max_tokens=2000)
    return scheduler


def run(scheduler: Scheduler, steps: int) -> list[int]:
    """Runs steps; returns what each allocated."""
    allocations = []
    for _ in range(steps):
        before = num_allocations()
        batch = scheduler.step()
        allocations.append(num_allocations() - before)
        starts = np.arange(batch.num_sequences + 1, dtype=np.int32)
        scheduler.commit(batch.step_id, starts, np.full(batch.num_sequences, 7, np.int32))
    return allocations


def test_phases_are_recorded_between_begin_and_end_and_only_there() -> None:
    scheduler = make_scheduler(8)
    assert scheduler.end_phases() is None
    run(scheduler, 3)
    scheduler.begin_phases(max_spans=10)
    run(scheduler, 5)
    times = scheduler.end_phases()
    assert times is not None
    assert times.num_steps == 5
    assert scheduler.end_phases() is None


def test_every_phase_has_a_time_and_together_they_are_the_step() -> None:
    scheduler = make_scheduler(8)
    scheduler.begin_phases(max_spans=1000)
    run(scheduler, 1)
    times = scheduler.end_phases()
    assert times is not None
    assert list(PhaseTimes.PHASES) == ["inbox", "growth", "look_up", "admission", "batch_arrays", "commit"]
    parts = [times.percentile_ns(100, phase) for phase in times.PHASES]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(times.percentile_ns(100), rel=0.01)
    look_ups = times.span_phases == times.PHASES.index("look_up")
    assert look_ups.sum() == 8
    assert set(times.span_step_ids.tolist()) == {1}


def test_spans_follow_each_other_and_those_without_room_are_counted() -> None:
    scheduler = make_scheduler(2)
    run(scheduler, 2)  # the prompts share a block, which the second one waits for
    scheduler.begin_phases(max_spans=12)
    run(scheduler, 4)
    times = scheduler.end_phases()
    assert times is not None
    assert len(times.span_starts_ns) == 12
    ends = times.span_starts_ns + times.span_durations_ns
    assert (times.span_starts_ns[1:] >= ends[:-1]).all()
    assert times.dropped_spans == 4 * 5 - 12


def test_a_phase_that_does_not_exist_is_named() -> None:
    scheduler = make_scheduler(1)
    scheduler.begin_phases()
    times = scheduler.end_phases()
    assert times is not None
    with pytest.raises(InvalidArgumentError, match='"lunch"'):
        times.percentile_ns(50, "lunch")
    with pytest.raises(InvalidArgumentError, match="101"):
        times.percentile_ns(101)
    with pytest.raises(OutOfMemoryError, match=f"max_spans {2**60} takes .* bytes"):
        scheduler.begin_phases(max_spans=2**60)


def test_the_core_allocates_nothing_in_a_steady_step() -> None:
    """What is left is the handle that Python gets: the same few allocations whatever the batch."""
    few, many = make_scheduler(2), make_scheduler(64)
    assert max(run(few, 200)[50:]) == max(run(many, 200)[50:])


def forecasting_scheduler(running: int) -> Scheduler:
    """Requests of two tenants that decode for long, and one that waits for more blocks than there are."""
    pool = BlockPool(200 * running)
    scheduler = Scheduler(
        pool,
        PrefixIndex(pool, block_size=16),
        block_size=16,
        max_batch_tokens=4096,
        max_running=running + 1,
        max_model_tokens=3200 * running,
        policy="forecast",
    )
    tenants = [scheduler.add_tenant("a"), scheduler.add_tenant("b")]
    for i in range(running):
        prompt = np.arange(20 + i, dtype=np.int32) + 1000 * i
        scheduler.submit(tenants[i % 2], prompt, max_tokens=2000)
    while scheduler.stats().num_running < running:
        run(scheduler, 1)
    scheduler.submit(tenants[0], np.zeros(3190 * running, np.int32), max_tokens=1)
    return scheduler


def test_the_core_allocates_nothing_where_the_forecast_looks_at_two_tenants() -> None:
    """Every 32 steps, for the head that waits; what a tenant has of its own is made at the first looks."""
    few, many = forecasting_scheduler(2), forecasting_scheduler(64)
    assert max(run(few, 300)[150:]) == max(run(many, 300)[150:])
    assert few.stats().num_waiting == many.stats().num_waiting == 1
