"""Run the app with uvicorn and h11: connections, their limits, file descriptors."""
