"""Whether evaluations through the server get the model's own figures: `python -m benchmarks.score`.

lm-evaluation-harness runs small tasks of local files on the same model through mlxsrv, with its own
`local-completions` client, and in process, with mlx-lm's evaluation. Each continuation must have
the same log-likelihood, and be greedy or not, and so each task the same accuracy or perplexity.
The client asks for one token after the prompt and leaves the last entry out, so an answer that
tells no such token costs the continuation its own last one, and nothing but wrong figures shows it.

Needs `pip install 'lm-eval[api]'` beside mlxsrv. Nothing is fetched. Exit status 1 where a figure
differs.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
import msgspec
import numpy as np

from benchmarks import servers
from benchmarks.report import describe_machine, format_machine, format_table, write_json
from tests.support.tiny import FAMILIES, write_model

Document: TypeAlias = dict[str, Any]
Documents: TypeAlias = Mapping[str, Sequence[Document]]
"""The documents of each task, by its name."""

_DEMO = Path(__file__).parent.parent / "mlxsrv" / "models" / "demo"
_GREEDY_TOKENS = 4
_MAX_LENGTH = 2048

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up again.",
    "A server streams each token as soon as the model has made it; nobody likes to wait for it.",
    "What is the weather in Paris? It is 21 degrees and sunny, so take a hat with you.",
    "The first ship of the morning brought oranges, letters and a very tired brass band.",
    "When a client goes away, its row is freed within one step, wherever its request was.",
    "def add(a: int, b: int) -> int: return a + b  # the sum of a and b, never anything else",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}',
    "Seven of the twelve jurors were asleep before the second witness had finished his oath.",
    "Continuous batching means that all requests of a model are decoded together, step by step.",
    "She planted the pear tree in 1971, and it has been sulking in its corner ever since.",
    "Žluťoučký kůň úpěl ďábelské ódy, ale nikdo z celé vesnice ho tu noc vůbec neslyšel.",
    "La naïveté de l'élève étonna même le garçon de café, qui pourtant en avait vu d'autres.",
    "Die Straße führt über die große Brücke, an der Mühle vorbei und dann bis zum Fluß hinunter.",
    "Words 你好世界 and 今天的天气很好 stand between plain ones, as they do in many a chat log.",
    "Some like emoji 😀 😂 🚀 more than words, others write 👍🏽 only when nobody is looking.",
    "A prompt of several thousand tokens is read in slices, so that running streams go on.",
    "The lighthouse keeper's cat had opinions about the tide, and shared them every evening.",
    "If the queue is full, the answer is a 503 with a header that says when to come back.",
    "Water boils at 100 degrees, unless you carry the kettle up a mountain, where it boils sooner.",
    "Nothing is left behind: no row, no file, no thread and no half of a character either.",
)


# Tasks.


def write_documents(model: Any, tokenizer: Any) -> dict[str, list[Document]]:
    """Documents of one task of each kind that asks for likelihoods."""
    return {
        "choice": _write_choices(),
        "rolling": _write_texts(),
        "greedy": _write_greedy(model, tokenizer),
    }


def _write_choices() -> list[Document]:
    """Beginnings of sentences, and four ends of which one belongs to it."""
    documents = []
    for cut in (0.5, 0.75):
        halves = [_split(sentence, cut) for sentence in _SENTENCES]
        ends = [end for _, end in halves]
        for i, (beginning, _) in enumerate(halves):
            answer = i % 4
            choices = [ends[(i + 5 * (k - answer)) % len(ends)] for k in range(4)]
            documents.append({"context": beginning, "choices": choices, "answer": answer})
    return documents


def _write_texts() -> list[Document]:
    """Texts of one sentence to all of them: the last takes a server several chunks to read."""
    count = len(_SENTENCES)
    texts = [" ".join(_SENTENCES[(7 * i + k) % count] for k in range(1 + i % 8)) for i in range(39)]
    return [{"text": text} for text in [*texts, " ".join(_SENTENCES)]]


def _write_greedy(model: Any, tokenizer: Any) -> list[Document]:
    """Beginnings, and what the model itself would say next or what it would say elsewhere."""
    beginnings = [_split(sentence, cut)[0] for cut in (0.3, 0.5, 0.7) for sentence in _SENTENCES]
    said = [(text, _say_next(model, tokenizer, text)) for text in beginnings]
    kept = [(text, words) for text, words in said if words]
    return [
        {"context": text, "words": words if i % 2 else kept[i - 1][1]}
        for i, (text, words) in enumerate(kept)
    ]


def _say_next(model: Any, tokenizer: Any, text: str) -> str | None:
    """The likeliest next few tokens as text; None if it would not be cut into these tokens."""
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    tokens = list(prompt)
    for _ in range(_GREEDY_TOKENS):
        tokens.append(cast(int, mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
    words: str = tokenizer.decode(tokens)[len(text) :]
    known = tokenizer.encode(text + words, add_special_tokens=False) == tokens
    return words if known and words.strip() else None


def _split(sentence: str, cut: float) -> tuple[str, str]:
    words = sentence.split(" ")
    at = round(len(words) * cut)
    return " ".join(words[:at]), " ".join(words[at:])


_TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
    "greedy": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{words}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}


def write_tasks(folder: Path, documents: Documents) -> None:
    """A YAML file and a file of documents for each task."""
    for name, task in _TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_bytes(b"\n".join(map(msgspec.json.encode, documents[name])))
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_bytes(msgspec.json.encode(config))  # YAML takes JSON


# Evaluations.


class Way(msgspec.Struct, frozen=True):
    """The way in which the client asks."""

    batch: int
    concurrent: int
    ids: bool = True
    """Prompts as token ids, not as text."""
    max_tokens: int = 1
    """0: the prompt is scored and nothing drawn, which the client itself never asks for."""

    @property
    def name(self) -> str:
        form = "ids" if self.ids else "text"
        return f"{form}, {self.batch} x {self.concurrent}, max_tokens {self.max_tokens}"


WAYS = (
    Way(1, 1),
    Way(8, 1),
    Way(1, 4),
    Way(8, 4),
    Way(8, 4, ids=False),
    Way(8, 4, max_tokens=0),
)


class Scores(msgspec.Struct, frozen=True):
    """The outcome of one evaluation of one task.

    - `likelihoods`: of all continuations, in the documents' order.
    - `greedy`: whether each is what the model would say; empty where that is not asked.
    """

    likelihoods: list[float]
    greedy: list[bool]
    metrics: dict[str, float]


class Comparison(msgspec.Struct, frozen=True):
    """One task asked for in one way, beside the same task in process."""

    model: str
    task: str
    way: Way
    documents: int
    ours: Scores
    theirs: Scores
    tolerance: float

    @property
    def distances(self) -> list[float]:
        pairs = zip(self.ours.likelihoods, self.theirs.likelihoods, strict=True)
        return [abs(ours - theirs) for ours, theirs in pairs]

    @property
    def off(self) -> int:
        """Continuations whose likelihood differs."""
        return sum(not distance <= self.tolerance for distance in self.distances)  # nor is nan near

    @property
    def misjudged(self) -> int:
        """Continuations that are greedy for one and not for the other."""
        return sum(a != b for a, b in zip(self.ours.greedy, self.theirs.greedy, strict=True))

    @property
    def metrics_agree(self) -> bool:
        ours, theirs = self.ours.metrics, self.theirs.metrics
        return ours.keys() == theirs.keys() and all(
            math.isclose(ours[name], theirs[name], rel_tol=self.tolerance) for name in ours
        )

    @property
    def agrees(self) -> bool:
        return not self.off and not self.misjudged and self.metrics_agree


class Harness:
    """lm-evaluation-harness with the tasks in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._tasks = importlib.import_module("lm_eval.tasks").TaskManager(
            include_path=str(folder), include_defaults=False
        )
        self._evaluate = importlib.import_module("lm_eval").simple_evaluate

    def evaluate(self, model: Any) -> dict[str, Scores]:
        """Scores by task; `model` is one of the harness's language models."""
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # a bar for each text
            results = self._evaluate(
                model=model,
                tasks=list(_TASKS),
                task_manager=self._tasks,
                apply_chat_template=False,
                bootstrap_iters=0,
            )
        return {
            task: _read_scores(results["samples"][task], results["results"][task])
            for task in _TASKS
        }


