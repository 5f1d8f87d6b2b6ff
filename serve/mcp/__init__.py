"""Tool servers (MCP) that the operator names, and the calls of their tools, which this server makes itself."""
