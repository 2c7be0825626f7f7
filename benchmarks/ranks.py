"""The cost of a round on several ranks: `python -m benchmarks.ranks`.

Two ranks on this machine, connected by MLX's ring over loopback. Each line is microseconds a
round, beyond the collectives of the model itself: sending the plan of a decode step with `--rows`
rows, and having rank 0's tokens on all ranks. `rows change` is the same with a plan that names all
rows anew.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import mlx.core as mx

from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import Decode, RoundPlan, RowGroup, WorkItem
from mlxsrv.engine.ranks.joining import join
from mlxsrv.engine.ranks.leader import RankLeader
from mlxsrv.engine.ranks.rank_group import Split
from mlxsrv.engine.watchdog import Clock

_RANK = "BENCHMARK_RANK"


def _launch(arguments: list[str], count: int) -> int:
    """Start this program once for each rank. Returns the exit status of rank 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.json"
        file.write_text(json.dumps(hosts))
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", *arguments],
                env=os.environ
                | {_RANK: str(rank), "MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)},
            )
            for rank in range(count)
        ]
        for other in processes[1:]:
            other.wait()
        return processes[0].wait()


def _run(rows: int, rounds: int) -> None:
    tokens = mx.zeros((rows,), dtype=mx.uint32)
    group, member = join(Split.TENSOR, Clock(), sys.exit, sys.exit)

    def run(work: WorkItem) -> Outcome:
        mx.eval(group.share(tokens))
        return Outcome(0.0, 0.0)

    if not isinstance(member, RankLeader):
        member.follow(run)
        return
    groups = (RowGroup(tuple(range(rows)), rows, 4096),)
    plans = {
        "same rows": RoundPlan((Decode(model=1),)),
        "rows change": RoundPlan((Decode(model=1, groups=groups),)),
    }
    for name, plan in plans.items():
        spent = []
        for _ in range(rounds):
            began = perf_counter()
            member.send(plan)
            member.note_outcome(0, run(plan.items[0]))
            spent.append((perf_counter() - began) * 1e6)
        p95 = quantiles(spent, n=20)[-1]
        print(f"{name:12} {median(spent):8.0f} µs median {p95:8.0f} µs p95", flush=True)
    member.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    if _RANK in os.environ:
        _run(options.rows, options.rounds)
    else:
        sys.exit(_launch(sys.argv[1:], options.ranks))


if __name__ == "__main__":
    main()
