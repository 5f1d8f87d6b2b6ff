"""How good a model is as it is served: kernels, quantized weights and KV type included."""
