"""The ASGI app: routes, responses that send themselves, middleware."""
