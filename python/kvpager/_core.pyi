"""Type stubs of the compiled core. Held to the built module by a stub test."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self, final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvpager.replay.run import RunSettings

__version__: str

# --- geometry -----------------------------------------------------------------------------------------------

@final
class KvGeometry:
    """The KV-cache geometry of a deployed model, on the device that holds most of it.

    Example:
        >>> config = '{"n_layer": 12, "n_head": 12, "n_embd": 768}'
        >>> KvGeometry.from_config_json(config).bytes_per_token
        36864
    """

    @staticmethod
    def from_config_json(
        text: str,
        *,
        kv_dtype: str = "bf16",
        kv_scales: str | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
    ) -> KvGeometry:
        """Reads the text of a model's `config.json`, by the key names of its own family.

        Args:
            text: the file's text.
            kv_dtype: `bf16`, `fp16`, `fp32`, `fp8` or `int8`.
            kv_scales: `per_tensor` or `per_token_head`; by default what is usual for the dtype.
            tensor_parallel: devices that share each layer's heads.
            pipeline_parallel: devices that share the layers.

        Raises:
            InvalidArgumentError: with the field and the reason, also for what cannot be sized.
        """
    @property
    def model_type(self) -> str: ...
    @property
    def attention(self) -> str:
        """`MHA`, `GQA`, `MQA` or `MLA`."""
    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int | None:
        """KV heads of the first layer that keeps any; None under MLA."""
    @property
    def head_dim(self) -> int | None:
        """Elements of a K vector; None under MLA."""
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def full_attention_layers(self) -> int: ...
    @property
    def windowed_layers(self) -> int: ...
    @property
    def window(self) -> int | None:
        """Tokens of the first window or chunk, if a layer has one."""
    @property
    def checkpoint_dtype(self) -> str | None: ...
    @property
    def notes(self) -> list[str]:
        """What was taken from a class default or left out, in sentences."""
    @property
    def kv_dtype(self) -> str: ...
    @property
    def layers_per_device(self) -> int: ...
    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token on the device while every layer keeps it."""
    @property
    def bytes_per_token_beyond_window(self) -> int:
        """Bytes that each further token adds once every windowed layer is saturated."""
    @property
    def bytes_per_token_all_devices(self) -> int: ...
    @property
    def block_bytes_per_token(self) -> int:
        """Bytes a token of one block, padding included: the same in every group."""
    @property
    def layer_groups(self) -> list[tuple[str, int | None, list[int], int, int]]:
        """`(span, window, layers, bytes_per_token, padding_bytes_per_token)` of each group."""
    @property
    def cached_layers(self) -> list[tuple[int, int, int, int, int, bool]]:
        """`(number, query_heads, kv_heads, key_dim, value_dim, latent)` of the layers that keep something."""
    @property
    def scaled_by_head(self) -> bool:
        """Whether blocks hold a float32 scale for each token and head."""
    def bytes_for_length(self, length: int) -> int:
        """Bytes that a sequence of `length` tokens needs, padding and block rounding not counted."""
    def weights_on_device(self, total: int) -> int:
        """Bytes that the device with most of the weights has of `total` bytes of them.

        Under pipeline parallelism that is the heaviest stage's share of the parameters, which is estimated.
        """
    def blocks_for_length(self, length: int, *, block_size: int = 16, chunk: int = 1) -> int:
        """Blocks over all groups that a sequence holds at most on its way to `length` tokens."""
    def batch_arrays(
        self,
        *,
        block_size: int = 16,
        max_batch_tokens: int = 8192,
        max_running: int = 256,
        max_model_tokens: int | None = None,
    ) -> list[tuple[str, int | None, int, tuple[int, int]]]:
        """`(name, group, item_bytes, shape)` of the arrays of the largest batch, block tables included."""
    def budget(
        self,
        device_memory: int,
        *,
        device_free: int | None = None,
        device_share: float = 1.0,
        weights: int | None = None,
        activations: int | None = None,
        workspace: int | None = None,
        split_plans: int = 0,
        communication: int | None = None,
        runtime: int | None = None,
        graphs: int | None = None,
        safety_margin: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 8192,
        max_running: int = 256,
        max_model_tokens: int | None = None,
    ) -> Budget:
        """Makes the memory budget of one device, all sizes in bytes; what is None is estimated.

        An estimated workspace is the batch's arrays and `split_plans`, what attention kernels keep besides.

        Raises:
            InvalidArgumentError: with every term, when nothing is left or `max_model_tokens` does not fit.
        """

@final
class Budget:
    """A device's memory, part by part."""

    @property
    def parts(self) -> list[tuple[str, int, str, str]]:
        """`(name, bytes, origin, note)`; the bytes sum to the device's memory."""
    @property
    def available(self) -> int:
        """`min(share * total, free)`."""
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """Tokens that fit while every sequence is inside its windows."""
    @property
    def longest_request(self) -> int:
        """Longest single request that fits with tables made for it; 2^64 - 1 if nothing bounds it."""

# --- block pool ---------------------------------------------------------------------------------------------

@final
class PoolStats:
    """Blocks of a pool by state. Each number is of its own moment while threads work."""

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
    @property
    def held(self) -> int:
        """In use by references or pins; a shared block counts once."""
    @property
    def cached(self) -> int:
        """In the index and not pinned."""
    @property
    def free(self) -> int:
        """In no use."""
    @property
    def reserved(self) -> int:
        """Promised, not yet turned into blocks."""
    @property
    def quarantined(self) -> int:
        """Released, waiting for a step to close."""
    @property
    def peak_held(self) -> int:
        """Most blocks held at once since the pool was made."""
    @property
    def stranded(self) -> int:
        """In magazines, where only their threads can get at them; part of `held`."""

@final
class AccountStats:
    """Blocks of one account. Each number is of its own moment while threads work."""

    @property
    def committed(self) -> int:
        """Held, reserved and quarantined together."""
    @property
    def held(self) -> int:
        """In use by references or pins."""
    @property
    def reserved(self) -> int:
        """Promised, not yet turned into blocks."""
    @property
    def quarantined(self) -> int:
        """Released, waiting for a step to close."""
    @property
    def cached(self) -> int:
        """In the index and not pinned."""
    @property
    def guaranteed(self) -> int:
        """Blocks that it gets whatever others do."""
    @property
    def limit(self) -> int:
        """Most blocks that it may have committed."""

