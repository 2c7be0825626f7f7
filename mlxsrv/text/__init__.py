"""Token ids to text, in stages that know nothing of each other.

`detokenize` turns ids into text, `channels` tells reasoning from content, `tools` reads tool calls,
and `stops` ends the content at a stop string. `pipeline` runs them in that order. Every stage has
`feed` and `flush`, and its output does not depend on how its input was split into feeds.
"""
