"""llama-server's own API on top of completions: requests in, its answers out."""
