"""Every callable of the core, its arguments as the stub declares them, and values with which it works."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import kvpager._core as core
from kvpager import BlockPool, Magazine, PrefixIndex, Scheduler, ShareScope

CONFIG = '{"n_layer": 12, "n_head": 12, "n_embd": 768}'

PRIVATE = {"", "Replay", "Oracle"}
"""Functions that have one caller, the package itself, which checks; the replay's take a settings object."""


class Argument(NamedTuple):
    owner: str
    method: str
    name: str
    annotation: str


def arguments() -> list[Argument]:
    """Every argument that the stub declares of what others than the package call."""
    found = []
    stub = ast.parse(Path(core.__file__).with_name("_core.pyi").read_text())
    for item in stub.body:
        functions = item.body if isinstance(item, ast.ClassDef) else [item]
        owner = item.name if isinstance(item, ast.ClassDef) else ""
        for function in functions:
            if isinstance(function, ast.FunctionDef) and owner not in PRIVATE:
                declared = [*function.args.args, *function.args.kwonlyargs]
                found += [
                    Argument(owner, function.name, each.arg, ast.unparse(each.annotation))
                    for each in declared
                    if each.annotation
                ]
    return found


class Calls:
    """Every callable with an integer argument, and arguments with which it works."""

    def __init__(self) -> None:
        self.pool = BlockPool(64)
        self.account = self.pool.add_account()
        self.index = PrefixIndex(BlockPool(64), block_size=16)
        self.match = self.index.root(self.index.namespace(ShareScope.private("a")))
        self.scheduler = Scheduler(BlockPool(64))
        self.tenant = self.scheduler.add_tenant("a")
        self.stress = core.Stress(threads=1, blocks=4, tenants=1, mix="alloc", seed=0)
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
            ("ShareScope", "private"): (ShareScope.private, {"tenant": "a"}),
            ("PrefixIndex", "__new__"): (PrefixIndex, {"pool": pool}),
            ("PrefixIndex", "namespace"): (index.namespace, {"scope": ShareScope.private("b")}),
            ("PrefixIndex", "set_isolation"): (index.set_isolation, {"account": 0, "isolation": "scoped"}),
            ("PrefixIndex", "peek_prefix"): (index.peek_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "publish_prefix"): (index.publish_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "chain"): (index.chain, {}),
            ("PrefixIndex", "match_prefix"): (index.match_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "match_many"): (index.match_many, {"namespace": 0, "prompts": [[1]]}),
            ("PrefixIndex", "match_partial"): (index.match_partial, {"pinned": self.match, "tokens": [1]}),
            ("PrefixIndex", "key_items"): (index.key_items, {"tokens": [1], "items": []}),
            ("PrefixIndex", "insert_prefix"): (index.insert_prefix, {"namespace": 0, "tokens": [1]}),
            ("PrefixIndex", "extend"): (index.extend, {"pinned": self.match, "tokens": [], "blocks": []}),
            ("PrefixIndex", "publish"): (index.publish, {"pinned": self.match, "tokens": [], "blocks": []}),
            ("PrefixIndex", "make_room"): (index.make_room, {"account": 0, "num_blocks": 0}),
            ("PrefixIndex", "reclaim"): (index.reclaim, {"account": 0, "num_blocks": 0}),
            ("Scheduler", "__new__"): (Scheduler, {"pool": pool}),
            ("Scheduler", "add_tenant"): (scheduler.add_tenant, {"name": "b"}),
            ("Scheduler", "submit"): (scheduler.submit, {"tenant": self.tenant, "prompt_ids": [1]}),
            ("Scheduler", "open_session"): (scheduler.open_session, {"tenant": self.tenant}),
            ("Retention", "__new__"): (core.Retention, {}),
            ("Scheduler", "reorder"): (scheduler.reorder, {"sequence_ids": [], "parents": [], "tokens": []}),
            ("Scheduler", "propose"): (
                scheduler.propose,
                {"sequence_ids": [], "draft_start": [0], "tokens": []},
            ),
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
            ("Stress", "advance"): (self.stress.advance, {}),
            ("StressLatencies", "record"): (
                core.StressLatencies().record,
                {"family": "allocate", "nanoseconds": 1},
            ),
        }
        if (owner, method) in table:
            return table[owner, method]
        if (owner, method) == ("PhaseTimes", "percentile_ns"):
            scheduler.begin_phases()
            return scheduler.end_phases().percentile_ns, {"percentile": 50.0}  # type: ignore[union-attr]
        objects = {
            "BlockPool": pool,
            "PrefixIndex": index,
            "Scheduler": scheduler,
            "Reservation": pool.reserve(0, 2),
            "ShareScope": ShareScope,
        }
        return getattr(objects[owner], method), {}
