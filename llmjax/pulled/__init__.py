"""Models that a running server fetches when it is told to, and keeps over restarts."""
