"""Load each model once, lend it to requests, evict it when others need its memory."""
