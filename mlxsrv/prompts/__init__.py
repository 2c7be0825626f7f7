"""Turn a request into token ids and a constraint: tokenizers, chat templates, grammars."""
