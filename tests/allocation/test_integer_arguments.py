"""Every integer argument of the core refuses what is no number in its range, with the numbers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpager._core as core
from kvpager import BlockPool, Magazine, PrefixIndex, Scheduler, ShareScope, errors

CONFIG = '{"n_layer": 12, "n_head": 12, "n_embd": 768}'
BAD = (-1, -(2**70), 2**70, True, 1.5, "7", object(), np.float32(1))
SIGNED = {
    ("Scheduler", "submit", "priority"),
    ("Scheduler", "open_session", "priority"),
    ("Retention", "__new__", "priority"),
}
"""Arguments that may be negative."""


def integer_arguments() -> list[tuple[str, str, str]]:
    """(class, method, argument) of every argument that the stub declares as an int."""
    found = []
    stub = ast.parse(Path(core.__file__).with_name("_core.pyi").read_text())
    for item in stub.body:
        functions = item.body if isinstance(item, ast.ClassDef) else [item]
        owner = item.name if isinstance(item, ast.ClassDef) else ""
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                arguments = [*function.args.args, *function.args.kwonlyargs]
                found += [
                    (owner, function.name, argument.arg)
                    for argument in arguments
                    if argument.annotation and ast.unparse(argument.annotation) in ("int", "int | None")
                ]
    return found


class Calls:
    """Every callable with an integer argument, and arguments with which it works."""

    def __init__(self) -> None:
        self.pool = BlockPool(64)
        self.account = self.pool.add_account()
        self.index = PrefixIndex(BlockPool(64), block_size=16)
        self.namespace = self.index.namespace(ShareScope.private("a"))
        self.scheduler = Scheduler(BlockPool(64))
        self.tenant = self.scheduler.add_tenant("a")
        self.geometry = core.KvGeometry.from_config_json(CONFIG)

    def get(self, owner: str, method: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        pool, index, scheduler = self.pool, self.index, self.scheduler
        table: dict[tuple[str, str], tuple[Callable[..., Any], dict[str, Any]]] = {
            ("KvGeometry", "from_config_json"): (core.KvGeometry.from_config_json, {"text": CONFIG}),
            ("KvGeometry", "bytes_for_length"): (self.geometry.bytes_for_length, {}),
            ("KvGeometry", "blocks_for_length"): (self.geometry.blocks_for_length, {"length": 5}),
            ("KvGeometry", "weights_on_device"): (self.geometry.weights_on_device, {}),
            ("KvGeometry", "batch_arrays"): (self.geometry.batch_arrays, {}),
            ("KvGeometry", "budget"): (self.geometry.budget, {"device_memory": 2**34}),
            ("BlockPool", "__new__"): (BlockPool, {"num_blocks": 4}),
            ("BlockPool", "add_account"): (pool.add_account, {}),
            ("BlockPool", "set_quota"): (pool.set_quota, {"account": 0}),
            ("BlockPool", "reserve"): (pool.reserve, {"account": 0, "num_blocks": 1}),
            ("BlockPool", "allocate"): (pool.allocate, {"account": 0, "num_blocks": 1}),
            ("BlockPool", "wait_for_blocks"): (pool.wait_for_blocks, {"num_blocks": 1}),
            ("Magazine", "__new__"): (Magazine, {"pool": pool, "account": 0}),
            ("Magazine", "release_one"): (Magazine(pool, 0).release_one, {}),
            ("Fingerprint", "__new__"): (core.Fingerprint, {}),
            ("PrefixIndex", "__new__"): (PrefixIndex, {"pool": pool}),
            ("PrefixIndex", "namespace"): (index.namespace, {"scope": ShareScope.private("b")}),
            ("PrefixIndex", "set_isolation"): (index.set_isolation, {"account": 0, "isolation": "scoped"}),
            ("PrefixIndex", "peek_prefix"): (index.peek_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "publish_prefix"): (index.publish_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "make_room"): (index.make_room, {"account": 0, "num_blocks": 0}),
            ("PrefixIndex", "reclaim"): (index.reclaim, {"account": 0, "num_blocks": 0}),
            ("Scheduler", "__new__"): (Scheduler, {"pool": pool}),
            ("Scheduler", "add_tenant"): (scheduler.add_tenant, {"name": "b"}),
            ("Scheduler", "submit"): (scheduler.submit, {"tenant": self.tenant, "prompt_ids": [1]}),
            ("Scheduler", "open_session"): (scheduler.open_session, {"tenant": self.tenant}),
            ("Retention", "__new__"): (core.Retention, {}),
            ("Scheduler", "fork"): (scheduler.fork, {"request_id": 0, "count": 1}),
            ("Scheduler", "commit"): (scheduler.commit, {"step_id": 0, "token_start": [0], "tokens": []}),
            ("Scheduler", "abandon"): (scheduler.abandon, {"step_id": 0, "reason": ""}),
            ("SequentialReplay", "__new__"): (
                core.SequentialReplay,
                {"num_blocks": 4, "block_size": 16, "eviction": "lru", "hash_block": 16, "tenants": ["a"]},
            ),
            ("Stress", "__new__"): (
                core.Stress,
                {"threads": 1, "blocks": 4, "tenants": 1, "mix": "all", "seed": 0},
            ),
            ("StressLatencies", "record"): (core.StressLatencies().record, {"family": "allocate"}),
        }
        if (owner, method) in table:
            return table[owner, method]
        objects = {
            "BlockPool": pool,
            "PrefixIndex": index,
            "Scheduler": scheduler,
            "Reservation": pool.reserve(0, 2),
        }
        return getattr(objects[owner], method), {}


# Private functions have one caller, the package itself, which checks; the replay's take a settings object.
PRIVATE = {"", "Replay", "Oracle"}
PUBLIC = [place for place in integer_arguments() if place[0] not in PRIVATE]


def test_the_stub_has_many_integer_arguments() -> None:
    assert len(PUBLIC) > 80


@pytest.mark.parametrize(("owner", "method", "argument"), PUBLIC)
def test_bad_integers_are_refused_with_the_numbers(owner: str, method: str, argument: str) -> None:
    calls = Calls()
    call, good = calls.get(owner, method)
    before = repr(calls.pool.stats())
    for bad in BAD:
        if bad == -1 and (owner, method, argument) in SIGNED:
            continue
        with pytest.raises(errors.InvalidArgumentError) as caught:
            call(**{**good, argument: bad})
        assert argument in str(caught.value), str(caught.value)
        if type(bad) is int:
            assert str(bad)[:40] in str(caught.value), str(caught.value)
    assert repr(calls.pool.stats()) == before
    calls.pool.check_invariants()


def test_integers_of_other_types_are_taken() -> None:
    pool = BlockPool(np.uint16(8), max_accounts=np.int64(2))
    account = pool.add_account(limit=np.int8(4))
    block = np.uint64(pool.allocate_one(np.uint8(account)))
    pool.release_one(block)
    assert pool.stats().free == 8


def test_counts_no_device_can_have_are_refused() -> None:
    for num_blocks in (0, 2**31, 2**32, 2**40, 10**5000):
        with pytest.raises(errors.InvalidArgumentError, match="num_blocks is"):
            BlockPool(num_blocks)


def test_integers_in_sequences_are_refused_with_their_place() -> None:
    pool = BlockPool(8)
    for blocks, text in (
        ([0, -1], r"blocks\[1\] is -1, must be 0 to 18446744073709551615"),
        ([2**64], r"blocks\[0\] is 18446744073709551616"),
        ([3, 1.5], r"blocks\[1\] is 1.5"),
        (np.array([1, -7], np.int8), r"blocks\[1\] is -7"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            pool.release(blocks)  # type: ignore[arg-type]


def test_handles_of_late_generations_may_come_in_lists() -> None:
    pool = BlockPool(8)
    with pytest.raises(errors.InvalidHandleError, match="generation 4294967295"):
        pool.release([(2**32 - 1) << 32])


def test_a_tenant_must_have_a_name() -> None:
    scheduler = Scheduler(BlockPool(8))
    with pytest.raises(errors.InvalidArgumentError, match="empty"):
        scheduler.add_tenant("")


def test_a_note_that_names_no_argument_stays_a_note() -> None:
    error = errors.InvalidArgumentError("text")
    error.add_note("more")
    assert (str(error), error.__notes__) == ("text", ["more"])
