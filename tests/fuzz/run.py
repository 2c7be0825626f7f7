"""Look for inputs that break a property: `python -m tests.fuzz.run [NAME ...] [--seconds N]`.

Each target has a process of its own, in which atheris mutates the seeds and what it has kept in
`.fuzz/`, guided by the branches of the code under test. What breaks a property is written to
`tests/fuzz/found/NAME-<hash>`, where the tests find it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).parent / "found"
KEPT = ROOT / ".fuzz"

# What the targets are about; a search has no use for the branches of all else.
_WATCHED = ["mlxsrv.text", "mlxsrv.wire", "mlxsrv.formats", "mlxsrv.prompts.grammars"]
_MEMORY = 4096  # MiB, with MLX and all of its own
_LONGEST_RUN = 20  # seconds of one input


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets; all if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        _fuzz(options.names[0], options.seconds)
    from tests.fuzz.targets import TARGETS

    if unknown := set(options.names) - TARGETS.keys():
        parser.error(f"there are {', '.join(TARGETS)}, but no {', '.join(sorted(unknown))}")
    broken = [name for name in options.names or TARGETS if not _run(name, options.seconds)]
    return 1 if broken else 0


def _run(name: str, seconds: int) -> bool:
    """Fuzz one target; whether nothing was found. Tells how it went in one line."""
    log = KEPT / f"{name}.log"
    crashes = _folder(f"{name}-crashes")
    command = [sys.executable, "-m", "tests.fuzz.run", "--here", name, "--seconds", f"{seconds}"]
    # libFuzzer ends a process without ado, so what the targets write is removed here.
    with log.open("wb") as output, tempfile.TemporaryDirectory() as scratch:
        status = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            stdout=output,
            stderr=output,
        ).returncode
    text = log.read_text(errors="replace")
    runs = re.findall(r"^#(\d+).* cov: (\d+) ft: (\d+)", text, re.MULTILINE)
    done, branches, features = runs[-1] if runs else ("0", "0", "0")
    print(f"{name}: {done} inputs, {branches} branches, {features} features", flush=True)
    found = sorted(crashes.iterdir())
    for path in found:
        data = path.read_bytes()
        kept = FOUND / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
        path.rename(kept)
        print(f"{name}: broken by {kept.relative_to(ROOT)}; {log.relative_to(ROOT)} says how")
    if status and not found:
        print(f"{name}: ended with {status}; {log.relative_to(ROOT)} says why")
    return not status and not found


def _folder(name: str) -> Path:
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fuzz(name: str, seconds: int) -> None:
    """Fuzz in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=_WATCHED):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.seeds import SEEDS

    corpus, seeds = _folder(name), _folder(f"{name}-seeds")
    for number, seed in enumerate(SEEDS[name]):
        (seeds / f"{number}").write_bytes(seed)
    words = KEPT / f"{name}.dict"
    words.write_text("".join(f'"{_escape(word)}"\n' for word in _words(SEEDS[name])))
    options = {
        "dict": words,
        "max_total_time": seconds,
        "max_len": max(4096, *map(len, SEEDS[name])),
        "timeout": _LONGEST_RUN,
        "rss_limit_mb": _MEMORY,
        "artifact_prefix": f"{_folder(f'{name}-crashes')}/",
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, f"{corpus}", f"{seeds}"], TARGETS[name])
    atheris.Fuzz()


def _words(seeds: Iterable[bytes]) -> set[bytes]:
    """Return words to put into inputs: names and marks of the seeds, and values hard to read."""
    found = {word for seed in seeds for word in re.findall(rb'"[^"]{1,30}"|<[^<>]{1,30}>', seed)}
    return found | {rb"\ud800", b"1e999", b"-0.0", b"NaN", b"9" * 20, b"[[[[[[[[", b"null"}


def _escape(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    sys.exit(main())
