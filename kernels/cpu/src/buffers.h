// Checks shared by the FFI handlers.

#ifndef LLMJAX_BUFFERS_H_
#define LLMJAX_BUFFERS_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace llmjax {

inline xla::ffi::Error invalid(const std::string& message) {
  return xla::ffi::Error::InvalidArgument("llmjax: " + message);
}

template <class Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  if (dims.size() != shape.size()) return false;
  size_t axis = 0;
  for (int64_t size : shape) {
    if (dims[axis++] != size) return false;
  }
  return true;
}

inline std::optional<Type> float_type(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32: return Type::kF32;
    case xla::ffi::DataType::BF16: return Type::kBf16;
    case xla::ffi::DataType::F16: return Type::kF16;
    default: return std::nullopt;
  }
}

}  // namespace llmjax

#endif  // LLMJAX_BUFFERS_H_