@final
class Reservation:
    """Blocks promised to an account and not yet taken; made by `BlockPool.reserve`.

    Drawing on it cannot fail for want of capacity. What is left goes back when it is closed, when a `with`
    block ends, or when it is garbage collected. It has one user at a time: a call while another thread is in
    one raises `WrongStateError`.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks that are still promised; 0 once it is closed."""
    @property
    def account(self) -> int:
        """The account that is charged."""
    @property
    def is_open(self) -> bool:
        """False once it is closed."""
    def allocate(
        self, num_blocks: int | None = None, *, out: NDArray[np.uint64] | Buffer | None = None
    ) -> NDArray[np.uint64]:
        """Turns promised capacity into blocks, all or none.

        Args:
            num_blocks: how many; or
            out: a contiguous writable `uint64` buffer that is filled with handles.

        Returns:
            A new array of handles [num_blocks] uint64, or `out` itself.

        Raises:
            NeedsReclaimError: if cached blocks must be evicted first.
            InvalidArgumentError: for more than is promised.
            WrongStateError: if it is closed.
        """
    def allocate_one(self) -> int:
        """Turns one promised block into a handle."""
    def put_back(self, blocks: NDArray[np.integer[Any]] | Buffer | Sequence[int]) -> None:
        """Takes exclusively held blocks of the same account back into the promise.

        For drafts that were not accepted, or blocks of a preempted sequence that will be needed again:
        drawing them again needs no capacity and no eviction.

        Args:
            blocks: handles [n], any integer dtype.

        Raises:
            WrongStateError: while a step is open, which may read the blocks, or if it is closed.
            InvalidHandleError: for a block that is shared, indexed, of another account or not held.
        """
    def grow(self, num_blocks: int) -> None:
        """Promises more.

        Raises:
            OutOfBlocksError, OverQuotaError: the promise is as before then.
        """
    def shrink(self, num_blocks: int) -> None:
        """Gives a part back.

        Raises:
            InvalidArgumentError: for more than is promised.
        """
    def close(self) -> None:
        """Gives what is left back. Does nothing if it is closed."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Magazine:
    """A thread's own store of up to 64 free blocks, for callers that allocate one at a time.

    Its blocks are committed to its account and *stranded*: other threads cannot get at them
    (`PoolStats.stranded`). That is its price, so it is opt-in. They go back when it is closed, when a `with`
    block ends, or when it is garbage collected. It has one user at a time: a call while another thread is in
    one raises `WrongStateError`.

    Args:
        pool: where blocks come from.
        account: who is charged.

    Raises:
        InvalidArgumentError: for an unknown account.
        WrongStateError: if the pool's places for magazines and reservations, 256, are all in use.

    Example:
        >>> pool = BlockPool(100)
        >>> with Magazine(pool, pool.add_account()) as magazine:
        ...     magazine.release_one(magazine.allocate_one())
        ...     pool.stats().stranded
        32
        >>> pool.stats().free
        100
    """

    def __new__(cls, pool: BlockPool, account: int) -> Self: ...
    @property
    def num_blocks(self) -> int:
        """Blocks in it; 0 once it is closed."""
    @property
    def is_open(self) -> bool:
        """False once it is closed."""
    def allocate_one(self) -> int:
        """Hands out one block.

        Raises:
            OutOfBlocksError, OverQuotaError, NeedsReclaimError: as `BlockPool.allocate` for one block.
            WrongStateError: if it is closed.
        """
    def release_one(self, block: int) -> None:
        """Takes a reference from one block. The last one keeps the block here.

        It goes through the pool while a step is open, and for a block that is shared or of another account.

        Raises:
            InvalidHandleError: as for `BlockPool.release`.
            WrongStateError: if it is closed.
        """
    def close(self) -> None:
        """Gives its blocks back. Does nothing if it is closed."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class BlockPool:
    """The blocks of a device. Every call may run from any thread at once.

    A block is named by a handle, `generation << 32 | id`: a handle from before the block's last release is
    stale, and every call says so. Arrays of handles may be of any integer dtype; a contiguous `uint64` buffer
    is read in place and must not be written meanwhile.

    A failed call changes nothing. After a `fork`, the child's calls raise `WrongStateError`.

    Args:
        num_blocks: 1 to 2**31 - 1.
        max_accounts: quota accounts that may be added, 1 to 1,024; 64 by default.
        max_open_steps: steps that may be open at once; 8 by default.

    Raises:
        InvalidArgumentError: for a number out of range.
        OutOfMemoryError: more than the machine or the process has room for, with the bytes.

    Example:
        >>> pool = BlockPool(8)
        >>> account = pool.add_account()
        >>> blocks = pool.allocate(account, 3)
        >>> [int(block) & 0xFFFFFFFF for block in blocks]
        [0, 1, 2]
        >>> pool.release(blocks)
        >>> pool.stats().free
        8
    """

    def __new__(
        cls, num_blocks: int, *, max_accounts: int | None = None, max_open_steps: int | None = None
    ) -> Self: ...
    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
    @property
    def num_accounts(self) -> int:
        """Accounts added so far; their numbers are `range(num_accounts)`."""
    def add_account(self, *, guaranteed: int | None = None, limit: int | None = None) -> int:
        """Adds an account and returns its number.

        Args:
            guaranteed: blocks that it gets whatever others do; 0 by default.
            limit: most blocks that it may have committed; by default the pool's blocks.

        Raises:
            InvalidArgumentError: for a quota that the pool cannot give, or when all accounts are there.
        """
    def quota(self, account: int) -> tuple[int, int]:
        """Returns `(guaranteed, limit)` of an account."""
    def set_quota(self, account: int, *, guaranteed: int | None = None, limit: int | None = None) -> None:
        """Changes a quota while blocks move; what is None stays.

        A limit below what is committed takes effect as blocks are released.

        Raises:
            InvalidArgumentError: for a guarantee that is lent out.
        """
    def reachable(self, account: int) -> int:
        """Most blocks that an account can ever have committed: its limit, less what others are promised."""
    def available(self, account: int) -> int:
        """Blocks that an account could reserve now: a hint while other threads work, not a promise."""
    def reserve(self, account: int, num_blocks: int) -> Reservation:
        """Promises blocks.

        Raises:
            OutOfBlocksError: the pool's capacity is in use or promised.
            OverQuotaError: the account's limit is reached.
        """
    def allocate(
        self, account: int, num_blocks: int | None = None, *, out: NDArray[np.uint64] | Buffer | None = None
    ) -> NDArray[np.uint64]:
        """Hands out blocks, all or none.

        Args:
            account: who is charged.
            num_blocks: how many; or
            out: a contiguous writable `uint64` buffer that is filled with handles.

        Returns:
            A new array of handles [num_blocks] uint64, or `out` itself.

        Raises:
            OutOfBlocksError, OverQuotaError: as for `reserve`.
            NeedsReclaimError: the capacity is there, and cached blocks are in the way.
        """
    def allocate_one(self, account: int) -> int:
        """Hands out one block, without an array."""
    def retain(self, blocks: NDArray[np.integer[Any]] | Buffer | Sequence[int]) -> None:
        """Adds a reference to each block, once for each time it is named.

        Raises:
            InvalidHandleError: for a block that is not held by references.
        """
    def release(self, blocks: NDArray[np.integer[Any]] | Buffer | Sequence[int]) -> None:
        """Takes a reference from each block; the last one frees it, or quarantines it while steps are open.

        Raises:
            InvalidHandleError: for a stale or foreign handle, or more releases than references.
        """
    def release_one(self, block: int) -> None:
        """Takes a reference from one block, without an array."""
    def is_exclusive(self, block: int) -> bool:
        """Whether a block may be written: one reference, and not in the index. Otherwise copy it first."""
    def open_step(self) -> int:
        """Opens a step: what is released from now on is not handed out before it closes.

        Returns:
            Its epoch.

        Raises:
            WrongStateError: if `max_open_steps` are open.
        """
    def close_step(self, epoch: int) -> None:
        """Closes a step: the device no longer reads what it read.

        Raises:
            WrongStateError: if it is not open.
        """
    def epoch_closed(self, epoch: int) -> bool:
        """Whether a step and all before it have closed."""
    def wait_for_blocks(
        self, num_blocks: int, timeout: float | None = None, *, account: int | None = None
    ) -> bool:
        """Waits, with the interpreter released, until so many blocks are uncommitted. Takes none.

        A signal handler that raises (Ctrl-C) ends the wait within a tenth of a second.

        Args:
            num_blocks: how many.
            timeout: seconds; None waits for ever.
            account: counts what this account could take, its quota included.

        Returns:
            False if the time ran out.
        """
    def stats(self) -> PoolStats:
        """Blocks by state."""
    def account_stats(self, account: int) -> AccountStats:
        """Blocks of one account."""
    def check_invariants(self) -> None:
        """Checks that bits, words, permits and counters agree. Reads every block; nothing may move.

        Raises:
            AssertionError: what disagrees, with the numbers.
        """

# --- prefix index -------------------------------------------------------------------------------------------

