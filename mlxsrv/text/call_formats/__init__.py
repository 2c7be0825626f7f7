"""The formats in which families write tool calls: how they are read, and their grammars.

`calls` says what a format is. `json_calls`, `tagged_calls`, `literal_calls`, `headed_calls` and
`nested_calls` have the formats; the other files are their readers and rules.
"""
