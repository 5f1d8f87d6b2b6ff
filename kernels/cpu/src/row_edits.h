// What may change which token of a row is the most likely, in the order of llmjax/sampling/sampler.py: mask, bias, bans,
// penalties.

#ifndef LLMJAX_ROW_EDITS_H_
#define LLMJAX_ROW_EDITS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace llmjax {

struct RowEdits {
  const uint32_t* mask;  // a bit for each token that may be sampled, null: all may
  const float* bias;     // [size], null: none
  const int32_t *ban_previous, *ban_token;  // [num_bans]: the token is forbidden right after the other one
  int num_bans, last_token;
  const uint16_t* output_count;  // [size], null: no penalties
  const bool* prompt_seen;       // [size]
  float repetition, frequency, presence;
  const int32_t* uncounted;  // [num_uncounted]: of the output, on top; others than tokens are padding
  int num_uncounted;         // 64 at most
};

constexpr float kForbidden = -__builtin_inff();

inline float penalized(const RowEdits& edits, float x, int count, bool seen) {
  if (seen || count > 0) x = x > 0 ? x / edits.repetition : x * edits.repetition;
  return x - (edits.frequency * static_cast<float>(count) + (count > 0 ? edits.presence : 0.0f));
}

// out: [size], not x. Plain loops over the vocabulary, which compilers turn into vectors; memory is what they wait for.
inline void edit(const RowEdits& edits, const float* x, float* out, int size) {
  std::memcpy(out, x, static_cast<size_t>(size) * sizeof(float));
  for (int word = 0; edits.mask != nullptr && word < (size + 31) / 32; ++word) {
    const uint32_t bits = edits.mask[word];
    if (bits == ~0u) continue;
    float* to = out + word * 32;
    const int count = std::min(32, size - word * 32);
    for (int i = 0; i < count; ++i) to[i] = (bits >> i) & 1 ? to[i] : kForbidden;
  }
  if (edits.bias != nullptr) {
    // A bias of -infinity forbids an infinite logit, too: their sum would be NaN.
    for (int i = 0; i < size; ++i) out[i] = edits.bias[i] == kForbidden ? kForbidden : out[i] + edits.bias[i];
  }
  for (int i = 0; i < edits.num_bans; ++i) {
    const int token = edits.ban_token[i];
    if (edits.ban_previous[i] == edits.last_token && token >= 0 && token < size) out[token] = kForbidden;
  }
  if (edits.output_count == nullptr) return;
  constexpr int kMost = 64;
  float before[kMost];  // penalties: of tokens that the counts do not know of yet
  const int uncounted = std::min(edits.num_uncounted, kMost);
  const auto known = [&](int token) { return token >= 0 && token < size; };
  for (int i = 0; i < uncounted; ++i) before[i] = known(edits.uncounted[i]) ? out[edits.uncounted[i]] : 0;
  for (int i = 0; i < size; ++i) out[i] = penalized(edits, out[i], edits.output_count[i], edits.prompt_seen[i] != 0);
  for (int i = 0; i < uncounted; ++i) {
    const int token = edits.uncounted[i];
    if (!known(token)) continue;
    const int more = static_cast<int>(std::count(edits.uncounted, edits.uncounted + uncounted, token));
    out[token] = penalized(edits, before[i], edits.output_count[token] + more, true);
  }
}

}  // namespace llmjax

#endif  // LLMJAX_ROW_EDITS_H_