@final
class Fingerprint:
    """Everything that must be equal for KV to be reusable.

    Two requests may share KV only if every field is equal. `None` (not stated) differs from every stated
    value, the empty one included. Values are compared and hashed by content.

    Args:
        model: the model's name.
        model_revision: digest or revision of the weights; a hot update must change it.
        tokenizer_revision: revision of the tokenizer.
        chat_template: digest of the chat template.
        adapters: (content digest, scale) in the order of application; `[]` says that there is none.
        rope_type: kind of the position scheme: "default", "llama3", "yarn", ...
        rope_theta: base of the rotary frequencies.
        rope_scaling: the scheme's other parameters in one canonical text.
        attention_mask: kind of the mask with its layer pattern: "causal", "sliding", "chunked", ...
        window: window or chunk of that mask, in tokens.
        kv_dtype: data type of the stored K and V.
        kv_scales: digest of the quantisation scales, or how they are stored.
        numerics: whatever else changes values: sharding of MLA, kernel family, steering vectors.
        block_size: tokens in a block.
    """

    def __new__(
        cls,
        *,
        model: str | None = None,
        model_revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | None = None,
        adapters: Sequence[tuple[str, float | None]] | None = None,
        rope_type: str | None = None,
        rope_theta: float | None = None,
        rope_scaling: str | None = None,
        attention_mask: str | None = None,
        window: int | None = None,
        kv_dtype: str | None = None,
        kv_scales: str | None = None,
        numerics: str | None = None,
        block_size: int | None = None,
    ) -> Fingerprint: ...
    def to_bytes(self) -> bytes:
        """The canonical bytes: equal exactly if the fingerprints are."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class ShareScope:
    """Who may share a prefix. Values are compared and hashed by content."""

    @staticmethod
    def private(tenant: str, *, salt: bytes | None = None) -> ShareScope:
        """One tenant. A client's salt narrows it further; it can never name another tenant's prefixes."""

    @staticmethod
    def group(name: str) -> ShareScope:
        """The members of a group."""

    @staticmethod
    def public(name: str) -> ShareScope:
        """Everybody, by explicit publish."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Match:
    """A pinned prefix. Its blocks cannot be evicted until it is released.

    It releases itself at the end of a `with` block, at `release`, or when it is no longer referenced.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens of the pinned prefix."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pinned prefix."""

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(namespace, blocks) of each part, first to last; one part for a match in one namespace."""

    @property
    def namespace(self) -> int:
        """The namespace it was matched in; of a chain, the most private one: where blocks are inserted."""

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the blocks, first to last: [num_blocks], int32."""

    @property
    def blocks(self) -> NDArray[np.uint64]:
        """Handles of the blocks, first to last: [num_blocks], uint64."""

    @property
    def is_released(self) -> bool:
        """Whether it was released."""

    def release(self) -> None:
        """Releases the pin now. Again is nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class ScopeChain:
    """Namespaces of one fingerprint in the order of look-up; made by `PrefixIndex.chain`."""

    @property
    def namespaces(self) -> list[int]:
        """The namespaces' numbers, most public first. Inserts go to the last."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class NamespaceStats:
    """Counts of one namespace: a function of what was done in it and of what eviction took."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be matched."""
    @property
    def num_nodes(self) -> int:
        """Nodes that have them."""
    @property
    def num_purged_blocks(self) -> int:
        """Blocks that a purge cut off and that are still held."""
    @property
    def num_purges(self) -> int:
        """How often it was purged."""

@final
class SaltStats:
    """Counts of the namespaces that clients' salts made."""

    @property
    def num_salted(self) -> int:
        """There now, of the account."""
    @property
    def max_salted(self) -> int:
        """Most that an account may have."""
    @property
    def num_reclaimed(self) -> int:
        """Given to another salt so far, in the index."""

