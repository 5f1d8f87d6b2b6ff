"""Quantization that uses the inputs of layers: GPTQ and AWQ."""
