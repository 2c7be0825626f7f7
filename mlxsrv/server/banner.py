"""The first lines of a server on a terminal: its model, its addresses, and how to stop it."""

from __future__ import annotations

import os
import sys

from mlxsrv.connect.url import reachable
from mlxsrv.logs import BOLD, DIM, GREEN, has_colours, paint, sized
from mlxsrv.models.catalogue.catalogue import DEMO, ModelEntry
from mlxsrv.models.pool.model_files import capped
from mlxsrv.settings import Settings
from mlxsrv.version import __version__


def show_banner(settings: Settings, entry: ModelEntry, url: str, *, keys: bool) -> None:
    """Tell on the terminal what is served where.

    Args:
        entry: the default model.
        url: the address that the server listens on.
        keys: requests must carry a key.
    """
    url = reachable(url)
    rows = [("Model", _describe(settings, entry))]
    if entry.name == DEMO:
        rows.append(("", "It is a toy: serve a real one with mlxsrv ORG/NAME"))
    if settings.page == "on":
        rows.append(("Chat", f"{url}  in a browser"))
    with_key = ", with your key" if keys else ""
    rows += [
        ("Clients", f"{url}/v1 (OpenAI){with_key}"),
        ("", f"{url} (Anthropic, Ollama){with_key}"),
        ("", "mlxsrv connect sets up codex, claude, opencode and others"),
        ("Memory", _memory(settings)),
        ("Stop", "Ctrl-C"),
    ]
    lines = [_paint(f"mlxsrv {__version__}", BOLD)]
    lines += [f"  {_paint(f'{title:<8}', DIM)} {text}" for title, text in rows]
    _write("\n".join(("", *lines, "")))


def show_ready(seconds: float, url: str) -> None:
    """Tell on the terminal that requests are answered."""
    _write(_paint(f"Ready in {seconds:.1f} s: {reachable(url)}", GREEN))


def _describe(settings: Settings, entry: ModelEntry) -> str:
    known = entry.description
    if known is None:
        return f"{entry.name}, which is downloaded first"
    context = capped(known.context_length, settings)
    facts = [f"{known.parameter_size} parameters", sized(known.size)]
    if context is not None:
        facts.append(f"context of {context:,} tokens")
    return f"{entry.name} ({', '.join(facts)})"


def _memory(settings: Settings) -> str:
    machine = sized(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if settings.memory_limit is None:
        return f"{machine} in this machine"
    return f"{sized(settings.memory_limit)} of {machine} (--memory-limit)"


def _paint(text: str, code: int) -> str:
    return paint(text, code) if has_colours(sys.stderr) else text


def _write(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
