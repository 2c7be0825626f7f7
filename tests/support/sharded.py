"""mlx-lm's own generation on several ranks, one prompt after the other: a program for mlx.launch.

`mlx.launch -n 2 --backend ring -- python -m tests.support.sharded tensor MODEL WORK`. The file WORK
has a prompt and a number of tokens for each text. Rank 0 writes the texts of all tokens beside it,
to a file that ends in `.done`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.utils import sharded_load


def main(split: str, model_folder: str, work: str) -> None:
    group = mx.distributed.init(strict=True)
    groups = {f"{split}_group": group}
    model, tokenizer = sharded_load(model_folder, **groups)
    texts = [
        [
            tokenizer.decode([step.token])
            for step in stream_generate(model, tokenizer, prompt, max_tokens=count)
        ]
        for prompt, count in json.loads(Path(work).read_text())
    ]
    # A step more than is asked for runs still, and a rank that ends would break it off.
    mx.synchronize(generation_stream)
    mx.eval(mx.distributed.all_sum(mx.array(1), stream=mx.cpu))
    if group.rank() == 0:
        Path(work).with_suffix(".done").write_text(json.dumps(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
