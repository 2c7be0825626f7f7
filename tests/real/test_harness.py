"""lm-evaluation-harness scores and generates over HTTP, and its figures are mlx-lm's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate

from tests.real.conftest import Load, real
from tests.support.serving import Server

HARNESS = Path(__file__).parents[2] / ".venv-harness" / "bin" / "lm_eval"
QUESTIONS = (
    ("What is the capital of France?", ("Berlin", "Paris", "Madrid"), 1),
    ("What colour is a clear sky?", ("blue", "green", "purple"), 0),
    ("How many legs does a spider have?", ("six", "eight", "a hundred and two"), 1),
    ("Which animal barks?", ("a cat", "a fish", "a dog"), 2),
    ("What do bees make?", ("honey", "milk", "cheese"), 0),
    ("Which planet do we live on?", ("Mars", "Venus", "Earth"), 2),
)
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOOSING = """\
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
WRITING = """\
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def test_its_scores_are_mlx_lms(server: Server, mlx_lm: Load, tmp_path: Path) -> None:
    if not HARNESS.exists():
        pytest.skip("lm-evaluation-harness could not be had: `make test-real` says why")
    real("smollm2-float32")
    model, tokenizer = mlx_lm("smollm2-float32")
    samples = evaluate(server, tmp_path)
    assert len(samples["choosing"]) == len(samples["writing"]) == len(QUESTIONS)
    for sample in samples["choosing"]:
        question, choices, answer = QUESTIONS[sample["doc_id"]]
        prompt = tokenizer.encode(f"Question: {question}\nAnswer:")
        expected = [score(model, prompt, tokenizer.encode(f" {each}")) for each in choices]
        found = [float(each[0]) for each in sample["filtered_resps"]]
        assert found == pytest.approx(expected, abs=2e-3)
        assert sample["acc"] == (expected.index(max(expected)) == answer)
    assert sum(sample["acc"] for sample in samples["choosing"]) >= 4, "it knows some of this"
    for sample in samples["writing"]:
        question = QUESTIONS[sample["doc_id"]][0]
        theirs = generate(model, tokenizer, f"Question: {question}\nAnswer:", max_tokens=8)
        assert sample["resps"][0][0].strip() == theirs.split("\n")[0].strip()


def score(model: Any, prompt: list[int], ids: list[int]) -> float:
    logits = model(mx.array([*prompt, *ids[:-1]])[None])[0, len(prompt) - 1 :]
    shares = logits - mx.logsumexp(logits, -1, keepdims=True)
    return float(mx.take_along_axis(shares, mx.array(ids)[:, None], 1).sum())


def evaluate(server: Server, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of two tasks of our own, with the server's tokenizer."""
    tasks = folder / "tasks"
    tasks.mkdir()
    rows = [{"question": q, "choices": [*c], "answer": a} for q, c, a in QUESTIONS]
    data = folder / "questions.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, kind, rest in (
        ("choosing", "multiple_choice", CHOOSING),
        ("writing", "generate_until", WRITING),
    ):
        task = _TASK.format(name=name, kind=kind, data=data) + rest
        (tasks / f"{name}.yaml").write_text(task)
    told = f"base_url={server.url}/v1/completions,model=smollm2-float32,tokenizer_backend=remote"
    command = [HARNESS, "run", "--model", "local-completions", "--model_args", told]
    command += ["--tasks", "choosing,writing", "--include_path", tasks, "--log_samples"]
    own = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ended = subprocess.run(
        [*map(str, command), "--output_path", str(folder / "out")],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for file in (folder / "out").rglob("samples_*.jsonl"):
        lines = file.read_text("utf-8").splitlines()
        found[file.name.split("_")[1]] = [json.loads(line) for line in lines]
    return found
