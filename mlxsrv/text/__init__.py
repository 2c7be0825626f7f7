"""Token ids to text, in stages that know nothing of each other.

`detokenize` makes text of ids, `channels` tells reasoning from content, `stops` ends the content
at a stop string, and `pipeline` runs the three in that order. Every stage has `feed` and `flush`,
and the text that comes out of it does not depend on how its input was cut into feeds.
"""
