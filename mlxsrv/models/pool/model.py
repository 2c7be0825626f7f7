"""One model of the pool: what it is loaded from, and who wants it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import msgspec

from mlxsrv.engine.events import Loaded
from mlxsrv.engine.orders import Attach
from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.encoders import CrossEncoderConfig, read_cross_encoder_config
from mlxsrv.formats.model_folder import describe
from mlxsrv.formats.pooling import PoolingConfig, read_pooling_config
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.models.catalogue.catalogue import ModelEntry, ModelSource
from mlxsrv.models.pool.tokenizer_lock import TokenizerLock
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.models.pool.lease import Lease
    from mlxsrv.prompts.tokenizer import Tokenizer

_COMPILERS = 4


class ModelFiles(msgspec.Struct, frozen=True):
    """What a model is loaded from, and the bytes that it will take.

    `base` are the weights', which entries with the same folder share; `own` what nobody shares:
    an adapter, a draft model, the first block of a KV cache.
    """

    folder: Path
    adapter: Path | None
    draft: Path | None
    base: int
    own: int
    context_length: int | None
    capabilities: tuple[str, ...]
    pooling_config: PoolingConfig | str
    """How texts become vectors, or why they cannot."""
    cross_encoder_config: CrossEncoderConfig | str
    """How pairs of texts become scores, or why they cannot."""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """An SAE at one layer of a model; jobs name it by its number."""

    number: int
    model: str
    sae_id: str
    path: Path
    file: SAEFile
    layer: int
    before: bool
    bytes: int
    since: float
    """When it was attached; seconds since 1970."""
    ready: bool = False

    @property
    def command(self) -> Attach:
        return Attach(self.model, self.number, str(self.path), self.layer, self.before)


class Model:
    """One entry that is loaded, or wanted. The pool changes it; others read.

    `rows` lends as many tokens as the batch has rows: whoever holds one is decoded at once.
    `tokenizing` lends the tokenizer, which is not for concurrent use, to one thread at a time.
    `compiling` bounds the threads, each with a process of its own, that compile grammars.
    """

    def __init__(self, entry: ModelEntry, settings: Settings) -> None:
        self.entry = entry
        self.rows = anyio.CapacityLimiter(settings.max_concurrency)
        self.tokenizer_lock = TokenizerLock()
        self.compiling = anyio.CapacityLimiter(_COMPILERS)
        self.most = settings.max_concurrency + settings.max_queue
        self.in_flight = 0  # leases
        self.users = 0  # leases that have entered
        self.waiting: deque[Lease] = deque()  # those that wait to enter
        self.closing = False  # is to make room when its users have left
        self.used = 0.0  # when the last user entered
        self.left = 0.0  # when the last user left, or the load ended
        self.fetching = False  # its files, or some of them, are being downloaded
        self.files: ModelFiles | None = None
        self.tokenizer: Tokenizer | None = None  # may be there before the model is
        self.placed = False  # has room, and is loaded or being loaded
        self.loaded: Loaded | None = None
        self.preparing: asyncio.Task[Tokenizer] | None = None
        self.loading: asyncio.Task[None] | None = None
        self.turn: asyncio.Future[list[Model]] | None = None
        self.attachment: Attachment | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def wanted(self) -> bool:
        """Somebody waits to enter."""
        return any(lease.ticket is not None and not lease.ticket.done() for lease in self.waiting)

    @property
    def coming(self) -> bool:
        """Its files, its tokenizer or its weights are on their way; it does not wait for room."""
        return self.preparing is not None or (self.loading is not None and self.turn is None)

    @property
    def state(self) -> Literal["loaded", "loading", "waiting for room", "unused"]:
        if self.loaded is not None:
            return "loaded"
        if self.turn is not None:
            return "waiting for room"
        return "unused" if self.loading is None else "loading"

    @property
    def busy(self) -> bool:
        return self.users > 0 or (self.placed and self.loaded is None)


def is_here(source: ModelSource, draft: ModelSource | None) -> bool:
    """Whether `examine` will fetch nothing. Looks at the disk."""
    return source.folder() is not None and (draft is None or draft.folder() is not None)


def examine(
    source: ModelSource,
    draft: ModelSource | None,
    settings: Settings,
    name: str,
    check: Callable[[], None],
) -> ModelFiles:
    """Look at a model's files, fetching what is not here; `check` stops that by raising.

    Blocks; raises UnusableFile, ServeError.
    """
    trust = settings.trust_remote_code
    folder = source.fetch(check).resolve()
    described = describe(folder, name=name, trust_remote_code=trust)
    own = described.kv_block
    if source.adapter is not None:
        own += adapter_bytes(source.adapter)
    small = None
    if draft is not None:
        small = draft.fetch(check).resolve()
        own += describe(small, trust_remote_code=trust).weights
    return ModelFiles(
        folder,
        source.adapter,
        small,
        base=described.weights,
        own=own,
        context_length=capped(described.context_length, settings),
        capabilities=described.capabilities,
        pooling_config=_pooling_config(folder, described.capabilities, name),
        cross_encoder_config=_cross_encoder_config(folder),
    )


def _pooling_config(folder: Path, capabilities: Collection[str], name: str) -> PoolingConfig | str:
    try:
        return read_pooling_config(folder, decoder="completion" in capabilities, name=name)
    except ValueError as error:
        return str(error)


def _cross_encoder_config(folder: Path) -> CrossEncoderConfig | str:
    try:
        return read_cross_encoder_config(folder)
    except ValueError as error:
        return str(error)


def capped(context_length: int | None, settings: Settings) -> int | None:
    """A model's context, as far as the operator allows."""
    lengths = [context_length, settings.max_context]
    return min((length for length in lengths if length is not None), default=None)


def make_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    # Imported on first use: transformers takes most of a second.
    from mlxsrv.prompts.tokenizer import Tokenizer

    return Tokenizer(folder, trust_remote_code=trust_remote_code)
