"""Run the model as plans say: prefill, decode steps, speculative decoding."""
