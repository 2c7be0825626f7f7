"""Load each model once, let requests use it, evict it when others need its memory."""