def _read_scores(samples: Sequence[Document], results: Mapping[str, Any]) -> Scores:
    # A text has its likelihood alone, a continuation also whether it is greedy.
    found = [
        response
        for sample in sorted(samples, key=lambda sample: int(sample["doc_id"]))
        for [response] in sample["resps"]
    ]
    pairs = [response for response in found if not isinstance(response, float)]
    return Scores(
        likelihoods=[float(one if isinstance(one, float) else one[0]) for one in found],
        greedy=[bool(greedy) for _, greedy in pairs],
        metrics={
            key.removesuffix(",none"): float(value)
            for key, value in results.items()
            if key.endswith(",none") and "stderr" not in key
        },
    )


def connect(url: str, folder: Path, way: Way) -> Any:
    """The harness's client of `url`, which serves the model in `folder`."""
    client: Any = importlib.import_module("lm_eval.models.openai_completions").LocalCompletionsAPI

    class PromptOnly(client):  # type: ignore[misc]
        """Draws nothing, so an entry is put where the client's parser leaves one out."""

        def _create_payload(self, *args: Any, **options: Any) -> dict[str, Any]:
            return {**super()._create_payload(*args, **options), "max_tokens": 0}

        @staticmethod
        def parse_logprobs(outputs: Any, *args: Any, **options: Any) -> Any:
            for output in outputs if isinstance(outputs, list) else [outputs]:
                for choice in output["choices"]:
                    choice["logprobs"]["token_logprobs"].append(None)
                    choice["logprobs"]["top_logprobs"].append(None)
            return client.parse_logprobs(outputs, *args, **options)

    return (PromptOnly if way.max_tokens == 0 else client)(
        base_url=f"{url}/v1/completions",
        model="bench",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        tokenized_requests=way.ids,
        batch_size=way.batch,
        num_concurrent=way.concurrent,
        max_length=_MAX_LENGTH,
        max_retries=1,
    )


