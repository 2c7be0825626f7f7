"""All options of the server, in one Struct.

The annotation of a field has everything about its option: type, bounds and help. From the Struct,
`configuration` makes the command line, the variables (`MLXSRV_PORT`), the keys of the TOML file and
the table in docs/options.md, so no option is missing in one of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxsrv.options import HostName, Key, Option, Origin, SettingsError, URLPath, options_of

_BYTES = {"metavar": "BYTES", "bytes": True}  # may be written as 512MB, 12GB, 1.5GiB
_COMMON = {"common": True}  # in the short help


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options.

    Raises:
        SettingsError: a value is wrong; the message names the field.
    """

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to serve: a folder, a Hugging Face id, or demo (built in, and the "
            "default). NAME=MODEL gives it a name; MODEL+ADAPTER_DIR adds a LoRA adapter. "
            "The first of several is the default model.",
            extra=_COMMON | {"group": "Models", "metavar": "[NAME=]ID_OR_PATH[+ADAPTER_DIR]"},
        ),
    ] = ()
    models_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Serve every model below this folder: DIR/NAME, DIR/ORG/NAME.",
            extra=_COMMON,
        ),
    ] = ()
    hf_cache: Annotated[
        bool, Meta(description="Serve the models in the Hugging Face cache, too.")
    ] = True
    allow_download: Annotated[
        bool,
        Meta(
            description="Download a model when a request asks for an unknown ORG/NAME.",
            extra=_COMMON,
        ),
    ] = False
    model_alias: Annotated[
        tuple[str, ...],
        Meta(
            description="Answer requests for names that match PATTERN, such as claude-*, with the "
            "model NAME. A served model keeps its own name; the first matching pattern counts.",
            extra={"metavar": "PATTERN=NAME"},
        ),
    ] = ()
    any_model: Annotated[
        bool,
        Meta(
            description="Answer requests for unknown models with the default model, and download "
            "none for them."
        ),
    ] = False
    preload: Annotated[
        tuple[str, ...],
        Meta(
            description="Load this model at start, like the default model.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    pin: Annotated[
        tuple[str, ...],
        Meta(description="Never unload this model once it is loaded.", extra={"metavar": "NAME"}),
    ] = ()
    draft_model: Annotated[
        tuple[str, ...],
        Meta(
            description="Speculative decoding: a small model that proposes tokens, which MODEL "
            "checks in one step. It is used while one request runs and while it is faster. "
            "`ngram` needs no second model: it proposes what followed the same tokens earlier in "
            "the text. Without MODEL: for the default model.",
            extra={"metavar": "[MODEL=]ID_OR_PATH|ngram"},
        ),
    ] = ()
    tool_format: Annotated[
        tuple[str, ...],
        Meta(
            description="Format of MODEL's tool calls, by its name here, in vLLM or in SGLang; "
            "none: calls stay text. Without MODEL: for the default model. Default: what the "
            "model's files tell.",
            extra={"metavar": "[MODEL=]FORMAT", "also": ("--tool-call-parser",)},
        ),
    ] = ()
    thinking_format: Annotated[
        tuple[str, ...],
        Meta(
            description="Format of MODEL's thoughts, in the same way.",
            extra={
                "metavar": "[MODEL=]FORMAT",
                "also": ("--reasoning-format", "--reasoning-parser"),
            },
        ),
    ] = ()
    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address to listen on.",
            extra=_COMMON | {"group": "Network"},
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port; 0 takes any free one.", extra=_COMMON)
    ] = 8000
    page: Annotated[
        Literal["on", "off"],
        Meta(description="Serve a web page at GET /: chat, look inside, steer, watch the server."),
    ] = "on"
    ollama_root: Annotated[
        bool,
        Meta(
            description='Answer GET / with "Ollama is running", for programs that look for '
            "Ollama. Browsers get the page."
        ),
    ] = False
    root_path: Annotated[
        URLPath,
        Meta(
            description="Path that a proxy in front strips, such as /llm; /openapi.json names it.",
            extra={"metavar": "PATH"},
        ),
    ] = ""
    api_key: Annotated[
        tuple[Key, ...],
        Meta(
            description="Key that every request must carry, as Authorization: Bearer KEY or "
            "x-api-key: KEY. /health, / and /page/* need none. "
            "Any of several is accepted.",
            extra=_COMMON | {"group": "Access", "secret": True, "guards": True},
        ),
    ] = ()
    api_key_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File with more keys, one per line; # begins a comment; priority=NUMBER "
            "may follow a key. Read at start.",
            extra=_COMMON | {"guards": True},
        ),
    ] = None
    allowed_origin: Annotated[
        tuple[Origin, ...],
        Meta(
            description="Web origin whose pages may use this server from a browser, such as "
            "https://app.example; * allows all, null allows pages without an origin.",
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[HostName, ...],
        Meta(
            description="Host name, without a port, to accept in the Host header besides this "
            "machine's own; * accepts all. Checked on loopback, and wherever this option is "
            "given.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    rate_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests per minute for each key, or for each address without keys. More "
            "get a 429.",
            extra={"metavar": "REQUESTS"},
        ),
    ] = None
    allow_priority: Annotated[
        bool, Meta(description="Let a request set its priority: lower numbers are served first.")
    ] = False
    allow_chat_template: Annotated[
        bool,
        Meta(
            description="Let a request bring its own chat_template, for trusted clients only. It "
            "runs in a separate process, for at most 5 s, and on Linux with at most 4 GiB."
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code from a model's files.")
    ] = False
    default_max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="`max_tokens` of chat requests without one. Unset: what is left of the "
            "model's context.",
            extra=_COMMON | {"group": "Answers"},
        ),
    ] = None
    default_thinking_budget: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Tokens for thinking in chat requests that name no budget. Then the "
            "thought is closed, and the answer follows.",
        ),
    ] = None
    repetition_detection: Annotated[
        bool,
        Meta(
            description="End an answer that repeats itself: 16 to 1024 tokens, four times in a "
            "row. A request's own repetition_detection overrides this."
        ),
    ] = False
    tool_grammar: Annotated[
        bool,
        Meta(
            description="Hold every tool call to its JSON schema, also with tool_choice auto "
            "(extra structured)."
        ),
    ] = False
    max_choices: Annotated[
        int, Meta(ge=1, description="Most answers to one request: its prompts times `n`.")
    ] = 128
    memory_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory for everything: the weights of all loaded models, the KV caches "
            "of running requests, and cached prompts. Default: 90% of the working set that Metal "
            "recommends; on CUDA 81% of the card, or 90% of its free memory if that is less; else "
            "75% of RAM.",
            extra=_COMMON | _BYTES | {"group": "Memory"},
        ),
    ] = None
    max_context: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest context of any model, in tokens.", extra=_COMMON),
    ] = None
    max_models: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep at most N models loaded; the one idle longest is unloaded first."),
    ] = None
    idle_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Unload a model after so many seconds without a request.", extra=_COMMON),
    ] = None
    kv_bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8] | None,
        Meta(description="Quantize KV caches to this many bits."),
    ] = None
    quantized_kv_start: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens at the beginning of each text that --kv-bits leaves unquantized.",
        ),
    ] = 512
    max_kv_size: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Longest KV cache of a request, in tokens: it keeps the first four and "
            "the last TOKENS - 4.",
        ),
    ] = None
    prompt_cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Memory for the prompt cache of each model; 0: no prompt cache. Default: "
            "an eighth of the device's memory.",
            extra=_BYTES,
        ),
    ] = None
    prompt_cache_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Keep cached prompts in this folder too, so that they survive a restart. "
            "Created on first use. Default: memory only.",
        ),
    ] = None
    prompt_cache_disk_bytes: Annotated[
        int, Meta(ge=0, description="Disk space for --prompt-cache-dir.", extra=_BYTES)
    ] = 20 * 1000**3
    mlx_cache_limit: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Memory for freed buffers that MLX keeps for reuse, on top of "
            "--memory-limit; 0: none. Default: 5% of the working set, of the card or of RAM, or "
            "MLX's own limit if that is less.",
            extra=_BYTES,
        ),
    ] = None
    wire_memory: Annotated[
        bool,
        Meta(
            description="Wire MLX's memory, so that macOS never swaps or compresses it. Some Macs "
            "panic under it when several requests run."
        ),
    ] = False
    max_concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Slots per model: at most N answers decode together.",
            extra=_COMMON | {"group": "Limits"},
        ),
    ] = 32
    max_queue: Annotated[
        int,
        Meta(
            ge=0,
            description="Length of each model's queue. A request beyond it gets a 503. A single "
            "client can use at most 75% of the free queue.",
        ),
    ] = 128
    queue_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a request may wait in the queue: for a slot, for memory, "
            "and for earlier prompts. Then 503. Loading its own model does not count.",
        ),
    ] = 300.0
    stall_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="End a request after so many seconds without progress: no token read or "
            "generated, or nothing read by the client. 504 if there is no text yet.",
        ),
    ] = 300.0
    request_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds for a whole request, its time in the queue included; 504 if "
            "there is no text yet. Default, and 0: no limit.",
        ),
    ] = None
    keepalive: Annotated[
        float,
        Meta(
            gt=0,
            description="Send a keep-alive on silent streams every N seconds: a comment, an event "
            "or an empty line, as the API has it.",
            extra={"metavar": "N"},
        ),
    ] = 15.0
    max_body: Annotated[
        int, Meta(ge=1024, description="Largest request body. Larger ones get a 413.", extra=_BYTES)
    ] = 32 * 1024 * 1024
    max_bodies: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="Memory for all request bodies together, each from its first byte until "
            "it is tokenized; stored items that a request refers to count, too. More get a 503. "
            "Default: 4 times --max-body.",
            extra=_BYTES,
        ),
    ] = None
    body_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds for the headers of a request to arrive, or the connection is "
            "closed; and again for its body, or the answer is 408.",
        ),
    ] = 30.0
    max_responses: Annotated[
        int,
        Meta(
            ge=0,
            description="Responses kept in memory for `previous_response_id` and `GET "
            "/v1/responses/{id}`; 0: none. Beyond it, the client with the most loses the one "
            "unused longest.",
        ),
    ] = 1000
    max_responses_bytes: Annotated[
        int, Meta(ge=0, description="Memory for these responses.", extra=_BYTES)
    ] = 128 * 1024 * 1024
    prefill_chunk: Annotated[
        int, Meta(ge=16, description="Most prompt tokens read between two decode steps.")
    ] = 512
    max_gap: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a stream may pause while a part of another prompt is read.",
        ),
    ] = 0.2
    sae_dir: Annotated[
        tuple[str, ...],
        Meta(
            description="Offer every sparse autoencoder (SAE) below this folder at /api/saes.",
            extra={"group": "Steering"},
        ),
    ] = ()
    attach_sae: Annotated[
        tuple[str, ...],
        Meta(
            description="Attach this SAE at start. Without MODEL: to the default model. Without "
            "LAYER: to the layer it was trained on.",
            extra={"metavar": "[MODEL=]SAE[@LAYER]"},
        ),
    ] = ()
    profile: Annotated[
        tuple[str, ...],
        Meta(
            description="Make this stored profile the default steering of its model at start, "
            "after --attach-sae.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    control_vector: Annotated[
        tuple[str, ...],
        Meta(
            description="Steer the default model with this control vector, a .gguf or "
            ".safetensors file, times SCALE (default: 1). With 0, only in requests that name it.",
            extra={"metavar": "[NAME=]FILE[:SCALE]"},
        ),
    ] = ()
    data_dir: Annotated[
        str, Meta(min_length=1, description="Folder for steering profiles, created on first use.")
    ] = "~/.mlxsrv"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level to log.", extra=_COMMON | {"group": "Logs"}),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Log lines as text or as JSON objects.", extra=_COMMON),
    ] = "text"
    record: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Log what the engine is asked, plans and does to this file, for a bug "
            "report; mlxsrv replay reads it. It contains the token ids of all texts, and paths.",
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
    parallel: Annotated[
        Literal["tensor", "pipeline"] | None,
        Meta(
            description="Divide each model among the ranks that mlx.launch has started: tensor, "
            "part of every layer; pipeline, whole layers.",
            extra={"group": "Process"},
        ),
    ] = None
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that one step of the engine may take. Then the log reports a "
            "stall, and /health and /health/live answer 503 until the step ends.",
        ),
    ] = 120.0
    exit_on_failure: Annotated[
        bool,
        Meta(
            description="Exit with status 3 if the engine fails, so that a supervisor can restart "
            "the process; otherwise it stays and answers 503. A stall does not count, because it "
            "may end by itself: watch /health/live for that."
        ),
    ] = False
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds for running requests to finish at shutdown.")
    ] = 10.0
    stop_with_stdin: Annotated[
        bool, Meta(description="Stop once standard input ends: its writer, your program, has gone.")
    ] = False

    def __post_init__(self) -> None:
        for option in options():
            try:
                option.convert(getattr(self, option.name))
            except SettingsError as error:
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
