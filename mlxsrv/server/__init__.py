"""Run the app with uvicorn: connections, framing of HTTP, file descriptors."""