def load_reference(folder: Path) -> Any:
    """mlx-lm's evaluation of the model in `folder`, in this process."""
    theirs: Any = importlib.import_module("mlx_lm.evaluate").MLXLM

    class Reference(theirs):  # type: ignore[misc]
        """Its log-probabilities of a text, but those of all tokens and summed in float64.

        The client puts a start or end token before the first, where mlx-lm leaves that one out;
        and a float32 sum of a thousand logarithms is off by more than is to be shown here.
        """

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            start = self.tokenizer.bos_token_id
            start = self.tokenizer.eos_token_id if start is None else start
            texts = self._tokenize([request.args[0] for request in requests])
            scored = [self._score_fn([(start, *tokens)])[0] for tokens in texts]
            return [float(np.asarray(scores, dtype=np.float64).sum()) for scores in scored]

    # As for a chat template, the text is cut into tokens as it stands, which the client does, too.
    return Reference(str(folder), use_chat_template=True)


# The comparison.


def compare(name: str, folder: Path, tolerance: float) -> Iterator[Comparison]:
    """All tasks in all ways, one evaluation at a time."""
    reference = load_reference(folder)
    documents = write_documents(reference._model, reference.tokenizer)
    with (
        tempfile.TemporaryDirectory(prefix="mlxsrv-tasks-") as tasks,
        servers.serve(servers.ours(folder)) as running,
    ):
        write_tasks(Path(tasks), documents)
        harness = Harness(Path(tasks))
        theirs = harness.evaluate(reference)
        for way in _choose_ways(reference.tokenizer):
            ours = harness.evaluate(connect(running.url, folder, way))
            for task in _TASKS:
                count = len(documents[task])
                yield Comparison(name, task, way, count, ours[task], theirs[task], tolerance)