@final
class EventBatch:
    """Events of an index, oldest first, as arrays; E events with D digests and T tokens in all.

    A block is named by a keyed 256-bit digest of everything up to its end: who has no key cannot test guesses
    of a prompt against the stream. Followers see every namespace: the stream is for the operator.
    """

    @property
    def must_resync(self) -> bool:
        """Whether events were lost before these: what is known is void, start from a snapshot."""
    @property
    def numbers(self) -> npt.NDArray[np.uint64]:
        """Numbers of the events, without gaps: [E], uint64."""
    @property
    def namespaces(self) -> npt.NDArray[np.uint32]:
        """Where they happened: [E], uint32."""
    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """What happened: [E], uint8.

        0 stored, 1 removed (children before parents), 2 namespace cleared; of further layer groups 3 attached
        (the group has its block where one is stored), 4 detached (before that one is removed). If the first
        group of the model is not full, what is stored says where blocks may be, and every group is attached.
        """
    @property
    def groups(self) -> npt.NDArray[np.uint32]:
        """Layer group that was attached or detached: [E], uint32; 0 for other kinds."""
    @property
    def parents(self) -> npt.NDArray[np.uint8]:
        """Digest that the first block stored continues: [E, 32], uint8; zeros for other kinds."""
    @property
    def digest_start(self) -> npt.NDArray[np.int64]:
        """Event `i` has `digests[digest_start[i]:digest_start[i + 1]]`: [E + 1], int64."""
    @property
    def digests(self) -> npt.NDArray[np.uint8]:
        """Digests of blocks stored, one below the other, removed, or with a group's own: [D, 32], uint8."""
    @property
    def token_start(self) -> npt.NDArray[np.int64]:
        """Event `i` has `tokens[token_start[i]:token_start[i + 1]]`: [E + 1], int64."""
    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Tokens of the blocks stored: [T], uint32; empty unless the stream carries them."""
    def __len__(self) -> int: ...

@final
class Snapshot:
    """Every matchable block of an index at one moment, B of them, to start following its events from."""

    @property
    def next_number(self) -> int:
        """Number of the first event that is not in it: apply those from there on."""
    @property
    def namespaces(self) -> npt.NDArray[np.uint32]:
        """Namespace of each block: [B], uint32."""
    @property
    def parents(self) -> npt.NDArray[np.uint8]:
        """Digest that each block continues: [B, 32], uint8."""
    @property
    def digests(self) -> npt.NDArray[np.uint8]:
        """Digest of each block, parents before children: [B, 32], uint8."""
    @property
    def attached_namespaces(self) -> npt.NDArray[np.uint32]:
        """Namespace of each block at which a further layer group has its own, A of them: [A], uint32."""
    @property
    def attached_digests(self) -> npt.NDArray[np.uint8]:
        """Digest of each of those: [A, 32], uint8."""
    @property
    def attached_groups(self) -> npt.NDArray[np.uint32]:
        """Position of the layer group that has a block there, from 1: [A], uint32."""
    def __len__(self) -> int: ...

@final
class PrefixIndex:
    """Finds reusable prefixes, in whole blocks, and keeps their blocks.

    Token arguments are integer arrays or sequences; contiguous `uint32` arrays are read in place and must
    not be written during the call.

    Args:
        pool: the pool whose blocks it keeps.
        block_size: tokens in a block.
        eviction: which cached block goes first: "lru", "learned" or "clock".
        event_key: 32 random bytes, the operator's secret, turn the stream of events on; followers of indexes
            with one key see equal digests for equal content. Off costs nothing.
        event_capacity: events kept for a follower that lags behind; when they are more, all are dropped and
            the next batch says `must_resync`.
        event_tokens: whether stored events carry the blocks' tokens.

    Raises:
        InvalidArgumentError: a block size that is not 1 to 65,536, a capacity of 0, an unknown policy, a key
            of another length.
        OutOfMemoryError: token ids of the pool's blocks beyond the memory, with the bytes.
        WrongStateError: the pool is of a parent process.
    """

    def __new__(
        cls,
        pool: BlockPool,
        *,
        block_size: int = 16,
        eviction: Literal["lru", "learned", "clock"] = "lru",
        event_key: bytes | None = None,
        event_capacity: int = 65_536,
        event_tokens: bool = False,
    ) -> PrefixIndex: ...
    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def num_namespaces(self) -> int:
        """How many namespaces there are."""

    @property
    def memory_bytes(self) -> int:
        """Bytes used besides the token rows, the digests of items included."""

    def namespace(
        self, scope: ShareScope, fingerprint: Fingerprint | None = None, *, account: int | None = None
    ) -> int:
        """The number of (scope, fingerprint): equal for equal pairs, another one if any field differs.

        Salts come from clients, so their namespaces are limited (`set_max_salts`): beyond the limit, the one
        of the account that was used longest ago and is not in use is emptied for the new one, and its number
        is refused from then on.

        Args:
            scope: who may share.
            fingerprint: what must be equal; `None` is the one in which nothing is stated.
            account: the pool's account that is charged for held blocks of it; `None` is one that the index
                opens for itself, without a guarantee and limited by the pool alone.

        Raises:
            InvalidArgumentError: an unknown account, or the namespace is charged to another one.
            RefusedError: the account has its limit of salts, and they are in use. To be tried again.
        """

    def set_isolation(self, account: int, isolation: Literal["open", "scoped", "strict"]) -> None:
        """Sets what an account's tenant may observe of others, before its first namespace.

        `scoped`, the default, hides others' content but for memory pressure; `strict` makes all that is seen
        a function of the tenant's own requests and quota; `open` hides nothing.

        Raises:
            WrongStateError: the account has a namespace already.
            InvalidArgumentError: an unknown level or account, or `strict` where guarantee and limit differ.
        """

    def isolation(self, account: int) -> Literal["open", "scoped", "strict"]:
        """The level of an account.

        Raises:
            InvalidArgumentError: an unknown account.
        """

    def chain(self, namespaces: Sequence[int]) -> ScopeChain:
        """A chain to look up in order: public, then group, then private, each at most once.

        Raises:
            InvalidArgumentError: no namespace, another order, a public one at the end (only `publish` inserts
                there), or different fingerprints.
        """

    def match_prefix(
        self,
        namespace: int | ScopeChain,
        tokens: npt.NDArray[np.integer] | Sequence[int],
        *,
        whole: bool = False,
    ) -> Match:
        """Pins the longest cached prefix, of one namespace or of a chain's together.

        At most `len(tokens) - 1` tokens are matched, since the last one's logits are needed; with `whole`,
        all whole blocks.

        Raises:
            OutOfBlocksError: there is no capacity to hold the prefix. Nothing is pinned.
            OverQuotaError: the account's limit leaves no room to hold it.
        """

    def match_many(
        self,
        namespace: int | ScopeChain,
        prompts: Sequence[npt.NDArray[np.integer] | Sequence[int]],
        *,
        whole: bool = False,
    ) -> list[Match]:
        """`match_prefix` for each prompt, with the interpreter released throughout."""

    def match_partial(
        self,
        pinned: Match,
        tokens: npt.NDArray[np.integer] | Sequence[int],
    ) -> tuple[Match, int] | None:
        """The block that follows a match in one namespace and begins most like `tokens`, to be copied.

        Args:
            pinned: an unreleased match of this index, of one namespace.
            tokens: what follows it in the prompt, without the prompt's last token.

        Returns:
            (a match that pins the block until it is released, how many of its leading tokens agree), or None
            if no block begins like them. Its `blocks` is that one block. Of the blocks that follow, the 64
            that were added last are looked at.

        Raises:
            WrongStateError: the match was released.
            InvalidArgumentError: it is of a chain, or of another index.
            OutOfBlocksError: there is no capacity to hold the block.
        """

    def peek_prefix(self, namespace: int, tokens: npt.NDArray[np.integer] | Sequence[int]) -> int:
        """How many tokens `match_prefix` would find now. Pins and touches nothing."""

    def key_items(
        self, tokens: npt.NDArray[np.integer] | Sequence[int], items: Sequence[tuple[int, bytes]]
    ) -> npt.NDArray[np.uint32]:
        """What the index compares for a prompt with images, embeddings or the like: [n], uint32.

        At each item's offset an id from 2**31 on, interned to its digest, replaces the token: pass the
        result to the other calls. A scheduler does it by itself, see `Scheduler.submit`.

        A digest is remembered as long as something resident has it, and for some time beyond. Keys of one
        that was forgotten match nothing, and no other item ever has its id.

        Raises:
            InvalidArgumentError: an offset outside the prompt or out of order, or a digest that has not 1 to
                64 bytes.
        """

    def root(self, namespace: int) -> Match:
        """A match of the empty prefix, to insert below."""

    def insert_prefix(
        self, namespace: int | ScopeChain, tokens: npt.NDArray[np.integer] | Sequence[int]
    ) -> tuple[Match, int]:
        """Makes every whole block of `tokens` resident and pins it, evicting cached blocks if it must.

        Over a chain, what no scope has is inserted in the most private one. For replays, warming and
        tests; a scheduler allocates first and inserts when the content is there.

        Returns:
            (match, tokens that were resident already).

        Raises:
            OutOfBlocksError: there is no room. Nothing is pinned or inserted.
            OverQuotaError: the account's limit leaves no room.
        """

    def publish_prefix(
        self, namespace: int, tokens: npt.NDArray[np.integer] | Sequence[int]
    ) -> tuple[Match, int]:
        """`insert_prefix` in a public namespace, charged to its account: the operator's call.

        The content must have been written. Keep the match for as long as the prefix is to stay.

        Raises:
            InvalidArgumentError: the namespace is not public.
        """

    def extend(
        self,
        pinned: Match,
        tokens: npt.NDArray[np.integer] | Sequence[int],
        blocks: NDArray[np.uint64] | Sequence[int],
    ) -> tuple[int, int, NDArray[np.uint64]]:
        """Inserts whole blocks below a match and moves it to the new deepest node.

        Args:
            pinned: an unreleased match of this index.
            tokens: the blocks' tokens, `len(blocks) * block_size` of them.
            blocks: handles of blocks that the caller holds exclusively: [num_blocks], uint64. They pass to
                the index.

        Returns:
            (blocks indexed, how many of them were resident already, handles). Where the content was resident,
            the caller's copy is released and the handle is the resident block's. If fewer blocks are
            indexed than given (a step is open, or there is no capacity), the rest stays the caller's.

        Raises:
            InvalidHandleError: a block is not exclusively held. Nothing was changed.
        """

    def publish(
        self,
        pinned: Match,
        tokens: npt.NDArray[np.integer] | Sequence[int],
        blocks: npt.NDArray[np.uint64] | Sequence[int],
    ) -> tuple[int, int, npt.NDArray[np.uint64]]:
        """`extend` below a match in a public namespace: the operator's call, the only way up.

        Raises:
            InvalidArgumentError: the namespace is not public.
        """

    def purge(self, scope: ShareScope) -> tuple[int, int]:
        """Removes every prefix of a scope, over all fingerprints and, for a tenant, all its clients' salts.

        From the return on nothing of it can be matched. What running requests hold is evicted when they
        release it.

        Returns:
            (namespaces of the scope, blocks evicted at once).
        """

    def poll_events(self, max_events: int = 4096) -> EventBatch:
        """Takes up to `max_events` events, oldest first. Empty if the stream is off."""

    def snapshot(self) -> Snapshot:
        """Everything that is matchable now. Keeps writers waiting: for the start of a follower."""

    def namespace_stats(self, namespace: int) -> NamespaceStats:
        """Counts of a namespace. Reads all of its nodes."""

    def set_max_salts(self, max_salts: int) -> None:
        """Sets how many namespaces of salts an account may have at once; 1,024 by default."""

    def salt_stats(self, account: int) -> SaltStats:
        """Counts of the namespaces that clients' salts made for an account.

        Raises:
            InvalidArgumentError: an unknown account.
        """

    def make_room(self, account: int, num_blocks: int) -> int:
        """Evicts a `strict` account's own cached blocks until `num_blocks` more are within its limit.

        To be called before each allocation for it. Nothing for other levels. Returns how many were evicted.

        Raises:
            InvalidArgumentError: an unknown account.
        """

    def reclaim(self, account: int, num_blocks: int) -> int:
        """Evicts up to `num_blocks` cached blocks that an account's level lets go; returns how many.

        `open`: what is due, of whoever is open; `scoped`: its own first, then others' beyond their
        guarantees; `strict`: nobody's block within a guarantee.

        Raises:
            InvalidArgumentError: an unknown account.
        """

    def evict(self, num_blocks: int) -> int:
        """Evicts up to `num_blocks` cached blocks; returns how many."""

    def clear(self) -> None:
        """Evicts everything that is not held, and forgets the digests of items that nothing has any more."""

    def check_invariants(self) -> None:
        """Raises AssertionError with the first violated invariant."""

# --- scheduler ----------------------------------------------------------------------------------------------

@final
class Session:
    """A conversation whose blocks are kept between its turns, see `Scheduler.open_session`."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
    @property
    def is_open(self) -> bool:
        """Whether it takes turns: it has not been closed."""

@final
class Retention:
    """What of a request stays held after its end, for how long, and what goes first when room is needed.

    Kept blocks are their tenant's, within `max_kept_blocks`, each counted once; equal prefixes are kept once,
    with the higher priority and the later end. They become cached when the time has passed, and before a
    running request is preempted or any request is refused for memory: first those of the tenant that is
    short, then of the tenant that is most above its guarantee. What was not retained goes before all of them.

    Args:
        seconds: how long from the request's end on, on the clock of `step`; let go in the first step after.
        steps: the same in steps. Whichever comes first counts; without both, until somebody needs the room.
        num_tokens: leading tokens that are kept at least: whole blocks, as far as they were computed; None
            for all. Only blocks of the tenant itself: those of its group and public scope are not kept.
        priority: higher stays longer; of one priority, what was kept first goes first. In
            `submit` it is the lower that runs first.

    Raises:
        InvalidArgumentError: for 0 tokens or steps, or seconds that are not above 0 and finite.

    Example:
        >>> Retention(seconds=300.0, num_tokens=1000)
        Retention(seconds=300.0, steps=None, num_tokens=1000, priority=0)
    """

    def __new__(
        cls,
        *,
        seconds: float | None = None,
        steps: int | None = None,
        num_tokens: int | None = None,
        priority: int = 0,
    ) -> Self: ...
    @property
    def seconds(self) -> float | None:
        """How long it is kept."""
    @property
    def steps(self) -> int | None:
        """How long it is kept, in steps."""
    @property
    def num_tokens(self) -> int | None:
        """Leading tokens that are kept at least; None for all."""
    @property
    def priority(self) -> int:
        """Higher stays longer."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Tenant:
    """A tenant of one scheduler: the handle that requests are submitted with."""

    @property
    def name(self) -> str:
        """The name that its operator gave it."""
    @property
    def account(self) -> int:
        """The pool account that its blocks are charged to."""
    @property
    def weight(self) -> float:
        """Share of service among tenants that wait."""
    @property
    def num_waiting(self) -> int:
        """Requests of it that have not been admitted yet."""
    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those requests."""
    @property
    def max_waiting(self) -> int | None:
        """Requests of it that may wait at once, if it has a bound of its own."""
    @property
    def num_kept_blocks(self) -> int:
        """Blocks of it that are kept for sessions and retentions; at most `max_kept_blocks`."""
    @property
    def max_running(self) -> int | None:
        """Running places of its own, if it is `strict`."""
    @property
    def isolation(self) -> Literal["open", "scoped", "strict"]:
        """What it may observe of others."""
    @property
    def scope(self) -> Literal["private", "group", "public"]:
        """Who may see what its requests leave in the index."""
    @property
    def namespace(self) -> int | None:
        """Where its requests insert, but for those with a salt; None if the scheduler has no index."""

