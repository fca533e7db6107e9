"""Who may ask: API keys, and the tenant, quota and limits that belong to each.

A tenant comes from the key alone, never from a field of the request. Keys are stored as digests, and a
presented key is compared with every stored one in constant time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from kvpager._core import Retention
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.engine import Engine, GenerationParams
    from kvpager.server.settings import ChatTokenizer

__all__ = [
    "ANONYMOUS",
    "RetentionSpec",
    "SharedScope",
    "TenantSpec",
    "TenantTable",
    "hash_key",
    "new_key",
    "read_tenants",
]

ANONYMOUS = "anonymous"
_PREFIX = "sha256:"

_KeyHash = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
_Blocks = Annotated[int, msgspec.Meta(ge=0)]


class RetentionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of every request of a tenant stays held after its end; see `Retention`.

    Attributes:
        seconds: how long; None until somebody needs the room.
        num_tokens: leading tokens that are kept at least; None for all.
        priority: higher stays longer, inside the tenant.
    """

    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator says of a tenant.

    Attributes:
        key_hashes: digests of its API keys, as `hash_key` gives them.
        guaranteed: blocks that it gets whatever others do.
        limit: most blocks that it may have; None for the pool's.
        weight: share of service among tenants that wait.
        max_requests: samples in flight, waiting ones included; further requests get 429.
        max_waiting: samples that may wait at once; further requests get 429.
        max_waiting_tokens: prompt tokens that may wait at once; further requests get 429.
        max_running: `strict` only: samples of it that run at once; None for its part of the server's.
        max_batch_tokens: `strict` only: tokens of it in a step; None for its part of the server's.
        max_kept_blocks: most blocks of it that are kept after a request's end; None for its limit.
        retention: what is kept of each of its requests; None for nothing. No client can ask for it.
        isolation: what it may observe of others, see `Scheduler.add_tenant`.
        group: name of a `[groups.NAME]` table whose system prompts it may use; its own prefixes stay private.
        public: name of a `[publics.NAME]` table whose system prompts it may use.
    """

    key_hashes: tuple[_KeyHash, ...] = ()
    guaranteed: _Blocks = 0
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_waiting_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_running: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_batch_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_kept_blocks: _Blocks | None = None
    retention: RetentionSpec | None = None
    isolation: Literal["open", "scoped", "strict"] = "scoped"
    group: str | None = None
    public: str | None = None

    def quota(self) -> dict[str, Any]:
        """What `Engine.add_tenant` takes."""
        apart = ("key_hashes", "max_requests", "retention")
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in apart}

    def retained(self, params: GenerationParams) -> GenerationParams:
        """The settings of a request with what the operator says of its retention."""
        if self.retention is None:
            return params
        return dataclasses.replace(params, retention=Retention(**msgspec.structs.asdict(self.retention)))


class SharedScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scope that tenants share, charged for its own blocks.

    Attributes:
        guaranteed: blocks that it gets whatever others do.
        limit: most blocks that it may have; None for the pool's.
        system_prompts: computed at the start. A public scope keeps them, a group's may be evicted.
    """

    guaranteed: _Blocks = 0
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system_prompts: tuple[str, ...] = ()


class _Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_hashes: tuple[_KeyHash, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, TenantSpec] = {}
    anonymous: TenantSpec | None = None
    groups: dict[str, SharedScope] = {}
    publics: dict[str, SharedScope] = {}
    operator: _Operator = _Operator()