def _choose_ways(tokenizer: Any) -> list[Way]:
    """Prompts as text would get a start token that the client did not count."""
    begins = tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False)
    return [way for way in WAYS if way.ids or not begins]


def format_likelihoods(comparisons: Sequence[Comparison]) -> str:
    """A line for each task asked for in each way."""
    rows = [
        ["model", "task", "asked", "items", "likelihoods", "off", "worst", "greedy", "misjudged"]
    ]
    for one in comparisons:
        likelihoods = [len(one.ours.likelihoods), one.off]
        greedy = [sum(one.theirs.greedy), one.misjudged]
        rows.append(
            [
                *(one.model, one.task, one.way.name),
                *map(str, [one.documents, *likelihoods]),
                f"{max(one.distances):.1e}",
                *map(str, greedy),
            ]
        )
    return format_table(rows)


def format_metrics(comparisons: Sequence[Comparison]) -> str:
    """A line for each metric: mlx-lm's, and what the ways through mlxsrv made of it."""
    rows = [["model", "task", "metric", "mlx-lm", "mlxsrv"]]
    figures: dict[tuple[str, str, str], list[str]] = {}
    for one in comparisons:
        for metric, value in one.theirs.metrics.items():
            written = figures.setdefault((one.model, one.task, metric), [f"{value:.5g}"])
            written.append(f"{one.ours.metrics.get(metric, math.nan):.5g}")
    for key, (theirs, *ours) in figures.items():
        rows.append([*key, theirs, " / ".join(dict.fromkeys(ours))])
    return format_table(rows)


@contextmanager
def _find_models(arguments: argparse.Namespace) -> Iterator[dict[str, Path]]:
    """Folders by name: those given or, without any, the demo and a random one of the family."""
    if arguments.model:
        yield {path.name: path for path in arguments.model}
        return
    with tempfile.TemporaryDirectory(prefix="mlxsrv-score-") as folder:
        random = write_model(Path(folder), arguments.family)
        yield {"demo": _DEMO, f"random {arguments.family}": random}


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the harness from the network and from the user's caches: before its modules, which read
    the environment once, are imported."""
    with tempfile.TemporaryDirectory(prefix="mlxsrv-cache-") as cache:
        os.environ |= {
            "HF_DATASETS_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluations; 1 where any figure differs."""
    arguments = _parse(argv)
    servers.exit_on_sigterm()
    try:
        version = metadata.version("lm_eval")
        with _offline(), _find_models(arguments) as models:
            comparisons = [*_run(models, arguments.tolerance)]
    except metadata.PackageNotFoundError:
        raise SystemExit("lm-evaluation-harness is missing: pip install 'lm-eval[api]'") from None
    except servers.StartError as error:
        raise SystemExit(str(error)) from None
    print(f"{format_machine(describe_machine())}, lm_eval {version}\n")
    print(format_likelihoods(comparisons))
    print(format_metrics(comparisons))
    if arguments.json:
        write_json(arguments.json, comparisons)
    return int(not all(comparison.agrees for comparison in comparisons))


def _run(models: Mapping[str, Path], tolerance: float) -> Iterator[Comparison]:
    for name, folder in models.items():
        for one in compare(name, folder, tolerance):
            said = "agrees" if one.agrees else "DIFFERS"
            print(f"{name}, {one.task}, {one.way.name}: {said}", file=sys.stderr, flush=True)
            yield one


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.score",
        description="Compare evaluations through mlxsrv with mlx-lm's own.",
    )
    parser.add_argument(
        "--model", type=Path, action="append", metavar="FOLDER", help="evaluate this; repeatable"
    )
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="of the random model")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="of a log-likelihood (default: 0.001)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
