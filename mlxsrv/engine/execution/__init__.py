"""Run the model: prefill, decode steps, speculative decoding, recovery from faults."""