@final
class FinishedRequest:
    """The account of an ended sequence: of a request, or of one of its `n` samples.

    Each of the `n` ids of a request is reported once, also if it ends before it has its samples: with the
    reason of the request then (`aborted` for an id that was aborted alone before). What the request cost
    until then is in the account of branch 0; the others have 0 tokens, steps and preemptions.
    """

    @property
    def request_id(self) -> int:
        """What `submit` returned."""
    @property
    def sequence_id(self) -> int:
        """Its id in batches: `request_id + branch`."""
    @property
    def branch(self) -> int:
        """Which of the request's `n` samples it is."""
    @property
    def tenant(self) -> Tenant:
        """Its tenant."""
    @property
    def reason(self) -> Literal["stop", "length", "aborted", "capacity", "deadline", "drained", "error"]:
        """Why it ended."""
    @property
    def detail(self) -> str | None:
        """The reason given to `abandon`, if that ended it."""
    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the index, at admission or at a chunk's boundary after it."""
    @property
    def output_tokens(self) -> int:
        """Tokens sampled for it."""
    @property
    def steps(self) -> int:
        """Steps in which it had tokens."""
    @property
    def queue_steps(self) -> int:
        """Steps between its arrival and its admission, or its end if it never ran."""
    @property
    def preemptions(self) -> int:
        """Times its blocks were taken back while it ran."""

@final
class CommitOutcome:
    """What the end of a step did."""

    @property
    def finished(self) -> list[FinishedRequest]:
        """Requests that ended."""
    @property
    def dropped_tokens(self) -> int:
        """Tokens that came for sequences which had ended since the step was planned."""

@final
class SchedulerSnapshot:
    """The counts of a scheduler, its pool and its tenants, all of one moment."""

    @property
    def is_exact(self) -> bool:
        """Whether no step or commit came in between; if False, they left no gap in 0.2 s."""
    @property
    def pool(self) -> PoolStats:
        """Blocks by state: held, cached, free and quarantined ones add up to the capacity."""
    @property
    def scheduler(self) -> SchedulerStats:
        """Counts of the scheduler."""
    @property
    def accounts(self) -> dict[str, AccountStats]:
        """Blocks of each tenant, by name."""

@final
class SchedulerStats:
    """Counts of a scheduler."""

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
    @property
    def steps(self) -> int:
        """Steps planned."""
    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV was computed in committed steps."""
    @property
    def dropped_tokens(self) -> int:
        """Tokens that came for ended sequences."""
    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again because their blocks had been taken back."""
    @property
    def num_preemptions(self) -> int:
        """Times a running sequence's blocks were taken back; always 0 under `reserve`."""
    @property
    def num_parked(self) -> int:
        """Sequences, among the running, whose tails are on the host."""
    @property
    def swapped_out_blocks(self) -> int:
        """Blocks copied to the host."""
    @property
    def swapped_in_blocks(self) -> int:
        """Blocks copied back."""
    @property
    def num_paused(self) -> int:
        """Requests that are paused, with blocks or without."""
    @property
    def num_forced_out(self) -> int:
        """Times a paused request's blocks were taken for one that needed them."""
    @property
    def num_sessions_kept(self) -> int:
        """Sessions that keep blocks between turns."""
    @property
    def num_retained(self) -> int:
        """Prefixes that are kept by the retention of a request."""
    @property
    def num_kept_blocks(self) -> int:
        """Blocks, among the held, that sessions and retentions keep."""

@final
class PhaseTimes:
    """How long each phase of a step took: `Scheduler.begin_phases` to `Scheduler.end_phases`.

    Phases do not overlap in the percentiles; together they are the time inside `step` and `commit`.
    """

    PHASES: ClassVar[list[str]]
    @property
    def num_steps(self) -> int:
        """Steps recorded."""
    def percentile_ns(self, percentile: float, phase: str | None = None) -> int:
        """Nanoseconds a step at a percentile (0 to 100), to three digits.

        Args:
            percentile: which one; 100 is the maximum.
            phase: one of `PHASES`; None is the whole step.

        Raises:
            InvalidArgumentError: for a percentile or phase that does not exist.
        """
    @property
    def span_step_ids(self) -> NDArray[np.uint64]:
        """[N] u64: the step of each recorded span."""
    @property
    def span_phases(self) -> NDArray[np.uint8]:
        """[N] u8: its phase, a position in `PHASES`; a phase may have several spans in a step."""
    @property
    def span_starts_ns(self) -> NDArray[np.uint64]:
        """[N] u64: nanoseconds from the begin of the recording to its start."""
    @property
    def span_durations_ns(self) -> NDArray[np.uint64]:
        """[N] u64: nanoseconds that it took."""
    @property
    def dropped_spans(self) -> int:
        """Spans for which there was no room."""

@final
class GroupBatch:
    """The arrays of a batch that each layer group has of its own: views as those of `Batch`."""

    @property
    def span(self) -> Literal["full", "sliding", "chunked"]:
        """What its layers see."""
    @property
    def window(self) -> int | None:
        """Tokens that a query sees at most, its own included; None if it sees all."""
    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """[T] where each new K and V goes; -1 for padding."""
    @property
    def table_rows(self) -> NDArray[np.int32]:
        """[S] rows in `block_tables`, the same in every group."""
    @property
    def table_changes(self) -> NDArray[np.int32]:
        """[n, 3] entries of `block_tables` that changed since the last batch: (row, column, block id)."""
    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[rows, max_blocks] the group's arena; -1 past the end of a row and before its window."""

