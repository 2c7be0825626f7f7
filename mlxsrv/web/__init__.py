"""HTTP: the app, its routes, responses and middleware."""
