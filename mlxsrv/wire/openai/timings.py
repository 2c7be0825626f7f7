"""The time that a request took, as llama.cpp's server reports it."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from mlxsrv.generation.outputs import Usage


class TimingsBody(Struct, frozen=True, kw_only=True):
    """Tokens and milliseconds of the prompts, but for what the cache had of them, and of the
    answers. A rate is null where there is nothing to divide by."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, usage: Usage | None) -> TimingsBody | UnsetType:
        if usage is None or usage.timings is None:
            return UNSET
        read, drawn = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
        prompt, answer = usage.timings.prompt, usage.timings.answer
        return cls(
            cache_n=usage.cached_tokens,
            prompt_n=read,
            prompt_ms=prompt * 1000,
            prompt_per_token_ms=prompt * 1000 / read if read else None,
            prompt_per_second=read / prompt if prompt else None,
            predicted_n=drawn,
            predicted_ms=answer * 1000,
            predicted_per_token_ms=answer * 1000 / drawn if drawn else None,
            predicted_per_second=drawn / answer if answer else None,
        )
