"""Compare servers of the demo model as to what replicas change: `python -m benchmarks.replicas URL
[URL ...]`.

Servers run already, one a URL: one process (`python -m mlxsrv --port 8001`) and replicas
(`python -m mlxsrv replicas --replicas 2 --port 8002`). Conversations of four turns show how many
tokens come from prompt caches; streams beside each other show the gaps between chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import httpx
import numpy as np

from benchmarks.report import format_table

_TURNS = ("Which endpoints do you serve?", "Tell me more.", "How do I stream?", "Thank you.")


async def converse(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
    """Have one conversation. Returns the prompts' tokens, and those of them that were cached."""
    messages = [{"role": "system", "content": f"You are helper {number}. Be brief."}]
    prompt, cached = 0, 0
    for turn in _TURNS:
        messages.append({"role": "user", "content": turn})
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        prompt += answer["usage"]["prompt_tokens"]
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return prompt, cached


async def stream(client: httpx.AsyncClient, number: int) -> list[float]:
    """Stream one answer. Returns the seconds between chunks."""
    body = {
        "messages": [{"role": "user", "content": f"Stream {number}: which endpoints are there?"}],
        "max_tokens": 200,
        "min_tokens": 200,
        "stream": True,
    }
    times: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            times.append(time.perf_counter())
    return np.diff(times).tolist()


async def measure(url: str, conversations: int, streams: int, atonce: int) -> list[str]:
    """Return the row of one server."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        gate = asyncio.Semaphore(atonce)

        async def converse_in_turn(number: int) -> tuple[int, int]:
            async with gate:
                return await converse(client, number)

        begun = time.perf_counter()
        counts = await asyncio.gather(*map(converse_in_turn, range(conversations)))
        seconds = time.perf_counter() - begun
        gaps = [each for one in range(streams) for each in await stream(client, one)]
        together = await asyncio.gather(*(stream(client, number) for number in range(streams)))
    prompt, cached = np.sum(counts, axis=0)
    beside = [gap for one in together for gap in one]
    times = [np.quantile(each, share) for each in (gaps, beside) for share in (0.5, 0.99)]
    return [
        url,
        f"{cached} of {prompt}",
        f"{seconds:.1f} s",
        *(f"{1000 * each:.1f} ms" for each in times),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4, help="conversations")
    options = parser.parse_args()
    rows = [
        asyncio.run(measure(url, options.conversations, options.streams, options.at_once))
        for url in options.urls
    ]
    alone, beside = "one stream, gap", "beside others, gap"
    heads = ["", "cached tokens", "conversations", f"{alone} p50", "p99", f"{beside} p50", "p99"]
    print(format_table([heads, *rows]))


if __name__ == "__main__":
    main()
