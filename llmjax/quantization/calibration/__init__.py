"""Quantization that looks at what layers are given: GPTQ and AWQ."""
