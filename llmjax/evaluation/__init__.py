"""How good a model is as it is served: kernels, quantised weights and KV type included."""
