"""What a quantized matrix is: rows of codes and scales, bit formats, packing, quantizers."""
