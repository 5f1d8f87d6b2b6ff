// Two vectors of elements at a time: those of bf16 are widened by a shift and a mask, which leaves the elements of even
// places before those of odd ones.

#ifndef LLMJAX_PAIRS_H_
#define LLMJAX_PAIRS_H_

#include "simd.h"

namespace {

constexpr int kPair = 2 * kLanes;  // elements that are loaded together

// Whether elements of a pair come in the order of memory.
template <class T>
constexpr bool kInOrder = true;
template <>
inline constexpr bool kInOrder<Bf16> = false;

template <class T>
inline void load_pair(const T* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}
inline void load_pair(const Bf16* p, Vec& a, Vec& b) {
  const Bits both = load_as<Bits>(p);
  a = bit_cast<Vec>(both << 16);
  b = bit_cast<Vec>(both & 0xffff0000u);
}

// The half of it that comes first, or second.
template <int kHalf, class T>
inline Vec load_half(const T* p) {
  return load(p + kHalf * kLanes);
}
template <int kHalf>
inline Vec load_half(const Bf16* p) {
  const Bits both = load_as<Bits>(p);
  return bit_cast<Vec>(kHalf == 0 ? both << 16 : both & 0xffff0000u);
}

// Brings a row into the order in which pairs of T are loaded, or back. What does not fill a pair stays.
template <class T>
inline void to_pairs(float* row, int size) {
  if (kInOrder<T>) return;
  for (int d = 0; d + kPair <= size; d += kPair) {
    float parted[kPair];
    for (int i = 0; i < kLanes; ++i) parted[i] = row[d + 2 * i], parted[kLanes + i] = row[d + 2 * i + 1];
    std::memcpy(row + d, parted, sizeof(parted));
  }
}
template <class T>
inline void from_pairs(float* row, int size) {
  if (kInOrder<T>) return;
  for (int d = 0; d + kPair <= size; d += kPair) {
    float joined[kPair];
    for (int i = 0; i < kLanes; ++i) joined[2 * i] = row[d + i], joined[2 * i + 1] = row[d + kLanes + i];
    std::memcpy(row + d, joined, sizeof(joined));
  }
}

}  // namespace

#endif  // LLMJAX_PAIRS_H_
