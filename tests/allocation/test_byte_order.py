"""Arrays in another byte order are refused, never misread."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import BlockPool, PrefixIndex, Scheduler
from kvpager.errors import InvalidArgumentError

FOREIGN = ">" if np.little_endian else "<"


def test_foreign_byte_order_is_refused_everywhere_and_nothing_changes() -> None:
    pool = BlockPool(64)
    account = pool.add_account()
    blocks = pool.allocate(account, 4)
    before = pool.stats()
    with pytest.raises(InvalidArgumentError, match="byte order"):
        pool.release(blocks.astype(FOREIGN + "u8"))
    with pytest.raises(InvalidArgumentError, match="byte order"):
        pool.allocate(account, out=np.zeros(4, FOREIGN + "u8"))
    assert repr(pool.stats()) == repr(before)
    pool.release(blocks)

    index = PrefixIndex(pool, block_size=4)
    scheduler = Scheduler(pool, index, block_size=4)
    tenant = scheduler.add_tenant("a")
    with pytest.raises(InvalidArgumentError, match="byte order"):
        scheduler.submit(tenant, np.arange(8, dtype=FOREIGN + "i4"))
    assert not scheduler.has_work()
    scheduler.submit(tenant, np.arange(8, dtype="u1"), max_tokens=2)
    batch = scheduler.step()
    with pytest.raises(InvalidArgumentError, match="byte order"):
        scheduler.commit(batch.step_id, np.array([0, 1], FOREIGN + "i4"), np.array([7], np.int32))
    scheduler.commit(batch.step_id, np.array([0, 1], np.int32), np.array([7], np.int32))
