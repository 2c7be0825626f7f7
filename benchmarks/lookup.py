"""What prompt lookup is worth: `python -m benchmarks.lookup`.

Tokens per second of decoding with rounds over those of plain steps, in one process and by turns on
the same prompts. A prompt is a file of 2,000 tokens; its answer is the file again, with a fifth of
its tokens changed. A random model would say something else: so each token drawn is replaced by the
answer's, after it has been computed and drawn as any other. Two more tasks show what is lost where
proposals do not hold: in `random` nothing repeats; in `mirage` any three tokens of the answer occur
in the prompt, too, and are never followed by the answer's next token there.

A run ends when the first row has its answer; the tokens of all rows count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from benchmarks.report import describe_machine, format_machine, format_table, write_json
from mlxsrv.engine.cache.kv_caches import PaddedKVCache, merge
from mlxsrv.engine.execution.facts import weights
from mlxsrv.engine.execution.launch import launch
from mlxsrv.engine.loading.layout import lay_out_weights
from mlxsrv.engine.sampling.sampler import Sampler
from mlxsrv.engine.scheduling.prompt_lookup import PromptLookup
from mlxsrv.generation.parameters import Sampling
from tests.support.tiny import write_model

DEMO = Path(__file__).parent.parent / "mlxsrv" / "models" / "demo"
SOURCES = Path(__file__).parent.parent / "mlxsrv"

_FILE_TOKENS = 2000
_KEPT_RUN, _CHANGED_RUN = 100, 25  # tokens: a fifth is changed
_PREFILL_CHUNK = 512
_BLOCK = 8  # steps or rounds of each way by turns, so that all have the same bad moments


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


class Rows:
    """Rows that give the answers of their tasks, in plain steps and in rounds, as the engine does.

    Args:
        sampling: how each token is drawn, before the answer's replaces it.
    """

    def __init__(
        self, model: Any, caches: Sequence[Any], tasks: Sequence[Task], sampling: Sampling
    ):
        self._model = model
        self._cache: list[PaddedKVCache] = merge(caches)
        self._tasks = tasks
        self._settings = [sampling] * len(tasks)
        self._sampler: Sampler | None = None
        self.drawn = [0] * len(tasks)  # delivered tokens
        self._inputs = mx.array([task.answer[0] for task in tasks], dtype=mx.uint32)
        self.known = True  # whether the inputs are known on the host
        # They have all tokens that the host knows.
        self._lookups = [PromptLookup([*task.prompt, task.answer[0]]) for task in tasks]
        self.rounds = self.proposed = self.accepted = 0

    @property
    def done(self) -> bool:
        return any(
            drawn + 12 >= len(task.answer)
            for drawn, task in zip(self.drawn, self._tasks, strict=True)
        )

    def _replace(self, drawn: mx.array, tokens: int) -> mx.array:
        """The answers' tokens for those drawn behind `tokens` inputs: `(rows, tokens)`."""
        script = [
            task.answer[count + 1 : count + 1 + tokens]
            for task, count in zip(self._tasks, self.drawn, strict=True)
        ]
        return mx.where(drawn >= 0, mx.array(script, dtype=mx.uint32), drawn)

    def step(self, *, look: bool) -> None:
        """A plain step: launch it, and deliver its inputs meanwhile."""
        logits = self._model(self._inputs[:, None], cache=self._cache)[:, -1]
        if self._sampler is None:
            self._sampler = Sampler(self._settings, [count + 1 for count in self.drawn])
        drawn = self._replace(self._sampler(logits)[:, None], 1)[:, 0]
        launch(drawn)
        inputs = cast(list[int], self._inputs.tolist())
        if look:
            self._learn(inputs)
        self.drawn = [count + 1 for count in self.drawn]
        self._inputs, self.known = drawn, False

    def wait(self) -> None:
        """Wait for the inputs."""
        self._learn(cast(list[int], self._inputs.tolist()))

    def _learn(self, inputs: Sequence[int]) -> None:
        if not self.known:
            for lookup, token in zip(self._lookups, inputs, strict=True):
                lookup.extend([token])
        self.known = True

    def finish(self) -> None:
        """Wait for the step under way."""
        mx.eval(self._inputs)

    def propose(self, most: int) -> list[list[int]]:
        """Proposals behind the inputs of each row."""
        return [lookup.propose(most) for lookup in self._lookups]

    def round(self, proposals: Sequence[Sequence[int]]) -> None:
        """Check all rows' proposals in one pass, and wait for it. The inputs are known."""
        tokens = 1 + max(map(len, proposals))
        padded = [[*each, *[0] * (tokens - 1 - len(each))] for each in proposals]
        fed = mx.concatenate([self._inputs[:, None], mx.array(padded, dtype=mx.uint32)], axis=1)
        logits = self._model(fed, cache=self._cache)
        places = [count + 1 + i for count in self.drawn for i in range(tokens)]
        settings = [each for each in self._settings for _ in range(tokens)]
        sampler = Sampler(settings, places, ahead=1)
        drawn = sampler(logits.reshape(-1, logits.shape[-1])).reshape(-1, tokens)
        drawn = self._replace(drawn, tokens)
        mx.eval(drawn)
        expected = cast(list[list[int]], drawn.tolist())
        held = [count_equal(*pair) for pair in zip(proposals, expected, strict=True)]
        for layer in self._cache:
            layer.cut([tokens - 1 - count for count in held])
        for row, count in enumerate(held):
            self._lookups[row].extend(expected[row][: count + 1])
            self.drawn[row] += count + 1
        self.rounds += 1
        self.proposed += sum(map(len, proposals))
        self.accepted += sum(held)
        following = [found[count] for found, count in zip(expected, held, strict=True)]
        self._inputs, self.known = mx.array(following, dtype=mx.uint32), True
        self._sampler = None


