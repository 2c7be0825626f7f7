"""Keep prompts' KV caches in files, so that they outlive the process."""
