"""Measure the worth of prompt lookup: `python -m benchmarks.lookup`.

Tokens per second of the engine with lookup over those without, by processor time. Both are in one
process, and give the same answers by turns, `--block` rounds each: so whatever else the machine
does meanwhile concerns both. Each engine keeps what it has found out about proposals from one
answer to the next, as a server's does; `first` is its first answer. With OPENBLAS_NUM_THREADS=1 no
processor time is spent on waiting.

A prompt is a file of 2,000 tokens; its answer is the file again, with a fifth of its tokens
changed. A random model would say something else: so each token drawn is replaced by the answer's,
after it has been computed and drawn as any other. Two more tasks show what is lost where proposals
do not hold: in `random` nothing repeats; in `mirage` any three tokens of the answer occur in the
prompt, too, and are never followed by the answer's next token there.

A run ends when the first row has its answer; the tokens of all rows count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.events import Token
from mlxsrv.engine.execution import decode, speculation
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.loading.weights import lay_out_weights
from mlxsrv.engine.orders import Job
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.engine.sampling.sampler import Sampler
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from tests.support.text_engine import TextEngine
from tests.support.tiny import write_model

DEMO = Path(__file__).parent.parent / "mlxsrv" / "models" / "demo"
SOURCES = Path(__file__).parent.parent / "mlxsrv"

_FILE_TOKENS = 2000
_KEPT_RUN, _CHANGED_RUN = 100, 25  # tokens: a fifth is changed
_PREFILL_CHUNK = 512
_MARGIN = 12  # tokens that a row may draw and not deliver


class Task(msgspec.Struct, frozen=True):
    """A row's prompt and the answer that it is to give."""

    prompt: list[int]
    answer: list[int]


def make_tasks(kind: str, rows: int, tokens: int, vocabulary: int) -> list[Task]:
    dice = random.Random(rows)
    if kind == "edit":
        return make_edits(rows, tokens, dice)
    drawn = [dice.sample(range(1, vocabulary), vocabulary - 1) for _ in range(rows)]
    if kind == "random":
        return [Task(make_text(vocabulary, _FILE_TOKENS, dice), each[:tokens]) for each in drawn]
    return [Task(make_mirage(each[:tokens], vocabulary, dice), each[:tokens]) for each in drawn]


def make_text(vocabulary: int, tokens: int, dice: random.Random) -> list[int]:
    return dice.choices(range(1, vocabulary), k=tokens)


def make_mirage(answer: list[int], vocabulary: int, dice: random.Random) -> list[int]:
    """A prompt that proposes something wrong after any three tokens of the answer."""
    prompt: list[int] = []
    for i in range(len(answer) - 2):
        prompt += [*answer[i : i + 3], 0]
    return [*make_text(vocabulary, max(_FILE_TOKENS - len(prompt), 0), dice), *prompt]


def make_edits(rows: int, tokens: int, dice: random.Random) -> list[Task]:
    """Tasks to copy a file of this project, with runs of tokens of another file in it."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    files = [tokenizer.encode(path.read_text()).ids for path in sorted(SOURCES.rglob("*.py"))]
    files = [file[:_FILE_TOKENS] for file in files if len(file) >= _FILE_TOKENS]
    tasks = []
    for file, other in zip(*[iter(dice.sample(files, 2 * rows))] * 2, strict=True):
        answer: list[int] = []
        period = _KEPT_RUN + _CHANGED_RUN
        phase = dice.randrange(period)  # so that rows are not changed at the same time
        for place, (kept, changed) in enumerate(zip(file, other, strict=True)):
            answer.append(kept if (place + phase) % period < _KEPT_RUN else changed)
        tasks.append(Task(file, answer[:tokens]))
    return tasks


class Scripted(Sampler):
    """Draws as any sampler does, and then has each row say its answer: the number of which is the
    row's seed."""

    answers: ClassVar[list[list[int]]] = []

    def __init__(self, rows: Sequence[Sampling], drawn: Sequence[int], ahead: int = 16) -> None:
        super().__init__(rows, drawn, ahead)
        self._seeds = [row.seed for row in rows]
        self._places = list(drawn)

    def draw_from(self, blocks: Blocks) -> tuple[mx.array, mx.array]:
        tokens, highest = super().draw_from(blocks)
        script = [self.answers[seed][n] for seed, n in zip(self._seeds, self._places, strict=True)]
        self._places = [place + 1 for place in self._places]
        return mx.where(tokens >= 0, mx.array(script, dtype=mx.uint32), tokens), highest


class Speed(NamedTuple):
    """Tokens per second, and per second of processor time."""

    wall: float
    busy: float


