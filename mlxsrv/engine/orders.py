"""Orders: what the event loop sends down to the device thread.

All are frozen, and made of numbers and strings only, so the thread could be another process.
"""

from __future__ import annotations

import msgspec

from mlxsrv.generation.parameters import Bans, Grammar, Sampling, Steering

# A client comes and goes.


class Open(msgspec.Struct, frozen=True, tag=True):
    """A client's first order."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """A client's last order: forget its models and its jobs."""


class Budget(msgspec.Struct, frozen=True, tag=True):
    """Bound the bytes of the KV caches of all the client's models: of rows, of prompts that are
    being read, of cached prompts and of draft models; and those of large texts to embed. A later
    one replaces it.

    Without one they are not bounded. Sent before the load that takes of it, and in answer to
    MemoryShort, also if it is the same as before.
    """

    bytes: int


# Models.


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Read the model in folder `path` and keep it as `model`: asked, and answered with Loaded.

    `adapter` is the folder of a LoRA adapter to put on it, `draft` the folder of a small model
    with the same vocabulary that proposes tokens. `lookup`: tokens are looked up in the texts
    instead. `prompt_cache_bytes` None: a share of the memory. `kv_bits` quantizes the KV cache, but
    for the first `quantized_kv_start` tokens of a text; `max_kv_size` bounds it to this many
    tokens. `wire_memory` and `mlx_cache_limit` hold for all models: they keep MLX's buffers wired,
    and bound those that are free; None: to a share of the memory. `prompt_cache_dir` is the
    directory in which cached prompts outlive the process.
    """

    model: str
    path: str
    adapter: str | None = None
    draft: str | None = None
    lookup: bool = False
    max_rows: int
    prefill_chunk: int
    max_gap: float
    prompt_cache_bytes: int | None = None
    kv_bits: int | None = None
    quantized_kv_start: int = 0
    max_kv_size: int | None = None
    trust_remote_code: bool = False
    wire_memory: bool = False
    mlx_cache_limit: int | None = None
    prompt_cache_dir: str | None = None
    prompt_cache_disk_bytes: int = 0
    vectors: tuple[tuple[str, str], ...] = ()
    """Control vectors, (name, file). Those that do not fit are left out, with a note."""


class Unload(msgspec.Struct, frozen=True, tag=True):
    """Forget `model` and what it holds. Its jobs, if any, fail."""

    model: str


# Jobs.


class Turn(msgspec.Struct, frozen=True):
    """The place of a job in the line of its model follows from these.

    `client` is whose job it is: a digest, which means nothing outside of this process. A lower
    `priority` is served earlier. The jobs of a client are served in the order of `arrival`, a
    number of the request.
    """

    client: str = ""
    priority: int = 0
    arrival: int = 0


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate: a prompt of at least one token, and when to end. Or texts of which
    vectors are wanted; then nothing is drawn.

    Jobs that wait with the same prompt are read once. With `logprobs` each Token carries its
    log-probability and those of that many likeliest tokens. With `scores` the prompt is scored
    first, with that many likeliest tokens at each place, and `max_tokens` may be 0.
    """

    id: int
    model: str
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    texts: tuple[tuple[int, ...], ...] = ()
    """To embed, instead of a prompt, each of at least one token. A cross-encoder judges pairs."""
    firsts: tuple[int, ...] = ()
    """For pairs: how many tokens of each text belong to the first one of its pair."""
    checkpoints: tuple[int, ...] = ()
    """Lengths in tokens of beginnings that other prompts will share: a system message, the chat as
    its next turn has it. They are used where KV caches cannot be cut back."""
    logprobs: int | None = None
    scores: int | None = None
    ranks: bool = False
    """Whether the prompt's tokens are ranked as well, where they are scored."""
    steering: Steering | None = None
    bans: Bans | None = None
    grammar: Grammar | None = None
    turn: Turn = Turn()


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Do a job, once it is its turn: Started. Ends with a Token with `finish`, Finished, Embedded
    or Failed."""

    job: Job


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget `job` or free its row, wherever it is. Unknown or ended jobs are ignored."""

    job: int


# Steering.


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Read the SAE at `path` and put it at one layer of `model`: asked, answered with Attached.

    `before` puts it at the layer's input. Jobs name it by `number`, which no other attachment of
    the client has.
    """

    model: str
    number: int
    path: str
    layer: int
    before: bool = False


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Forget the SAE of `model`, and stop watching. Rows that it steers stay steered."""

    model: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Report the activations of these features of the SAE of `model`, and of the `top` highest,
    for each token of each row. With neither, report no more."""

    model: str
    features: tuple[int, ...] = ()
    top: int = 0


# Questions.


class GetMemory(msgspec.Struct, frozen=True, tag=True):
    """The bytes of memory that MLX recommends to work in; BackendMissing where it has none."""


class ImportModelCode(msgspec.Struct, frozen=True, tag=True):
    """Import mlx-lm's code for the model in folder `path`."""

    path: str


class MakeReport(msgspec.Struct, frozen=True, tag=True):
    """A Report of what the device and the client's models hold."""


Question = GetMemory | ImportModelCode | MakeReport


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Do this, or answer this. Ends with Answered of the same number."""

    number: int
    question: Question | Load | Attach


# Reports of the storage thread. A model is named by its number, a cached prompt by its entry.


class Written(msgspec.Struct, frozen=True, tag=True):
    """The cached prompt `entry` is stored, or cannot be. So many `files` were written for it; other
    files were there. `full`: the disk takes no more for now. The model has `held_files` now, of
    `held_bytes`."""

    model: int
    entry: int
    files: int = 0
    full: bool = False
    held_files: int = 0
    held_bytes: int = 0


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The KV cache that is to be the cached prompt `entry` was read from disk: that of the first
    `tokens` of the text, or of none."""

    model: int
    entry: int
    tokens: int


StorageReport = Written | Fetched
"""The orders that the storage thread sends."""

Order = Open | Close | Budget | Ask | Unload | Submit | Cancel | Detach | Watch | StorageReport
