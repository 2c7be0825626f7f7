"""Run the app several times under Ray Serve, as one server."""
