// ggml's reference quantizers: weights in the blocks of a GGUF file, bit for bit as llmjax/weights/ggml/reference.py has
// them, with its names.

#ifndef LLMJAX_QUANTIZERS_H_
#define LLMJAX_QUANTIZERS_H_

#include <cstddef>
#include <cstdint>

namespace llmjax {

enum class Quantized { kDone, kNotFinite, kTooLarge };  // kTooLarge: a scale would exceed float16

struct Quantizer {
  int type;  // as GGUF files number them
  // weights: those of `blocks` blocks, one after the other; so is what is written.
  Quantized (*quantize)(const float* weights, size_t blocks, uint8_t* out);
};

struct Quantizers {
  const Quantizer* first;
  size_t count;
};

}  // namespace llmjax

#endif  // LLMJAX_QUANTIZERS_H_
