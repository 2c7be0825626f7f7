"""Token ids to text, and text to thoughts, content and tool calls, in the formats of the families.

`detokenize` turns ids into text, `reader` parts it by a frame (`frames`) and a format of calls
(`call_formats`), and `stops` ends content at a stop string. `pipeline` runs them in that order. All
are a `Stage`. `formats` is the table of all formats.
"""
