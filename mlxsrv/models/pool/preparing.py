"""The preparation of a model for its load: its files, their description, and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio.from_thread
import anyio.to_thread

from mlxsrv.engine.client import EngineClient
from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.answer_formats import FormatWords
from mlxsrv.formats.encoders import read_cross_encoder_config
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.formats.pooling import read_pooling_config
from mlxsrv.logs import log, on_terminal
from mlxsrv.models.catalogue.catalogue import ModelSource
from mlxsrv.models.catalogue.progress import DownloadProgress, DownloadReport
from mlxsrv.models.pool.model import LoadState, Model
from mlxsrv.models.pool.model_files import ModelFiles, capped
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

_log = logging.getLogger("mlxsrv.models")

T = TypeVar("T")


async def prepare_model(
    model: Model,
    draft: ModelSource | None,
    settings: Settings,
    engine: EngineClient,
    check: Callable[[], None],
    words: FormatWords,
) -> Tokenizer:
    """Find or download a model's files, and make its tokenizer.

    The model is PREPARING before and after; during a download it is FETCHING.

    Args:
        draft: its draft model.
        check: called during a download; it stops the download by raising.
        words: the operator's, for the model's formats of thoughts and calls.

    Raises:
        UnusableFile: the files are no model that can be served.
        ServeError: the download failed.
    """
    source = model.entry.source
    if not await anyio.to_thread.run_sync(is_here, source, draft):
        model.enter(LoadState.FETCHING)
    model.download = DownloadProgress(model.name, logs=not on_terminal())
    # Abandoned when the server closes: a download may last, and calls `check` itself.
    wanted = (source, draft, settings, model.name, check, model.download.report, engine.ranks)
    files = await anyio.to_thread.run_sync(examine, *wanted, abandon_on_cancel=True)
    if model.state is LoadState.FETCHING:
        model.enter(LoadState.PREPARING)
        log(_log, logging.INFO, "model downloaded", model=model.name)
    # The device thread must be the first to import the model's code, which making the tokenizer
    # may import as well: what that code makes stays bound to the thread that imports it.
    await engine.import_model_code(str(files.folder))
    tokenizer = await anyio.to_thread.run_sync(
        make_tokenizer, files.folder, settings.trust_remote_code, words
    )
    tokenizer.context = files.context_length
    tokenizer.enforces_calls = settings.tool_grammar and tokenizer.formats.calls is not None
    model.files, model.tokenizer = files, tokenizer
    return tokenizer


def is_here(source: ModelSource, draft: ModelSource | None) -> bool:
    """Whether `examine` will download nothing. Looks at the disk."""
    return source.folder() is not None and (draft is None or draft.folder() is not None)


def examine(
    source: ModelSource,
    draft: ModelSource | None,
    settings: Settings,
    name: str,
    check: Callable[[], None],
    report: DownloadReport,
    ranks: int = 1,
) -> ModelFiles:
    """Read a model's files, and download what is not here. Blocks.

    Args:
        check: called during a download; it stops the download by raising.
        words: the operator's, for the model's formats of thoughts and calls.
        report: called during a download.
        ranks: how many divide the model. The bytes are about those of one rank's share.

    Raises:
        UnusableFile: the files are no model that can be served.
        ServeError: the download failed.
    """
    trust = settings.trust_remote_code
    folder = source.fetch(check, report).resolve()
    described = describe_model(folder, name=name, trust_remote_code=trust)
    own = 0
    if source.adapter is not None:
        own += adapter_bytes(source.adapter)
    draft_folder = None
    if draft is not None:
        draft_folder = draft.fetch(check, report).resolve()
        own += describe_model(draft_folder, trust_remote_code=trust).weights
    return ModelFiles(
        folder,
        source.adapter,
        draft_folder,
        base=_share(described, ranks),
        own=own,
        # Two blocks for the row's own KV cache, and two for its place among others that it joins.
        short_row=4 * described.kv_block // ranks,
        context_length=capped(described.context_length, settings),
        writes=described.writes,
        pooling_config=_or_reason(
            lambda: read_pooling_config(folder, decoder=described.writes, name=name),
        ),
        cross_encoder_config=_or_reason(lambda: read_cross_encoder_config(folder)),
    )


def _share(described: ModelDescription, ranks: int) -> int:
    """About the bytes of one rank's weights: its part of the layers, and all that is outside them,
    which mlx-lm does not divide."""
    outside = described.weights_outside_layers
    return outside + (described.weights - outside) // ranks


def _or_reason(read: Callable[[], T]) -> T | str:
    """The config that `read` returns, or the reason why the model has none."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def make_tokenizer(folder: Path, trust_remote_code: bool, words: FormatWords) -> Tokenizer:
    # Imported on first use: transformers takes most of a second.
    from mlxsrv.prompts.tokenizer import Tokenizer

    # Worker threads of anyio's will use it; each then learns whether somebody still waits for it.
    return Tokenizer(
        folder,
        trust_remote_code=trust_remote_code,
        words=words,
        check=anyio.from_thread.check_cancelled,
    )
