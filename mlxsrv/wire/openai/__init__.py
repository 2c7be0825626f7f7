"""OpenAI's API, with the fields and routes that vLLM and llama.cpp add to it."""
