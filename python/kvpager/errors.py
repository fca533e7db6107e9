"""The exceptions of kvpager: one base, one subclass for each way a caller can react.

A call that raises one of these changed nothing. The texts carry the numbers; the classes that a program
reacts to carry them as attributes too.
"""

from __future__ import annotations

__all__ = [
    "GenerationError",
    "InvalidArgumentError",
    "InvalidHandleError",
    "KvPagerError",
    "MissingDependencyError",
    "NeedsReclaimError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "OverQuotaError",
    "RefusedError",
    "WrongStateError",
]


def describe(error: BaseException) -> str:
    """Names an exception's class and text so that any text can be encoded, whatever its `__str__` does."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text cannot be had: str() raises {type(broken).__name__})"
    return f"{type(error).__name__}: {text}".encode("utf-8", "backslashreplace").decode()


class KvPagerError(Exception):
    """Base of everything that kvpager raises on purpose."""


class OutOfBlocksError(KvPagerError):
    """The pool's capacity is in use or promised: wait, or ask for less.

    Attributes:
        needed: blocks asked for.
        available: blocks that were neither held, reserved nor quarantined.
        capacity: blocks of the pool.
    """

    def __init__(self, text: str, needed: int = 0, available: int = 0, capacity: int = 0) -> None:
        super().__init__(text)
        self.needed = needed
        self.available = available
        self.capacity = capacity


class OverQuotaError(KvPagerError):
    """The account's own limit is reached: wait, or ask for less.

    Attributes:
        account: the account's number.
        needed: blocks asked for.
        available: what is left under the limit.
        limit: the account's limit in blocks.
    """

    def __init__(
        self, text: str, account: int = 0, needed: int = 0, available: int = 0, limit: int = 0
    ) -> None:
        super().__init__(text)
        self.account = account
        self.needed = needed
        self.available = available
        self.limit = limit


class NeedsReclaimError(KvPagerError):
    """The capacity is there, but cached blocks must be evicted first.

    Attributes:
        needed: free blocks needed.
        free: blocks in no use at all.
        cached: blocks that eviction could free.
    """

    def __init__(self, text: str, needed: int = 0, free: int = 0, cached: int = 0) -> None:
        super().__init__(text)
        self.needed = needed
        self.free = free
        self.cached = cached


class OutOfMemoryError(KvPagerError, MemoryError):
    """What was to be made does not fit in the memory of the machine or of the process: ask for less.

    Attributes:
        num_bytes: bytes of all that it allocates.
    """

    def __init__(self, text: str, num_bytes: int = 0) -> None:
        super().__init__(text)
        self.num_bytes = num_bytes


class InvalidHandleError(KvPagerError, ValueError):
    """A handle that does not name a block its caller holds: released twice, stale or foreign. A bug."""


class InvalidArgumentError(KvPagerError, ValueError):
    """A value outside its range, a wrong shape or dtype, or input that cannot be read.

    Attributes:
        param: the argument that is wrong, where it is one.
    """

    def __init__(self, text: str = "", param: str | None = None) -> None:
        super().__init__(text)
        self.param = param

    def add_note(self, note: str, /) -> None:
        """Adds a note. The one by which the bindings name an argument becomes the beginning of the text."""
        name = note.removeprefix("while processing '")
        if name != note:
            self.param = name.removesuffix("'")
            self.args = (f"{self.param} {self}",)
        else:
            super().add_note(note)


class RefusedError(KvPagerError):
    """A request was not accepted.

    Attributes:
        retryable: whether the same request may be accepted later.
        retry_after_steps: if so, an estimate of when, in steps, from the asking tenant's own state.
    """

    def __init__(self, text: str, retryable: bool = False, retry_after_steps: int | None = None) -> None:
        super().__init__(text)
        self.retryable = retryable
        self.retry_after_steps = retry_after_steps


class GenerationError(KvPagerError):
    """A request that was accepted failed: the model failed, its quota was lowered, or its engine ended.

    Attributes:
        reason: `error`, `capacity`, `deadline`, `drained` or `aborted`.
        detail: why, without the request's number, which counts everybody's requests.
    """

    def __init__(self, text: str, reason: str = "error", detail: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.detail = text if detail is None else detail


class WrongStateError(KvPagerError, RuntimeError):
    """The call is not allowed now: another thread is in it, a step is open, or the object has ended."""


class MissingDependencyError(KvPagerError, ImportError):
    """An optional package is needed for this call; the text has the install command."""
