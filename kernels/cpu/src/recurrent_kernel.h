// States of recurrent mixers and the tokens that rewrite them, for the instruction set of the including object.
//
// Columns of a state never meet, so some of them stay in the nearest cache while all tokens of a row pass by, a few at a
// time. What these write is found first, from what the state knows of their keys and from each other (the WY form of
// their product, Yang et al. 2024, arXiv:2412.06464); then each entry is read and written once for all of them.

#ifndef LLMJAX_RECURRENT_KERNEL_H_
#define LLMJAX_RECURRENT_KERNEL_H_

#include "recurrent.h"
#include "rows_kernel.h"

namespace {

using llmjax::Convolution;
using llmjax::Recurrence;
using llmjax::Stretch;

constexpr int kTokenBlock = 4;

inline float dot(const float* a, const float* b, int size) {
  Vec sum{};
  each_vector(size, [&](int i, auto get, auto) { sum += get(a + i) * get(b + i); });
  return horizontal_sum(sum);
}

// Consecutive tokens of a row and a head, and what each is to those before it.
template <int kTokens>
struct TokenBlock {
  const float *q[kTokens], *k[kTokens], *v[kTokens];
  float* out[kTokens];
  float beta[kTokens];
  // What is left of the state behind each token, and of what each has written behind the last one.
  float of_state[kTokens], at_end[kTokens];
  // What token i sees of what token j has written: by its query, j <= i, and by its key, j < i.
  float by_query[kTokens][kTokens], by_key[kTokens][kTokens];

  TokenBlock(const Recurrence& call, int token, int head) {
    constexpr int kSums = kTokens * (kTokens + 1);
    constexpr int kPadded = (kSums + kLanes - 1) / kLanes * kLanes;
    float left[kPadded] = {};  // [i, j + 1]: behind token i of what token j has written, of the state where j = -1
    const int group = head / (call.heads / call.groups);
    for (int i = 0; i < kTokens; ++i) {
      const size_t t = static_cast<size_t>(token) + i, row = t * call.heads + head;
      q[i] = call.q + (t * call.groups + group) * call.key_dim;
      k[i] = call.k + (t * call.groups + group) * call.key_dim;
      v[i] = call.v + row * call.value_dim;
      out[i] = call.out + row * call.value_dim;
      beta[i] = call.beta == nullptr ? 1.0f : call.beta[row];
      // Each sum by itself: differences of sums cancel where a token has forgotten nearly everything.
      for (int j = 0; j <= i; ++j) left[i * (kTokens + 1) + j] = (i > j ? left[(i - 1) * (kTokens + 1) + j] : 0.0f) + call.decay[row];
    }
    for (int i = 0; i < kPadded; i += kLanes) store(left + i, vexp(load(left + i)));
    for (int i = 0; i < kTokens; ++i) {
      of_state[i] = left[i * (kTokens + 1)];
      at_end[i] = left[(kTokens - 1) * (kTokens + 1) + i + 1];
      for (int j = 0; j <= i; ++j) {
        const float since = left[i * (kTokens + 1) + j + 1];
        by_query[i][j] = since * dot(q[i], k[j], call.key_dim);
        if (call.beta != nullptr && j < i) by_key[i][j] = since * dot(k[i], k[j], call.key_dim);
      }
    }
  }
};

// Columns from `column` on, kVectors vectors of them.
template <bool kDelta, int kVectors, int kTokens, class Get, class Put>
inline void recur_columns(const Recurrence& call, const TokenBlock<kTokens>& block, int column, const float* from, float* to,
                          const Get& get, const Put& put) {
  const size_t stride = call.value_dim;
  Vec written[kTokens][kVectors], read[kTokens][kVectors] = {};
#pragma GCC unroll 4
  for (int b = 0; b < kTokens; ++b) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) written[b][n] = get(block.v[b] + column + n * kLanes);
  }
  const auto read_written = [&](int b, int n) {
    Vec sum = read[b][n] * splat(block.of_state[b]);
    for (int j = 0; j <= b; ++j) sum += splat(block.by_query[b][j]) * written[j][n];
    return sum;
  };
  if constexpr (kDelta) {
    Vec known[kTokens][kVectors] = {};
    for (int i = 0; from != nullptr && i < call.key_dim; ++i) {
      const float* row = from + i * stride + column;
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) {
        const Vec state = get(row + n * kLanes);
#pragma GCC unroll 4
        for (int b = 0; b < kTokens; ++b) {
          known[b][n] += splat(block.k[b][i]) * state;
          read[b][n] += splat(block.q[b][i]) * state;
        }
      }
    }
    for (int b = 0; b < kTokens; ++b) {
      for (int n = 0; n < kVectors; ++n) {
        Vec left = written[b][n] - splat(block.of_state[b]) * known[b][n];
        for (int j = 0; j < b; ++j) left -= splat(block.by_key[b][j]) * written[j][n];
        written[b][n] = left * splat(block.beta[b]);
        put(block.out[b] + column + n * kLanes, read_written(b, n));
      }
    }
  }
  Vec added[kTokens][kVectors];
