"""ggml's tensor types: their blocks, what they stand for, and the quantisers that write them."""
