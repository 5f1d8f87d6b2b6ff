"""ggml's tensor types: their blocks, what they stand for, and the quantizers that write them."""