Decode: TypeAlias = Callable[[Rows], None]
"""Decodes one step, or one round."""


def decode_plainly(rows: Rows) -> None:
    rows.step(look=False)


def make_rounds(most: int) -> Decode:
    """Rounds with at most so many proposals a row, wherever there is a proposal."""

    def decode(rows: Rows) -> None:
        if any(rows.propose(most)):
            rows.wait()
        if any(proposals := rows.propose(most)):
            rows.round(proposals)
        else:
            rows.step(look=True)

    return decode


def prefill(model: Any, prompt: Sequence[int]) -> Any:
    cache = make_prompt_cache(model)
    for begin in range(0, len(prompt), _PREFILL_CHUNK):
        model(mx.array(list(prompt[begin : begin + _PREFILL_CHUNK]))[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


class Clock:
    """Tokens per second, and per second of processor time, of one way to decode."""

    def __init__(self, rows: Rows, decode: Decode) -> None:
        self.rows, self._decode = rows, decode
        self._seconds = self._busy = 0.0

    def run(self) -> None:
        """A few steps or rounds, and wait for them."""
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(_BLOCK):
            if not self.rows.done:
                self._decode(self.rows)
        self.rows.finish()
        self._seconds += time.perf_counter() - started
        self._busy += time.process_time() - busy

    def read(self) -> tuple[float, float]:
        tokens = sum(self.rows.drawn)
        return tokens / self._seconds, tokens / self._busy


class Measured(msgspec.Struct, frozen=True):
    """Speed of one way over that of plain steps, one ratio for each pair."""

    model: str
    task: str
    rows: int
    way: str
    ratios: list[float]
    busy: list[float]
    """The same by processor time, which other programs hardly change."""
    rounds: int
    proposed: int
    accepted: int


def measure(name: str, model: Any, kind: str, count: int, arguments: Any) -> list[Measured]:
    ways: dict[str, Decode] = {"plain": decode_plainly}
    ways |= {f"at most {most}": make_rounds(most) for most in arguments.proposals}
    vocabulary = model.args.vocab_size
    tasks = make_tasks(kind, count, arguments.max_tokens, vocabulary)
    caches = [prefill(model, task.prompt) for task in tasks]
    sampling = Sampling(temperature=arguments.temperature, seed=1)
    speeds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    last: dict[str, Rows] = {}
    for pair in range(arguments.pairs):
        clocks = {
            way: Clock(Rows(model, caches, tasks, sampling), ways[way])
            for way in list(ways)[:: 1 if pair % 2 == 0 else -1]
        }
        while not all(clock.rows.done for clock in clocks.values()):
            for clock in clocks.values():
                clock.run()
        for way, clock in clocks.items():
            speeds[way].append(clock.read())
            last[way] = clock.rows
    return [
        Measured(
            name,
            kind,
            count,
            way,
            [a / b for (a, _), (b, _) in zip(speeds[way], speeds["plain"], strict=True)],
            [a / b for (_, a), (_, b) in zip(speeds[way], speeds["plain"], strict=True)],
            last[way].rounds,
            last[way].proposed,
            last[way].accepted,
        )
        for way in ways
        if way != "plain"
    ]


def count_equal(proposed: Sequence[int], drawn: Sequence[int]) -> int:
    pairs = zip(proposed, drawn, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposed))


def load(name: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="mlxsrv-bench-") as folder:
        path = DEMO if name == "demo" else write_model(Path(folder) / "model", name, plain=True)
        model, _ = load_model(path)
    lay_out_weights(model)
    mx.eval(weights(model))
    return model


def format_measured(measured: Sequence[Measured]) -> str:
    head = [
        "model",
        "task",
        "rows",
        "way",
        "rounds",
        "accepted",
        "speed / plain",
        "least",
        "most",
        "by processor time",
    ]
    rows = [head]
    for each in measured:
        figures = (median(each.ratios), min(each.ratios), max(each.ratios), median(each.busy))
        accepted = f"{each.accepted}/{each.proposed}"
        rows.append(
            [each.model, each.task, str(each.rows), each.way, str(each.rounds), accepted]
            + [f"{figure:.2f}" for figure in figures]
        )
    return format_table(rows)


def main() -> None:
    arguments = _parse()
    measured = []
    for name in arguments.models:
        model = load(name)
        for kind in arguments.tasks:
            for count in arguments.rows:
                measured += measure(name, model, kind, count, arguments)
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
    parser.add_argument("--proposals", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=250)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all ratios here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
