"""All options of the server, in one Struct.

The annotation of a field has everything about its option: type, bounds and help. From the Struct,
`configuration` makes the command line, the variables (`MLXSRV_PORT`), the keys of the TOML file and
the table in docs/options.md, so no option is missing in one of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxsrv.options import Option, SettingsError, options_of

_BYTES = {"metavar": "BYTES", "bytes": True}  # may be written as 512MB, 12GB, 1.5GiB
# `$` alone also matches before a newline at the end.
Key = Annotated[str, Meta(pattern=r"^[!-~]+(?!\n)$")]
Origin = Annotated[str, Meta(pattern=r"^(\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?)(?!\n)$")]
HostName = Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?!\n)$")]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options.

    Raises:
        SettingsError: a value is wrong; the message names the field.
    """

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to serve: a folder, a Hugging Face id, or demo. NAME=MODEL gives it "
            "a name, MODEL+ADAPTER_DIR adds a LoRA adapter. Repeatable; the first is the default "
            "model. Without this option: the built-in demo.",
            extra={"metavar": "[NAME=]ID_OR_PATH[+ADAPTER_DIR]"},
        ),
    ] = ()
    models_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Serve every model below this folder: DIR/NAME, DIR/ORG/NAME. Repeatable.",
            extra={"metavar": "DIR"},
        ),
    ] = ()
    hf_cache: Annotated[
        bool, Meta(description="Serve the models in the Hugging Face cache as well.")
    ] = True
    allow_download: Annotated[
        bool, Meta(description="Let a request for an unknown ORG/NAME download it.")
    ] = False
    model_alias: Annotated[
        tuple[str, ...],
        Meta(
            description="Answer requests for models that match PATTERN, such as claude-*, with the "
            "model NAME. PATTERN is as in a shell; a served model keeps its own name; of several "
            "patterns, the first that matches decides. Repeatable.",
            extra={"metavar": "PATTERN=NAME"},
        ),
    ] = ()
    any_model: Annotated[
        bool,
        Meta(
            description="Answer a request for an unknown model with the default model. Then no "
            "request downloads a model by its name."
        ),
    ] = False
    preload: Annotated[
        tuple[str, ...],
        Meta(
            description="Load this model at start, like the default model. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    pin: Annotated[
        tuple[str, ...],
        Meta(
            description="Never unload this model once it is loaded. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    max_models: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most models loaded at once. The least recently used idle one goes first."
        ),
    ] = None
    memory_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory for the weights of all loaded models, for the KV caches of running "
            "requests and for cached prompts together. "
            "Default: 90% of the working set that Metal recommends; on CUDA 81% of the card, or "
            "90% of what others leave of it if that is less; else 75% of RAM.",
            extra=_BYTES,
        ),
    ] = None
    mlx_cache_limit: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Freed buffers that MLX may keep for later use, beside --memory-limit; 0: "
            "none. Default: 5% of the working set, of the card or of RAM, or MLX's own limit if "
            "that is less.",
            extra=_BYTES,
        ),
    ] = None
    wire_memory: Annotated[
        bool,
        Meta(
            description="Keep what MLX uses wired, so that macOS never swaps or compresses it. "
            "Some Macs panic under it when several requests run."
        ),
    ] = False
    idle_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Unload a model that nobody has used for this many seconds."),
    ] = None
    max_context: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Upper bound for the context of every model, in tokens."),
    ] = None
    draft_model: Annotated[
        tuple[str, ...],
        Meta(
            description="Small model that proposes tokens for MODEL (for the default model if none "
            "is named); MODEL checks several in one step. Used while one request runs and while "
            "that is faster. `ngram` needs no model: it proposes the tokens that followed the same "
            "tokens earlier in the text, for all requests that run. Repeatable.",
            extra={"metavar": "[MODEL=]ID_OR_PATH|ngram"},
        ),
    ] = ()
    kv_bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8] | None,
        Meta(
            description="Quantize KV caches to this many bits.",
            extra={"metavar": "BITS"},
        ),
    ] = None
    quantized_kv_start: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens at the beginning of each text that --kv-bits leaves as they are.",
            extra={"metavar": "TOKENS"},
        ),
    ] = 512
    max_kv_size: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Most tokens that a KV cache keeps: the first four, and the last "
            "TOKENS - 4.",
            extra={"metavar": "TOKENS"},
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with a model's files.")
    ] = False
    allow_chat_template: Annotated[
        bool,
        Meta(
            description="Let a request bring its own chat_template. It runs in a process of its "
            "own, for at most 5 s, and with at most 4 GiB on Linux: for trusted clients only."
        ),
    ] = False
    sae_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Offer every sparse autoencoder (SAE) below this folder to /api/saes. "
            "Repeatable.",
            extra={"metavar": "DIR"},
        ),
    ] = ()
    attach_sae: Annotated[
        tuple[str, ...],
        Meta(
            description="Attach this SAE at start. MODEL is the default model if none is named; "
            "LAYER is the layer that the SAE was trained on if none is given. Repeatable.",
            extra={"metavar": "[MODEL=]SAE[@LAYER]"},
        ),
    ] = ()
    profile: Annotated[
        tuple[str, ...],
        Meta(
            description="Make this stored profile the default steering of its model at start, once "
            "--attach-sae has attached its SAE. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    control_vector: Annotated[
        tuple[str, ...],
        Meta(
            description="Steer everything that the default model generates with this control "
            "vector, a .gguf or .safetensors file, times SCALE (default: 1). With 0, it applies "
            "only to requests that name it. Repeatable.",
            extra={"metavar": "[NAME=]FILE[:SCALE]"},
        ),
    ] = ()
    data_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder for the steering profiles; it is created on first use.",
            extra={"metavar": "DIR"},
        ),
    ] = "~/.mlxsrv"
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes any free one.")] = 8000
    page: Annotated[
        Literal["on", "off"],
        Meta(description="Answer GET / with a page: chat, look inside, steer, watch the server."),
    ] = "on"
    ollama_root: Annotated[
        bool,
        Meta(
            description='Answer GET / with "Ollama is running", for programs that look for Ollama '
            "there. Browsers get the page."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/?#\s]+)*/?(?!\n)$",
            description="Path that a proxy in front removes, such as /llm; /openapi.json names it.",
            extra={"metavar": "PATH"},
        ),
    ] = ""
    api_key: Annotated[
        tuple[Key, ...],
        Meta(
            description="Key that every request must carry, as Authorization: Bearer KEY or "
            "x-api-key: KEY; only /health, / and /page/* need none. Repeatable; any of them is "
            "accepted.",
            extra={"metavar": "KEY", "secret": True, "guards": True},
        ),
    ] = ()
    api_key_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File with more keys, one per line, each perhaps with priority=NUMBER; # "
            "begins a comment. Read at start.",
            extra={"metavar": "FILE", "guards": True},
        ),
    ] = None
    allowed_origin: Annotated[
        tuple[Origin, ...],
        Meta(
            description="Origin of web pages that may use this server from a browser, such as "
            "https://app.example; * allows all origins, null allows pages without one. Repeatable.",
            extra={"metavar": "ORIGIN"},
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[HostName, ...],
        Meta(
            description="Host name, without a port, that the Host header may have besides this "
            "machine's own; * allows all. Host is checked on loopback, and wherever this option "
            "is given. Repeatable.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    rate_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests per minute for each key, or for each address if there are no "
            "keys; beyond that: 429.",
            extra={"metavar": "REQUESTS"},
        ),
    ] = None
    max_concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Most answers (rows of the batch) that are generated together, per model.",
        ),
    ] = 32
    max_queue: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that may wait for a row, per model; beyond that: 503. One client "
            "may have three quarters of the places that others leave.",
        ),
    ] = 128
    allow_priority: Annotated[
        bool,
        Meta(description="Let a request set its priority: a lower number is served earlier."),
    ] = False
    max_choices: Annotated[
        int, Meta(ge=1, description="Most answers to one request: its prompts times `n`.")
    ] = 128
    default_max_tokens: Annotated[
        int, Meta(ge=1, description="`max_tokens` of a chat request that gives none.")
    ] = 4096
    default_thinking_budget: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Tokens that the thoughts of an answer may take where a chat request does "
            "not say; then the thought is closed, and the answer follows.",
        ),
    ] = None
    repetition_detection: Annotated[
        bool,
        Meta(
            description="End an answer that repeats itself: 16 to 1024 tokens, four times in a "
            "row. A request's repetition_detection says otherwise."
        ),
    ] = False
    tool_grammar: Annotated[
        bool,
        Meta(
            description="Hold every tool call that a model starts to the schema of its tool, also "
            "with tool_choice auto (extra structured)."
        ),
    ] = False
    tool_format: Annotated[
        tuple[str, ...],
        Meta(
            description="Format in which MODEL (the default model if none is named) calls tools, "
            "as it is called here, in vLLM or in SGLang; none: what it writes is content. "
            "Otherwise its files decide. Repeatable.",
            extra={"metavar": "[MODEL=]FORMAT", "also": ("--tool-call-parser",)},
        ),
    ] = ()
    thinking_format: Annotated[
        tuple[str, ...],
        Meta(
            description="The same for the format in which MODEL thinks.",
            extra={
                "metavar": "[MODEL=]FORMAT",
                "also": ("--reasoning-format", "--reasoning-parser"),
            },
        ),
    ] = ()
    queue_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds a request may wait for other requests: for a row, for memory and "
            "for earlier prompts; beyond that: 503. The load of its own model does not count.",
        ),
    ] = 300.0
    stall_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without progress (no token is read or generated, or the client "
            "reads nothing) after which a request ends; 504 if there is no text yet.",
        ),
    ] = 300.0
    request_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds a request may take in total, including waiting; 504 if there is "
            "no text yet. 0 is no limit, the default.",
        ),
    ] = None
    keepalive: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without output after which a stream gets a sign of life: a "
            "comment, an event or an empty line, as its API has it.",
        ),
    ] = 15.0
    max_body: Annotated[
        int,
        Meta(ge=1024, description="Largest request body; beyond that: 413.", extra=_BYTES),
    ] = 32 * 1024 * 1024
    max_bodies: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="Bytes that all request bodies may take together, with the stored items "
            "that they continue or refer to, each from its arrival until it is tokenized; beyond "
            "that: 503. Default: 4 times --max-body.",
            extra=_BYTES,
        ),
    ] = None
    body_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds in which the headers of a request must arrive, or the connection "
            "is closed; and as many again for its body, or the answer is 408.",
        ),
    ] = 30.0
    max_responses: Annotated[
        int,
        Meta(
            ge=0,
            description="Responses that are kept in memory for `previous_response_id` and "
            "`GET /v1/responses/{id}`; beyond that, those go that were not used for longest, of "
            "the client that has most. 0 keeps none.",
        ),
    ] = 1000
    max_responses_bytes: Annotated[
        int,
        Meta(ge=0, description="Memory that these responses may take.", extra=_BYTES),
    ] = 128 * 1024 * 1024
    prefill_chunk: Annotated[
        int, Meta(ge=16, description="Most prompt tokens that are read between two decode steps.")
    ] = 512
    max_gap: Annotated[
        float,
        Meta(gt=0, description="Seconds that a stream may wait for a slice of another prompt."),
    ] = 0.2
    prompt_cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Memory of the prompt cache, per model; 0: no prompt cache. "
            "Default: an eighth of the device's memory.",
            extra=_BYTES,
        ),
    ] = None
    prompt_cache_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Folder in which cached prompts outlive the process; it is created on "
            "first use. Without this option, they are kept in memory only.",
            extra={"metavar": "DIR"},
        ),
    ] = None
    prompt_cache_disk_bytes: Annotated[
        int,
        Meta(ge=0, description="Disk space that --prompt-cache-dir may take.", extra=_BYTES),
    ] = 20 * 1000**3
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which a step that still runs counts as a stall: the log "
            "says so, and /health and /health/live answer 503 until the step ends.",
        ),
    ] = 120.0
    parallel: Annotated[
        Literal["tensor", "pipeline"] | None,
        Meta(
            description="Divide each model among the ranks that mlx.launch has started: tensor, a "
            "part of every layer; pipeline, some of the layers."
        ),
    ] = None
    exit_on_failure: Annotated[
        bool,
        Meta(
            description="End the process with status 3 if the inference engine fails, so that a "
            "supervisor can restart it; otherwise the process stays and answers 503. A stall does "
            "not count, because it may end by itself: watch /health/live for that."
        ),
    ] = False
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds in which running requests may finish at shutdown.")
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Log lines as text or as JSON objects.")
    ] = "text"
    record: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Write what the engine is asked, plans and does to this file, for a bug "
            "report; mlxsrv replay reads it. It has the token ids of all texts, and paths.",
            extra={"metavar": "FILE"},
        ),
    ] = None
    metrics: Annotated[
        bool, Meta(description="Serve Prometheus metrics at /metrics (extra metrics).")
    ] = False
    otel: Annotated[
        bool,
        Meta(
            description="Trace requests with OpenTelemetry (extra otel); OTEL_* variables "
            "configure it."
        ),
    ] = False

    def __post_init__(self) -> None:
        for option in options():
            try:
                msgspec.convert(getattr(self, option.name), option.type, strict=True)
            except msgspec.ValidationError as error:
                raise SettingsError(f"{option.name}: {error}") from None
        if self.max_bodies is not None and self.max_bodies < self.max_body:
            raise SettingsError(
                f"max_bodies: less than max_body ({self.max_body}), so the largest body cannot fit"
            )

    def __repr__(self) -> str:
        """Shows the number of secrets only: a repr may end in a log or a traceback."""
        return f"Settings({', '.join(f'{o.name}={o.shown(self)}' for o in options())})"


def options() -> tuple[Option, ...]:
    """The fields of Settings, in order."""
    return options_of(Settings)