@final
class Batch:
    """One planned step: S sequences (padding included), T tokens, R logit rows.

    The arrays are read-only NumPy views, without a copy, of memory that is not reused while the batch or any
    view of it is alive.
    """

    @property
    def step_id(self) -> int:
        """The step; `commit` and `abandon` name it."""
    @property
    def num_sequences(self) -> int:
        """S."""
    @property
    def num_tokens(self) -> int:
        """T."""
    @property
    def sequence_ids(self) -> NDArray[np.uint64]:
        """[S] decodes first, then prefill chunks, then padding (2**64 - 1)."""
    @property
    def query_start(self) -> NDArray[np.int32]:
        """[S+1] token ranges of the sequences."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T] the tokens to compute."""
    @property
    def positions(self) -> NDArray[np.int32]:
        """[T] their positions in their sequences."""
    @property
    def token_source(self) -> NDArray[np.int32]:
        """[T] where a token id is -1: its index in the previous step's samples; else -1."""
    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """[R] rows of the T whose logits are needed, one for each sequence that samples."""
    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """[T] where each new K and V goes; -1 for padding."""
    @property
    def context_lens(self) -> NDArray[np.int32]:
        """[S] tokens visible to the last query, this step's included; 0 for padding."""
    @property
    def table_rows(self) -> NDArray[np.int32]:
        """[S] rows in `block_tables`."""
    @property
    def table_changes(self) -> NDArray[np.int32]:
        """[n, 3] entries of `block_tables` that changed since the last batch: (row, column, block id)."""
    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[rows, max_blocks] the arena of all tables; -1 past the end of a row."""
    @property
    def groups(self) -> list[GroupBatch]:
        """What each layer group has of its own; the first one has the arrays of the batch itself."""
    @property
    def block_copies(self) -> NDArray[np.int32]:
        """[C, 2] (from, to) block ids, to be copied before the forward pass."""
    @property
    def swap_out(self) -> NDArray[np.int32]:
        """[n, 2] (device, host) block ids, to be copied before anything else of the batch."""
    @property
    def swap_in(self) -> NDArray[np.int32]:
        """[n, 2] (host, device) block ids, to be copied after `block_zeros` and before `block_copies`."""
    @property
    def block_zeros(self) -> NDArray[np.int32]:
        """[Z] block ids to be zeroed before their first write."""
    @property
    def finished(self) -> list[FinishedRequest]:
        """Requests that ended outside a commit since the last batch (aborted ones)."""

@final
class Scheduler:
    """The scheduler of one engine.

    `submit`, `abort`, `pause`, `resume`, `drain` and `stats` may be called from any thread. One engine thread
    calls `step`, runs the model on the batch, and ends it by `commit` or `abandon`; two threads in these at
    once is a `WrongStateError`.

    Args:
        pool: where blocks come from. A pool has one scheduler at a time.
        index: for prefix reuse; None for none.
        block_size: token positions in a block; the index's, if there is one.
        max_batch_tokens: tokens in a step, at least `max_running`.
        max_running: sequences that run at once.
        max_model_tokens: longest sequence, prompt and output together. Tables have columns for it, but no
            more than the pool has blocks.
        layer_groups: what the layers of each group see, as `KvGeometry.layer_groups` begins:
            `("full", None)`, `("sliding", tokens)`, `("chunked", tokens)`, a query's own token counted. None
            for one full group. All groups take blocks of one pool; a block out of its group's window is let
            go while the sequence runs. Forks, samples and beams share the blocks of all groups; what they
            need counts full blocks that they share once in a first group that is full, and for each branch in
            the others. If the first group is not full, the index is the scheduler's alone: `match_prefix`,
            `insert_prefix` and their like raise WrongStateError.
        max_waiting: requests that may wait at once, of all tenants.
        max_waiting_tokens: prompt tokens that may wait at once, of all tenants; None for no bound.
        ageing_steps: steps of waiting that make up for one class of priority; 0 if priorities do not matter.
        max_open_steps: steps that may be planned before the oldest of them is committed, not more than the
            pool's; with more than 1, tokens that are not sampled yet are -1 in `Batch.token_ids`. Steps run
            in their order.
        max_prefill_chunk: longest prefill chunk of one sequence in a step; None for the whole budget.
        policy: what must be promised before a request runs. `reserve`: prompt and maximum output, so it is
            never preempted; `watermark` and `forecast` overcommit, and take blocks back when they were wrong.
        urgent_preempts: whether a waiting request may preempt running ones of its tenant that were submitted
            with a lower class and do not come before it by now; not with the policy `reserve`.
        max_bypass: requests that may pass the head of their tenant's queue while it does not fit. After that,
            what becomes free is kept for it.
        max_bypass_steps: steps for which a head may be passed.
        max_bypass_seconds: seconds for which a head may be passed; whichever limit comes first counts.
        zero_blocks: when a block is listed in `Batch.block_zeros` before its first write.
        overflow: what happens when running sequences have outgrown the pool (not under `reserve`). `swap`:
            tails of the youngest go to the host tier; `recompute`: they give everything back and are computed
            again, also when the host tier is full; `auto`: whatever costs less time by the speeds below;
            `refuse`: they end with reason `capacity`.
        host_blocks: blocks of the host tier, 0 for none. The caller owns that memory and does
            `Batch.swap_out` and `Batch.swap_in` on it.
        kv_bytes_per_block: bytes of one block over all layers.
        link_bytes_per_second: speed of a copy between device and host.
        prefill_tokens_per_second: speed of computing again.
        max_token_gap: seconds after which a swapped sequence comes back at the cost of another; within a
            budget, so it is a goal and not a bound.

    Raises:
        InvalidArgumentError: with every limit that is out of range.
        OutOfMemoryError: tables that there is no room for, with the bytes.
        WrongStateError: the pool has another scheduler, or is of a parent process.
    """

    def __new__(
        cls,
        pool: BlockPool,
        index: PrefixIndex | None = None,
        *,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        max_model_tokens: int = 8192,
        layer_groups: Iterable[tuple[str, int | None]] | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int | None = None,
        ageing_steps: int = 1024,
        max_open_steps: int = 1,
        max_prefill_chunk: int | None = None,
        policy: Literal["reserve", "watermark", "forecast"] = "reserve",
        urgent_preempts: bool = False,
        max_bypass: int = 64,
        max_bypass_steps: int = 4096,
        max_bypass_seconds: float = 300.0,
        zero_blocks: Literal["never", "on_tenant_change", "always"] = "on_tenant_change",
        overflow: Literal["auto", "recompute", "swap", "refuse"] = "auto",
        host_blocks: int = 0,
        kv_bytes_per_block: int = 2_097_152,
        link_bytes_per_second: float = 25e9,
        prefill_tokens_per_second: float = 25e3,
        max_token_gap: float = 1.4,
    ) -> Self: ...
    def add_tenant(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        limit: int | None = None,
        weight: float = 1.0,
        fingerprint: Fingerprint | None = None,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        isolation: Literal["open", "scoped", "strict"] = "scoped",
        scope: Literal["private", "group", "public"] = "private",
        group: Tenant | None = None,
        public: Tenant | None = None,
        max_running: int | None = None,
        max_batch_tokens: int | None = None,
        max_kept_blocks: int | None = None,
    ) -> Tenant:
        """Adds a tenant with its quota in blocks and a namespace in the index.

        Prefixes are looked up in the public scope, then in the group's, then in the tenant's own, and
        inserted in its own. A shared scope is a tenant of its own, the operator's handle, and is charged for
        its blocks:

            system = scheduler.add_tenant("system", scope="public", limit=64)
            alice = scheduler.add_tenant("alice", public=system)
            scheduler.submit(system, system_prompt, max_tokens=1)  # publishes it

        What is submitted with a public handle stays pinned until `unpublish`; what is submitted with a
        group's is shared by its members.

        A `strict` tenant gets a share of every bound of the scheduler, which others do not have any more:
        running places and table rows, tokens of a step, waiting places, blocks here and on the host, and ids
        of its own. What it sees is then a function of its own requests and quota.

        Args:
            name: unique in the scheduler.
            guaranteed: blocks that it gets whatever others do.
            limit: most blocks that it may have committed; None for the pool's (`strict`: guaranteed).
            weight: share of service among tenants that wait, above 0.
            fingerprint: what must be equal for its KV to be reusable; equal in all of its scopes.
            isolation: what it may observe of others. `strict` also keeps its cached blocks within its limit.
            scope: who may see what its requests leave in the index.
            group: a tenant of group scope whose prefixes it may use; not under `strict`.
            public: a tenant of public scope whose prefixes it may use.
            max_waiting: requests of it that may wait at once; None for no bound of its own (`strict`: for the
                part of the scheduler's bound that its blocks are of the pool).
            max_waiting_tokens: prompt tokens of it that may wait at once; None as for `max_waiting`.
            max_running: `strict` only: sequences of it that run at once; None for the same part.
            max_batch_tokens: `strict` only: tokens of it in a step; None for the same part.
            max_kept_blocks: most blocks of it that are kept after their requests' ends, by sessions and
                retentions together, each counted once; None for its limit, 0 for none.

        Raises:
            InvalidArgumentError: for a taken name, a bad weight, a quota that the pool cannot give, scopes
                and levels that do not go together, or shares that add up to more than a bound.
            WrongStateError: others have more running places than a `strict` tenant leaves to them.
        """
    def submit(
        self,
        tenant: Tenant,
        prompt_ids: NDArray[np.integer] | Sequence[int],
        *,
        max_tokens: int = 64,
        min_tokens: int = 0,
        stop_token_ids: NDArray[np.integer] | Sequence[int] | None = None,
        priority: int = 0,
        reuse: bool = True,
        partial: bool = False,
        deadline_steps: int | None = None,
        deadline_seconds: float | None = None,
        salt: bytes | None = None,
        items: Sequence[tuple[int, bytes]] | None = None,
        n: int = 1,
        session: Session | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Accepts a request and returns its id; it runs in a later step. From any thread.

        Args:
            tenant: who owns it and is charged for it.
            prompt_ids: [n] token ids, any integer dtype, each at least 0 and below 2**31.
            max_tokens: most tokens to sample.
            min_tokens: tokens to sample before a stop id ends it.
            stop_token_ids: ids that end it; the id itself is part of the output.
            priority: lower runs first, inside the tenant; `ageing_steps` of waiting make up for one class.
                In `Retention` and `open_session` it is the higher that stays longer.
            reuse: whether it looks prefixes up and leaves its own blocks in the index.
            partial: whether it also reuses the leading tokens of a block that goes on differently. The block
                is in `Batch.block_copies` of its first step.
            deadline_steps: steps after its arrival in which it may run; then it ends, reason `deadline`.
            deadline_seconds: the same in seconds, on the clock of `step`.
            n: sequences that go on from the prompt, with the ids from the returned one on. The prompt is
                computed once; the step that ends it lists its last row n times in `sample_rows`, and `commit`
                brings n tokens for it. What all need is promised at admission, or nothing. Each of the n ids
                is reported as finished, however and whenever the request ends.
            session: the session that it is a turn of: with one sequence, and with reuse.
            retention: what of it stays held after its end, however it ends, of each of its `n` samples and of
                its forks; None for nothing. Needs an index and reuse; not for a turn of a session, and not
                for a tenant of public scope, whose prefixes stay anyway.
            salt: 1 to 256 bytes of the client that narrow reuse to this tenant's requests with the same ones
                (and to public prefixes). It can never widen it.
            items: (offset, digest) of each image, embedding or the like inside the prompt, in order of
                offset: its first token's position, and 1 to 64 bytes that say what it is. Blocks from an item
                on are reused only by prompts with the same item at the same place.

        Raises:
            InvalidArgumentError: for values out of range or an empty prompt.
            RefusedError: if it can never fit, too many wait (`retryable`, with `retry_after_steps`), or the
                scheduler is being drained.
        """
    def unpublish(self, tenant: Tenant) -> int:
        """Withdraws all that was published with a public handle; returns how many prefixes there were.

        Nobody finds them from now on; requests that use them go on undisturbed.

        Raises:
            InvalidArgumentError: the tenant is not of public scope or is of another scheduler.
        """
    def abort(self, request_id: int) -> bool:
        """Ends a request wherever it is, with all its samples; False if it had ended. From any thread.

        The next `step` or `commit` reports each of its ids. The id of a sample other than the first ends that
        one alone; before the request has its samples, it is reported when it gets them, or ends.

        Raises:
            InvalidArgumentError: for an id that was never issued.
        """
    def pause(self, request_id: int) -> bool:
        """Stops a request and its branches from the next `step` on; False if it had ended. From any thread.

        It keeps its place in time, and its blocks until a request that is not paused needs them; what it has
        computed is computed again then, when it resumes. Its deadline goes on.

        Raises:
            InvalidArgumentError: for an id that was never issued.
        """
    def resume(self, request_id: int) -> bool:
        """Goes on with a paused request and its branches from the next `step` on; False if it had ended.

        From any thread.

        Raises:
            InvalidArgumentError: for an id that was never issued.
        """
    def fork(self, request_id: int, count: int = 1) -> list[int]:
        """Makes new requests that go on from where a running one is, with all its tokens; returns their ids.

        They share its blocks, full or not, until one writes a shared block, which `Batch.block_copies` copies
        first; they have its limits, count its output as theirs, and end by themselves. With it, and with its
        request's samples, they are a branch set: they run, are preempted and are paused together. Between two
        steps.

        Args:
            request_id: a request that has blocks and is in no open step.
            count: how many.

        Raises:
            InvalidArgumentError: for an id that was never issued, or a count of 0.
            WrongStateError: if it does not run or is in an open step.
            RefusedError: if there are too few running places, the scheduler is being drained, or (not
                `retryable`) the set may come to need more blocks than its tenant can ever have.
            OutOfBlocksError: if what the policy promises to them is not there (or OverQuotaError).
        """
    def reorder(
        self,
        sequence_ids: NDArray[np.integer] | Sequence[int],
        parents: NDArray[np.integer] | Sequence[int],
        tokens: NDArray[np.integer] | Sequence[int],
    ) -> None:
        """Lets beams go on from each other, all in one call between two steps.

        Sequence `sequence_ids[i]` takes over what `parents[i]` has computed and goes on with `tokens[i]`,
        which replaces the token that `commit` brought last. Blocks are shared, nothing is computed again.

        Args:
            sequence_ids: [k] running branches of one set and length, each named once.
            parents: [k] likewise, each as often as it is wanted.
            tokens: [k] token ids.

        Raises:
            InvalidArgumentError: for arrays that do not fit together, sequences that are not branches of one
                set, or that differ in length.
            WrongStateError: if a step is open, or one of them does not run, has no token yet or is being
                computed again. After a step that sampled one branch, all are ready. Nothing has changed then.
        """
    def propose(
        self,
        sequence_ids: NDArray[np.integer] | Sequence[int],
        draft_start: NDArray[np.integer] | Sequence[int],
        tokens: NDArray[np.integer] | Sequence[int],
    ) -> int:
        """Proposes drafts to be verified in the next step; returns how many will be tried.

        A row with k drafts has 1 + k tokens and samples after each. `commit` brings the drafts that were
        right and one token more; the others are rolled back, and were never cached. Drafts are ignored if
        their sequence has ended, is aborted or paused by the next step, has more than one token to compute
        or is in an open step, and where they would reach beyond `max_tokens`.

        Args:
            sequence_ids: [n] whose.
            draft_start: [n + 1] `tokens[draft_start[i]:draft_start[i + 1]]` are guessed to follow the last
                known token of `sequence_ids[i]`; at most 64 each.
            tokens: [m] draft token ids.

        Raises:
            InvalidArgumentError: for arrays that do not fit together, or an id that was never issued or is
                there twice.
        """
    def draft_counts(self) -> tuple[list[int], list[int]]:
        """Drafts (verified, accepted) so far, by their place after the last known token."""
    def open_session(
        self,
        tenant: Tenant,
        *,
        idle_steps: int | None = None,
        idle_seconds: float | None = None,
        priority: int = 0,
    ) -> Session:
        """Opens a session: turns (`submit(session=...)`) leave their full blocks in place for the next one.

        They are kept between turns, and charged to the tenant, until a limit has passed without a turn,
        the tenant's `max_kept_blocks` is exceeded, or a request needs room: then the lowest priority lets go
        first, and of those the session that has been idle longest, before a running request is preempted or
        one is refused for memory. What it lets go is cached. From any thread.

        Args:
            tenant: whose it is, of private scope.
            idle_steps: steps without a turn after which its blocks become cached; None for no limit.
            idle_seconds: the same in seconds, on the clock of `step`.
            priority: higher stays longer, see `Retention`. In `submit` it is the lower that runs first.

        Raises:
            InvalidArgumentError: a limit of 0, a tenant of another scheduler or of a shared scope, or a
                scheduler without an index.
            RefusedError: the scheduler is being drained.
        """
    def close_session(self, session: Session) -> bool:
        """Closes a session; its blocks become cached in the next step. False if it was closed before.

        From any thread.
        """
    def service(self, tenant: Tenant) -> float:
        """Tokens computed for a tenant, and blocks x steps that it held, over its weight.

        A tenant that was idle re-enters at the least service of those that are not.

        Raises:
            InvalidArgumentError: a tenant of another scheduler.
            WrongStateError: another thread is in the scheduler.
        """
    def drain(self, *, deadline_steps: int | None = None, deadline_seconds: float | None = None) -> None:
        """Accepts nothing any more, and lets go of what sessions keep. From any thread.

        What was accepted goes on, and ends with reason `drained` when the deadline passes. A second call
        replaces the deadline. Everything has ended when `has_work()` is False and nothing is paused.

        Raises:
            InvalidArgumentError: for 0 steps, or seconds that are not above 0.
        """
    def reset_cache(self, *, requeue_running: bool = False) -> tuple[int, int]:
        """Empties the cache of what is not held.

        Args:
            requeue_running: running and paused requests give their blocks back first and go to their places
                in the queue, so that nothing is left.

        Returns:
            (blocks evicted, requests that went back to the queue).

        Raises:
            WrongStateError: while a step is open, or a request has blocks and is not to be requeued. Nothing
                has changed then.
        """
    def step(self, *, pad_to: int = 0, now: float | None = None) -> Batch:
        """Plans a step.

        Args:
            pad_to: rows at least; padding rows have one token with slot -1 and context length 0.
            now: the caller's clock, in seconds from any start, for everything that has a time limit; None for
                the seconds since the scheduler was made. Time that goes back stands still.

        Raises:
            InvalidArgumentError: if `now` is not finite, or `pad_to` above both `max_batch_tokens` and
                `max_running`.
            WrongStateError: while `max_open_steps` are open or another thread is in the scheduler.
        """
    def commit(
        self,
        step_id: int,
        token_start: NDArray[np.integer] | Sequence[int],
        tokens: NDArray[np.integer] | Sequence[int],
    ) -> CommitOutcome:
        """Ends a step with its tokens.

        Args:
            step_id: the batch's.
            token_start: [S+1] `tokens[token_start[i]:token_start[i + 1]]` are row i's: one for each row that
                samples, none for others; for a row with k drafts the right ones and one more, 1 to k + 1.
            tokens: [n] sampled token ids.

        Raises:
            InvalidArgumentError: for tokens that do not fit the batch.
            WrongStateError: if the step is not the oldest open one or another thread is in the scheduler.
        """
    def abandon(self, step_id: int, reason: str, *, fail: bool = False) -> CommitOutcome:
        """Ends a step that failed, and the open ones after it.

        Their sequences go back to their last committed length, or end with `fail`. By this call the caller
        says that the device no longer runs the steps.

        Raises:
            WrongStateError: if the step is not open or another thread is in the scheduler.
        """
    def has_work(self) -> bool:
        """Whether a step would do anything: something waits or runs and is not paused, or has ended."""
    def begin_phases(self, *, max_spans: int = 0) -> None:
        """Records from now on how long each phase of a step takes; an earlier recording is forgotten.

        Args:
            max_spans: phases that are also kept one by one, with their start; the first ones.

        Raises:
            InvalidArgumentError: if memory does not hold as many.
            WrongStateError: if another thread is in the scheduler.
        """
    def end_phases(self) -> PhaseTimes | None:
        """Ends the recording; None if there was none.

        Raises:
            WrongStateError: if another thread is in the scheduler.
        """
    def snapshot(self) -> SchedulerSnapshot:
        """Counts of scheduler, pool and tenants at one moment between two turns of the engine's thread.

        From any thread; waits for a turn to end, and nobody waits for it.
        """
    def stats(self) -> SchedulerStats:
        """Counts. From any thread."""
    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
    @property
    def block_size(self) -> int:
        """Token positions in a block."""

# --- attention ----------------------------------------------------------------------------------------------

_Named = tuple[npt.NDArray[Any], str]
_Pair = tuple[_Named, _Named]
_Scale = list[float] | _Named | None

def _append_kv(pairs: Sequence[tuple[_Named, _Named, _Scale]], slots: npt.NDArray[np.int64]) -> None: ...
def _paged_attention(call: object, own_workspace: npt.NDArray[Any] | None) -> None: ...
def _workspace_bytes(call: object) -> int: ...
def _check_batch(
    query_start: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    table_rows: npt.NDArray[np.int32] | None,
    block_tables: npt.NDArray[np.int32] | None,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    window: int | None,
) -> None: ...
def _check_block_moves(
    name: str,
    from_ids: npt.NDArray[np.int32],
    to_ids: npt.NDArray[np.int32],
    num_from: int,
    num_to: int,
    in_place: bool,
) -> None: ...
def _merge_states(a: _Pair, b: _Pair, to: _Pair) -> None: ...
def _copy_blocks(arrays: Sequence[tuple[str, _Named]], pairs: npt.NDArray[np.int32]) -> None: ...
def _zero_blocks(cache: _Named, block_ids: npt.NDArray[np.int32]) -> None: ...
def _gather_blocks(cache: _Named, block_ids: npt.NDArray[np.int32], out: _Named) -> None: ...
def _scatter_blocks(cache: _Named, block_ids: npt.NDArray[np.int32], values: _Named) -> None: ...
def _prefix_groups(
    block_tables: npt.NDArray[np.int32],
    table_rows: npt.NDArray[np.int32] | None,
    query_start: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    block_size: int,
    min_tokens: int,
) -> tuple[list[int], list[int], list[int]]: ...
def _set_num_threads(num_threads: int) -> None: ...
def _get_num_threads() -> int: ...
def _instruction_sets() -> list[str]: ...

# --- split plan of the CUDA kernels -------------------------------------------------------------------------

def _split_plan(
    query_start: object,
    context_lens: object,
    kv_starts: object,
    work: object,
    merges: object,
    *,
    group: int,
    tile_rows: int,
    num_kv_heads: int,
    window: int,
    causal: bool,
    rows_above: int,
    rows_up_to: int,
    target_blocks: int,
    min_chunk: int,
) -> tuple[int, int, int]:
    """Writes work items (8 words each) and merge items (4 words each); returns how many, and the partials."""

# --- replay -------------------------------------------------------------------------------------------------

@final
class Replay:
    """One run of a workload through scheduler, index and pool, in virtual time."""

    def __new__(
        cls, settings: RunSettings, *, policy: str, eviction: str, hash_block: int, tenants: Sequence[str]
    ) -> Replay:
        """A run that has no requests yet.

        Raises:
            InvalidArgumentError: with every setting that is out of range.
        """
    def push(self, columns: object) -> None:
        """Takes a `kvpager.replay.Columns` of requests, in order of arrival."""
    def close(self) -> None:
        """Says that no more requests will come."""
    def advance(self, max_steps: int) -> str:
        """Does at most so many steps without the interpreter: `running`, `needs_input` or `done`."""
    @property
    def num_ended(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def now(self) -> float:
        """Virtual seconds so far."""
    def report_json(self) -> str:
        """The run as the text of one JSON object, also before its end."""
    def check_invariants(self) -> None:
        """Checks the pool and the index; raises what is wrong."""

@final
class SequentialReplay:
    """Index and pool alone: one request at a time, look up, then insert its full prompt blocks."""

    def __new__(
        cls, num_blocks: int, block_size: int, *, eviction: str, hash_block: int, tenants: Sequence[str]
    ) -> SequentialReplay: ...
    def push(self, columns: object) -> None:
        """Runs a `kvpager.replay.Columns` of requests."""
    def counts(self) -> list[tuple[str, int]]:
        """`requests`, `too_long`, `lookup_blocks`, `hit_blocks`, `prompt_tokens`, `peak_held`."""

@final
class Oracle:
    """The clairvoyant schedule of a workload: first come, first served, with every output length known."""

    def __new__(cls, settings: RunSettings) -> Oracle:
        """A schedule that has no requests yet.

        Raises:
            InvalidArgumentError: with every setting that is out of range.
        """
    def push(self, columns: object) -> None:
        """Takes a `kvpager.replay.Columns` of requests, in order of arrival."""
    def close(self) -> None:
        """Says that no more requests will come."""
    def advance(self, max_steps: int) -> str:
        """Does at most so many steps without the interpreter: `running`, `needs_input` or `done`."""
    def outcome(self) -> tuple[float, int, int, int, float, int]:
        """`(time, steps, finished, refused, mean_batch, peak_blocks)` so far."""

def num_allocations() -> int:
    """Allocations and reallocations that the extension made on the calling thread so far."""

# --- stress -------------------------------------------------------------------------------------------------

@final
class Stress:
    """A run of threads that work on pools at once, in rounds; see `kvpager stress`."""

    def __new__(
        cls,
        *,
        threads: int,
        blocks: int,
        tenants: int,
        mix: str,
        seed: int,
        fault: str | None = None,
        shrink_seconds: float = 10.0,
    ) -> Stress:
        """A run that has not begun.

        Raises:
            InvalidArgumentError: for a number out of range, or a mix or fault that is none.
        """
    def advance(self, seconds: float) -> None:
        """Runs a round without the interpreter, for at most so many seconds, unless something is wrong.

        What is wrong is run again until its history is small, which takes some more seconds.
        """
    @property
    def is_sound(self) -> bool: ...
    @property
    def num_operations(self) -> int: ...
    @property
    def num_rounds(self) -> int: ...
    def report_json(self) -> str:
        """What was found so far, as the text of one JSON object."""
    @staticmethod
    def fault_names() -> list[str]:
        """Faults that can be planted."""

@final
class StressLatencies:
    """Latencies by family of operations, in nanoseconds to two figures."""

    def __new__(cls) -> StressLatencies: ...
    def record(self, family: str, nanoseconds: int) -> None:
        """Records one latency."""
    def report_json(self) -> tuple[str, str]:
        """Count, percentiles and maximum over all, and by family: the texts of two JSON objects."""
