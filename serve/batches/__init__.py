"""Many requests in one file: read, answered by the server's own routes, written."""
