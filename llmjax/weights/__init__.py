"""What a quantised matrix is: rows of codes and scales, bit formats, packing, quantisers."""
