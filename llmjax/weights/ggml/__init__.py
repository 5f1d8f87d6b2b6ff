"""ggml's tensor types: their blocks, the numbers that these stand for, and the quantizers that write them."""
