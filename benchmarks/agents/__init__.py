"""Sessions of coding agents, written anew in the shapes that they send, and replayed against a server."""
