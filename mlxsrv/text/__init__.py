"""Token ids to text, in stages that know nothing of each other.

`detokenize` turns ids into text, `channels` separates reasoning from content, `tools` reads tool
calls, and `stops` ends the content at a stop string. `pipeline` runs them in that order. All are a
`Stage`.
"""