#pragma GCC unroll 4
  for (int b = 0; b < kTokens; ++b) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) added[b][n] = written[b][n] * splat(block.at_end[b]);
  }
  const Vec of_state = splat(block.of_state[kTokens - 1]);
  for (int i = 0; i < call.key_dim; ++i) {
    const size_t at = i * stride + column;
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      Vec state{};
      if (from != nullptr) {
        state = get(from + at + n * kLanes);
        if constexpr (!kDelta) {
#pragma GCC unroll 4
          for (int b = 0; b < kTokens; ++b) read[b][n] += splat(block.q[b][i]) * state;
        }
        state *= of_state;
      }
#pragma GCC unroll 4
      for (int b = 0; b < kTokens; ++b) state += splat(block.k[b][i]) * added[b][n];
      put(to + at + n * kLanes, state);
    }
  }
  if constexpr (!kDelta) {
    for (int b = 0; b < kTokens; ++b) {
      for (int n = 0; n < kVectors; ++n) put(block.out[b] + column + n * kLanes, read_written(b, n));
    }
  }
}

template <bool kDelta, int kTokens>
inline void recur_block(const Recurrence& call, int token, int head, int begin, int end, const float* from, float* to) {
  constexpr int kVectors = (kRegisters == 32 ? 2 : 1) * (kTokens == 1 ? 2 : 1);
  const TokenBlock<kTokens> block(call, token, head);
  const auto get = [](const float* p) { return load(p); };
  const auto put = [](float* p, Vec v) { store(p, v); };
  int column = begin;
  for (; column + kVectors * kLanes <= end; column += kVectors * kLanes) {
    recur_columns<kDelta, kVectors>(call, block, column, from, to, get, put);
  }
  for (; column + kLanes <= end; column += kLanes) recur_columns<kDelta, 1>(call, block, column, from, to, get, put);
  if (const int rest = end - column; rest > 0) {
    recur_columns<kDelta, 1>(
        call, block, column, from, to, [rest](const float* p) { return load_part(p, rest); },
        [rest](float* p, Vec v) { store_part(p, v, rest); });
  }
}

template <bool kDelta>
inline void recur_tokens(const Recurrence& call, const Stretch& tokens, int head, int begin, int end) {
  const float* from = tokens.from;
  int done = 0;
  for (; done + kTokenBlock <= tokens.count; done += kTokenBlock, from = tokens.to) {
    recur_block<kDelta, kTokenBlock>(call, tokens.token + done, head, begin, end, from, tokens.to);
  }
  for (; done < tokens.count; ++done, from = tokens.to) {
    recur_block<kDelta, 1>(call, tokens.token + done, head, begin, end, from, tokens.to);
  }
}

void recur(const Recurrence& call, const Stretch& tokens, int head, int begin, int end) {
  if (call.beta != nullptr) {
    recur_tokens<true>(call, tokens, head, begin, end);
  } else {
    recur_tokens<false>(call, tokens, head, begin, end);
  }
}

void convolve(const Convolution& call, const Stretch& tokens, int begin, int end, float* workspace) {
  const int size = end - begin, width = call.width, kept = width - 1;
  float *weights = workspace, *before = workspace + static_cast<size_t>(width) * size;  // [W, size], [W - 1, size]
  for (int c = 0; c < size; ++c) {
    for (int j = 0; j < width; ++j) weights[j * size + c] = call.weight[static_cast<size_t>(begin + c) * width + j];
  }
  for (int i = 0; i < kept; ++i) {
    float* row = before + static_cast<size_t>(i) * size;
    if (tokens.from == nullptr) {
      std::memset(row, 0, size * sizeof(float));
    } else {
      std::memcpy(row, tokens.from + static_cast<size_t>(i) * call.channels + begin, size * sizeof(float));
    }
  }
  // The input so many places after the oldest that the first token sees.
  const auto input = [&](int place) {
    return place < kept ? before + static_cast<size_t>(place) * size
                        : call.x + (static_cast<size_t>(tokens.token) + place - kept) * call.channels + begin;
  };
  for (int t = 0; t < tokens.count; ++t) {
    float* out = call.out + (static_cast<size_t>(tokens.token) + t) * call.channels + begin;
    for (int j = 0; j < width; ++j) {
      const float *x = input(t + j), *weight = weights + static_cast<size_t>(j) * size;
      each_vector(size, [&](int c, auto get, auto put) {
        const Vec product = get(x + c) * get(weight + c);
        put(out + c, j == 0 ? product : get(out + c) + product);
      });
    }
  }
  for (int i = 0; i < kept; ++i) {
    std::memcpy(tokens.to + static_cast<size_t>(i) * call.channels + begin, input(tokens.count + i), size * sizeof(float));
  }
}

}  // namespace

#endif  // LLMJAX_RECURRENT_KERNEL_H_
