"""Models as Ollama's API lists, shows, names and downloads them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxsrv.generation.status import LoadedModel, ModelFacts, ModelObject, ModelStatus
from mlxsrv.wire.ollama.answers import ollama_time

API_VERSION = "0.14.0"
"""The version of Ollama whose API this is. Clients refuse servers that are too old for them."""

_NEVER = timedelta(days=365 * 100)


class OllamaVersion(Struct, frozen=True):
    version: str = API_VERSION


class OllamaDetails(Struct, frozen=True, kw_only=True):
    """Texts are empty while the model's files are not here."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct, frozen=True, kw_only=True):
    """`state` and `reason` are additions to Ollama's API."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    state: ModelStatus
    reason: str | UnsetType = UNSET
    """Why its last load failed."""


class OllamaModels(Struct, frozen=True):
    models: list[OllamaModel]


class OllamaShown(Struct, frozen=True, kw_only=True):
    """One model. `parameters` are lines of a name and a value; `model_info` has GGUF's keys."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaRunningModel(OllamaModel, frozen=True, kw_only=True):
    """A loaded model."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Struct, frozen=True):
    models: list[OllamaRunningModel]


def listed_name(id: str) -> str:
    """Return the name under which a model is listed: with a tag."""
    return id if ":" in id.rpartition("/")[2] else f"{id}:latest"


def ollama_model(model: ModelObject) -> OllamaModel:
    return OllamaModel(**_listed(model))


def running_model(loaded: LoadedModel) -> OllamaRunningModel:
    never = _NEVER.total_seconds()
    seconds = never if loaded.seconds_left is None else min(loaded.seconds_left, never)
    return OllamaRunningModel(
        **{**_listed(loaded.described), "size": loaded.bytes},
        expires_at=ollama_time(datetime.now(UTC) + timedelta(seconds=seconds)),
        size_vram=loaded.bytes,  # the memory of the device, which on a Mac is that of the machine
        context_length=loaded.described.context_length or 0,
    )


def _listed(model: ModelObject) -> dict[str, Any]:
    name = listed_name(model.id)
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(model),
        "size": model.size or 0,
        "digest": _digest(model),
        "details": _details(model),
        "state": model.state,
        "reason": UNSET if model.reason is None else model.reason,
    }


def _modified(model: ModelObject) -> str:
    return ollama_time(model.modified_at or datetime.fromtimestamp(model.created, UTC))


def _digest(model: ModelObject) -> str:
    """Return a value that changes with the model's files."""
    facts = msgspec.json.encode([model.id, model.details, model.size, model.modified_at])
    return hashlib.sha256(facts).hexdigest()


def _details(model: ModelObject) -> OllamaDetails:
    given = model.details
    if given is None:
        return OllamaDetails()
    return OllamaDetails(
        format=given.format,
        family=given.family,
        families=[given.family],
        parameter_size=given.parameter_size,
        quantization_level=given.quantization_level,
    )


_CAPABILITIES = ("completion", "tools", "insert", "thinking", "embedding")
"""The capabilities that Ollama has a word for."""

_TEMPLATE_WORDS = {"insert": ".Suffix", "tools": ".Tools"}
"""Variables of Ollama's own templates by which clients know what a model can do."""

_PARAMETERS = {"repetition_penalty": "repeat_penalty"}


def shown_model(model: ModelObject, facts: ModelFacts) -> OllamaShown:
    family = "unknown" if model.details is None else model.details.family
    info = {
        "general.architecture": family,
        "general.basename": model.id,
        "general.parameter_count": facts.parameters,
        f"{family}.block_count": facts.layers,
        f"{family}.context_length": model.context_length,
        f"{family}.embedding_length": facts.hidden_size,
    }
    return OllamaShown(
        modelfile=f"FROM {listed_name(model.id)}\n",
        parameters="\n".join(
            f"{_PARAMETERS.get(name, name):<30} {value:g}" for name, value in facts.defaults.items()
        ),
        template=_shown_template(model, facts),
        details=_details(model),
        model_info={key: value for key, value in info.items() if value is not None},
        capabilities=[each for each in _CAPABILITIES if each in model.capabilities],
        modified_at=_modified(model),
    )


def _shown_template(model: ModelObject, facts: ModelFacts) -> str:
    """The template, and in a comment of Jinja's the words that clients look for."""
    words = [word for name, word in _TEMPLATE_WORDS.items() if name in model.capabilities]
    return (facts.template or "") + (f"{{#- {' '.join(words)} -#}}" if words else "")


# Downloads.


class OllamaProgress(Struct, frozen=True, kw_only=True):
    """A line. Those of a file have its digest, its bytes, and those that are here."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


PULL_BEGINS = OllamaProgress(status="pulling manifest")
PULL_ENDS = (
    OllamaProgress(status="verifying sha256 digest"),
    OllamaProgress(status="writing manifest"),
    OllamaProgress(status="success"),
)


def file_progress(checksum: str, size: int, done: int) -> OllamaProgress:
    """Return the progress of a file. The checksum of a small file is git's."""
    kind = "sha256" if len(checksum) == 64 else "sha1"
    return OllamaProgress(
        status=f"pulling {checksum[:12]}",
        digest=f"{kind}:{checksum}",
        total=size,
        completed=done,
    )
