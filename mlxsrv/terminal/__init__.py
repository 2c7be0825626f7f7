"""Commands about a server: chat with it, watch it, stop it, and look after its machine."""