class Side:
    """One engine, and what it has done of its answers."""

    def __init__(self, engine: TextEngine) -> None:
        self.engine = engine
        self.ended = False
        self._drawn = 0
        self._wall = self._busy = 0.0

    def begin(self, tasks: Sequence[Task], temperature: float) -> None:
        tokens = len(tasks[0].answer) - _MARGIN
        for i, task in enumerate(tasks):
            sampling = Sampling(temperature=temperature, seed=i)
            self.engine.submit(Job(i, "", tuple(task.prompt), tokens, frozenset(), sampling))
        while self.engine.schedule.pending:
            self.engine.prefill()

    def run(self, rounds: int) -> None:
        """So many rounds, or fewer until the first row has its answer."""
        mx.synchronize()  # the step under way was launched before
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            for event in () if self.ended else self.engine.round():
                assert isinstance(event, Token), event
                self._drawn += 1
                self.ended |= event.finish is not None
        mx.synchronize()
        self._wall += time.perf_counter() - began
        self._busy += time.process_time() - busy

    @property
    def speed(self) -> Speed:
        return Speed(self._drawn / self._wall, self._drawn / self._busy)


def answer(
    engines: Sequence[TextEngine], tasks: Sequence[Task], temperature: float, block: int
) -> list[Speed]:
    """Have rows of each engine give their answers, until the first of them has."""
    Scripted.answers = [task.answer for task in tasks]
    sides = [Side(engine) for engine in engines]
    for side in sides:
        side.begin(tasks, temperature)
    while not all(side.ended for side in sides):
        for side in sides:
            side.run(block)
        sides.reverse()
    for side in sides:
        side.engine.cancel(range(len(tasks)))
    return [side.speed for side in sorted(sides, key=lambda side: engines.index(side.engine))]


def make_engine(model: Any, *, lookup: bool) -> TextEngine:
    pace = Pace(_PREFILL_CHUNK, max_gap=1.0)
    return TextEngine(model, max_rows=8, pace=pace, lookup=lookup, seconds=None)


class Measured(msgspec.Struct, frozen=True):
    """Speed with lookup over that of plain steps: of the first answers, and of each pair later."""

    model: str
    task: str
    rows: int
    first: float
    later: list[float]
    """By processor time, which other programs hardly change."""
    wall: list[float]
    proposed: int
    accepted: int


def measure(name: str, model: Any, kind: str, count: int, arguments: Any) -> Measured:
    """Both ways, a few answers each."""
    vocabulary = model.args.vocab_size
    tasks = make_tasks(kind, count, arguments.max_tokens + _MARGIN, vocabulary)
    plain, other = make_engine(model, lookup=False), make_engine(model, lookup=True)
    pairs = [
        answer((other, plain), tasks, arguments.temperature, arguments.block)
        for _ in range(arguments.pairs + 1)
    ]
    busy = [a.busy / b.busy for a, b in pairs]
    wall = [a.wall / b.wall for a, b in pairs]
    seen = other.statistics()
    return Measured(
        name, kind, count, busy[0], busy[1:], wall[1:], seen["drafted"], seen["accepted"]
    )


def load(name: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        path = DEMO if name == "demo" else write_model(Path(folder) / "model", name, plain=True)
        model, _ = load_model(path)
    lay_out_weights(model)
    mx.eval(weights(model))
    return model


def format_measured(measured: Sequence[Measured]) -> str:
    head = ["model", "task", "rows", "accepted", "first", "speed / plain", "least", "most", "wall"]
    rows = [head]
    for each in measured:
        figures = (each.first, median(each.later), min(each.later), max(each.later))
        accepted = f"{each.accepted}/{each.proposed}"
        rows.append(
            [each.model, each.task, str(each.rows), accepted]
            + [f"{figure:.2f}" for figure in (*figures, median(each.wall))]
        )
    return format_table(rows)


def main() -> None:
    arguments = _parse()
    for module in (decode, speculation):
        setattr(module, "Sampler", Scripted)  # noqa: B010
    measured = []
    for name in arguments.models:
        model = load(name)
        for kind in arguments.tasks:
            for count in arguments.rows:
                measured.append(measure(name, model, kind, count, arguments))
                print(format_measured(measured[-1:]), flush=True)
    print(format_machine(describe_machine()))
    print(f"medians of {arguments.pairs} pairs, answers of {arguments.max_tokens} tokens\n")
    print(format_measured(measured))
    if arguments.json:
        write_json(arguments.json, measured)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lookup",
        description="Measure what prompt lookup is worth, without a server.",
    )
    parser.add_argument("--models", nargs="+", default=["demo", "qwen3-46m"])
    parser.add_argument("--tasks", nargs="+", default=["edit", "random", "mirage"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--block", type=int, default=10, metavar="ROUNDS")
    parser.add_argument("--max-tokens", type=int, default=250)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all ratios here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
