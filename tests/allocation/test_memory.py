"""What does not fit in memory is refused with the bytes; the process goes on, and nothing is half made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvpager import BlockPool, PrefixIndex, Scheduler, errors

LIMITED = """
import resource
from kvpager import BlockPool, PrefixIndex, Scheduler, errors

pool = BlockPool(1 << 20)
address_space = 4 << 30
resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
made = []
for make in (
    lambda: BlockPool(2**31 - 1),
    lambda: BlockPool(2**29),
    lambda: BlockPool(2**29, max_accounts=1024, max_open_steps=65536),
    lambda: PrefixIndex(pool, block_size=4096),
    lambda: Scheduler(pool, max_running=2**21, max_batch_tokens=2**21, max_model_tokens=8192),
    lambda: Scheduler(pool, max_running=2**30 - 1, max_batch_tokens=2**30 - 1, max_model_tokens=1),
    lambda: Scheduler(pool, host_blocks=2**30),
):
    try:
        made.append(make())
    except MemoryError as error:
        assert isinstance(error, errors.OutOfMemoryError) and error.num_bytes > 1 << 30, repr(error)
        assert f"takes {error.num_bytes} bytes of memory, more than" in str(error), error
        print("refused")
scheduler = Scheduler(pool)
print(len(made), scheduler.num_running, pool.stats().free)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's here")
def test_what_does_not_fit_is_a_memory_error_with_the_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == ["refused"] * 7 + [f"0 0 {1 << 20}"]


def test_more_than_the_machine_has_is_refused_before_it_is_asked_for() -> None:
    pool = BlockPool(1 << 22)
    with pytest.raises(
        errors.OutOfMemoryError, match=r"4194304 blocks of 65536 take|more than the machine's \d+"
    ):
        PrefixIndex(pool, block_size=65_536)
    for block_size in (0, 65_537, 2**31, 2**40):
        with pytest.raises(errors.InvalidArgumentError, match=f"is {block_size}, must be 1 to 65536"):
            PrefixIndex(pool, block_size=block_size)
    PrefixIndex(pool, block_size=16)


def test_a_row_of_a_table_has_no_more_columns_than_the_pool_has_blocks() -> None:
    for groups, columns in ((None, 8), ([("full", None), ("sliding", 4)], 8), ([("sliding", 4)], 2**9)):
        pool = BlockPool(8)
        index = PrefixIndex(pool, block_size=16)
        scheduler = Scheduler(pool, index, block_size=16, max_model_tokens=2**13, layer_groups=groups)
        assert scheduler.step().block_tables.shape == (65, columns)


def test_the_longest_model_costs_what_the_pool_can_hold() -> None:
    scheduler = Scheduler(BlockPool(8), max_model_tokens=2**30 - 1)
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(100), max_tokens=29)
    with pytest.raises(errors.RefusedError, match="need 9 blocks of 16 tokens"):
        scheduler.submit(tenant, range(100), max_tokens=30)
    assert scheduler.step().block_tables.shape == (65, 8)


def test_limits_of_integers_are_named_as_they_are() -> None:
    for call, text in (
        (lambda: BlockPool(-1), "num_blocks is -1, must be 1 to 2147483647"),
        (lambda: BlockPool(2**31), "num_blocks is 2147483648, must be 1 to 2147483647"),
        (lambda: BlockPool(1, max_accounts=2**40), "max_accounts is 1099511627776, must be 1 to 1024"),
        (lambda: BlockPool(1, max_open_steps=-3), "max_open_steps is -3, must be 1 to 65536"),
        (lambda: Scheduler(BlockPool(1), max_running=-1), "max_running is -1, must be 1 to 1073741823"),
        (lambda: Scheduler(BlockPool(1), max_prefill_chunk=-1), "max_prefill_chunk is -1, must be 1 to"),
    ):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            call()
        assert str(caught.value).startswith(text), str(caught.value)
    pool = BlockPool(4)
    with pytest.raises((errors.OutOfBlocksError, errors.OverQuotaError)) as refused:
        pool.allocate(pool.add_account(), 2**40)
    assert refused.value.needed == 2**40


def test_tokens_beyond_their_range_are_named_with_it() -> None:
    scheduler = Scheduler(BlockPool(8))
    tenant = scheduler.add_tenant("alice")
    for prompt in ([2**31], [-1], [2**40]):
        with pytest.raises(
            errors.InvalidArgumentError, match=rf"ids\[0\] is {prompt[0]}, must be 0 to 2147483647"
        ):
            scheduler.submit(tenant, prompt)
    scheduler.submit(tenant, [1], max_tokens=2)
    batch = scheduler.step()
    for token in (2**31, -1, -(2**40)):
        with pytest.raises(
            errors.InvalidArgumentError, match=rf"tokens\[0\] is {token}, must be 0 to 2147483647"
        ):
            scheduler.commit(batch.step_id, [0, 1], [token])
    scheduler.commit(batch.step_id, [0, 1], [1])
