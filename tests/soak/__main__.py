"""The command: `python -m tests.soak --minutes 3`, see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.soak.run import format_run, soak


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="mlxsrv-soak-") as folder:
        place = arguments.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        run = soak(
            place, seconds=60 * arguments.minutes, seed=arguments.seed, members=arguments.members
        )
    print(format_run(run))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
    sys.exit(1 if run.failures else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Do everything to a server, then count."
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0, help="of what the crowd does")
    parser.add_argument("--members", type=int, default=24, help="of the crowd")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the run here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for models and log, kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
