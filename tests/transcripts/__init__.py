"""Transcripts of every route, to show that a change of structure changes nothing on the wire.

    python -m tests.transcripts FOLDER           write them
    python -m tests.transcripts BEFORE AFTER     name the differences; exit with 1 if there are any

Ids, clocks and durations are masked, and pieces of text that follow each other are joined: where a
stream is cut depends on the machine's speed.
"""
