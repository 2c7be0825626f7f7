"""The built-in demo model: weights, tokenizer and template, and the script that makes them."""