@dataclass(frozen=True)
class TenantTable:
    """Tenants and the keys that name them.

    Attributes:
        tenants: by name; with the anonymous one, if it may ask.
        operator_hashes: digests of the operator's keys.
        is_open: whether any key, and none, is the anonymous tenant: a server without a tenants file.
        groups, publics: scopes that tenants share.
    """

    tenants: dict[str, TenantSpec]
    operator_hashes: tuple[str, ...] = ()
    is_open: bool = False
    groups: Mapping[str, SharedScope] = field(default_factory=dict)
    publics: Mapping[str, SharedScope] = field(default_factory=dict)

    def add_to(self, engine: Engine) -> None:
        """Adds the scopes and the tenants to an engine.

        Raises:
            InvalidArgumentError: the pool cannot give the quotas, or scopes and levels do not go together.
        """
        for scope, shared in (("group", self.groups), ("public", self.publics)):
            for name, spec in shared.items():
                with _naming(scope, name):
                    engine.add_tenant(name, guaranteed=spec.guaranteed, limit=spec.limit, scope=scope)  # type: ignore[arg-type]
        for name, tenant in self.tenants.items():
            with _naming("tenant", name):
                engine.add_tenant(name, **tenant.quota())

    def publish(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        """Submits the system prompts of the scopes; they can be found once they were computed.

        Raises:
            RefusedError: a prompt does not fit its scope's limit.
            InvalidArgumentError: the model's chat template takes no system prompt, or its chats do not begin
                alike.
        """
        from kvpager.engine import GenerationParams

        for name, spec in (*self.publics.items(), *self.groups.items()):
            for text in spec.system_prompts:
                engine.submit(_head_of_chats(tokenizer, text), GenerationParams(max_tokens=1), tenant=name)

    @classmethod
    def open(cls, *, operator_hashes: Sequence[str] = ()) -> TenantTable:
        """One tenant, and everybody is it."""
        return cls({ANONYMOUS: TenantSpec()}, tuple(operator_hashes), is_open=True)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant of an API key, or None. None is anonymous, if there is that tenant; "" is nobody's."""
        if self.is_open or (key is None and ANONYMOUS in self.tenants):
            return ANONYMOUS
        if not key:
            return None
        digest, found = hash_key(key), None
        for name, tenant in self.tenants.items():
            if _is_among(digest, tenant.key_hashes):
                found = name  # and go on: the time must not tell which one it was
        return found

    def is_operator(self, key: str | None) -> bool:
        """Whether a key is the operator's."""
        return key is not None and key != "" and _is_among(hash_key(key), self.operator_hashes)


def hash_key(key: str) -> str:
    """The digest of an API key as it stands in a tenants file: `sha256:` and 64 hexadecimal digits.

    A plain digest is enough for keys of `new_key`, which nobody can guess; do not use shorter ones.
    """
    return _PREFIX + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """A new API key of 256 random bits."""
    return "kvp-" + secrets.token_urlsafe(32)


def read_tenants(path: Path) -> TenantTable:
    """Reads a tenants file.

    Raises:
        InvalidArgumentError: it cannot be read, a field is unknown or wrong, a key belongs to two tenants.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is no TOML file: {error}") from error
    try:
        content = msgspec.convert(tables, _File)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"{path}: {_named(str(error), tables)}") from error
    tenants = dict(content.tenants)
    if ANONYMOUS in tenants:
        raise InvalidArgumentError(f"{path}: the anonymous tenant has the table [anonymous]")
    if content.anonymous is not None:
        if content.anonymous.key_hashes:
            raise InvalidArgumentError(f"{path}: [anonymous] has key_hashes: it is who brings no key")
        tenants[ANONYMOUS] = content.anonymous
    if not tenants:
        raise InvalidArgumentError(f"{path} names no tenant: nobody could ask")
    _check_keys(path, tenants, content.operator.key_hashes)
    _check_scopes(path, tenants, content)
    return TenantTable(tenants, content.operator.key_hashes, groups=content.groups, publics=content.publics)


def _named(text: str, tables: dict[str, Any]) -> str:
    """Says in an error of the file which tenant or scope it is of: msgspec leaves out the names."""
    for kind, spec in (("tenants", TenantSpec), ("groups", SharedScope), ("publics", SharedScope)):
        unnamed = f"`$.{kind}[...]"
        if unnamed not in text:
            continue
        for name, content in tables[kind].items():
            try:
                msgspec.convert(content, spec)
            except msgspec.ValidationError:
                return text.replace(unnamed, f"`$.{kind}[{name!r}]", 1)
    return text


def _check_scopes(path: Path, tenants: dict[str, TenantSpec], content: _File) -> None:
    tables = {"group": content.groups, "public": content.publics}
    for kind, shared in tables.items():
        for name in shared:
            if name in tenants or (kind == "public" and name in content.groups):
                raise InvalidArgumentError(
                    f"{path}: {name!r} names two things: tenants and scopes must differ"
                )
    for name, tenant in tenants.items():
        for kind, shared in tables.items():
            wanted = getattr(tenant, kind)
            if wanted is not None and wanted not in shared:
                raise InvalidArgumentError(
                    f"{path}: {name!r} names the {kind} {wanted!r}, which has no table"
                )


def _check_keys(path: Path, tenants: dict[str, TenantSpec], operator: Sequence[str]) -> None:
    owners = dict.fromkeys(operator, "the operator")
    for name, tenant in tenants.items():
        if not tenant.key_hashes and name != ANONYMOUS:
            raise InvalidArgumentError(f"{path}: tenant {name!r} has no key_hashes")
        for digest in tenant.key_hashes:
            if digest in owners:
                raise InvalidArgumentError(f"{path}: {name!r} and {owners[digest]} have the same key")
            owners[digest] = repr(name)


def _head_of_chats(tokenizer: ChatTokenizer, system_prompt: str) -> list[int]:
    """The tokens that every chat with a system prompt begins with, whatever its user says."""
    # The system prompt alone would end in a header of the assistant, and templates may put it into the user's
    # first message. Starts that tokenizers join to what is before them leave out what may be joined.
    chats = [
        tokenizer.encode_chat(
            [
                {"role": "system", "content": system_prompt},
                {"role": "user", "content": start},
            ]
        )
        for start in ("a", " 1", "\n\n", "\u00e9")
    ]
    shortest = min(map(len, chats))
    differs = (at for at in range(shortest) if len({chat[at] for chat in chats}) > 1)
    head = list(chats[0][: next(differs, shortest)])
    if not head:
        raise InvalidArgumentError(
            f"chats with the system prompt {system_prompt[:60]!r} do not begin alike: nothing can be shared"
        )
    return head


@contextlib.contextmanager
def _naming(kind: str, name: str) -> Generator[None, None, None]:
    """Says in an error whose quota is wrong."""
    try:
        yield
    except InvalidArgumentError as error:
        whose = f"{kind} {name!r}"
        text = str(error)
        raise InvalidArgumentError(text if text.startswith(whose) else f"{whose}: {text}") from error


def _is_among(digest: str, hashes: Sequence[str]) -> bool:
    """Compares with every hash, whichever is equal."""
    found = False
    for each in hashes:
        found |= hmac.compare_digest(digest, each)
    return found
