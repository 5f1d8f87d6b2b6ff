"""Benchmarks: latency of one batch, throughput of many prompts, and a server under load."""
