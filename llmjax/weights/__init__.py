"""Quantized matrices: rows of codes and scales, bit formats, packing and quantizers."""
