"""Choose the next token of every row from its logits."""
