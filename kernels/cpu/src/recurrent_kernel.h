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
using llmjax::kTokenBlock;
using llmjax::Recurrence;
using llmjax::SelectiveScan;
using llmjax::Stretch;

enum class Rule { kAdd, kDelta, kChannelDelta };

inline float dot(const float* a, const float* b, int size) {
  Vec sum{};
  each_vector(size, [&](int i, auto get, auto) { sum += get(a + i) * get(b + i); });
  return horizontal_sum(sum);
}

// Consecutive tokens of a row and a head, and what each is to those before it.
template <int kTokens>
struct TokenBlock {
  const float *q[kTokens], *k[kTokens];  // as they meet the state before the block, but for of_state
  const float* added[kTokens];           // keys of what each writes, as it stands after the last token, but for at_end
  const float* v[kTokens];
  float* out[kTokens];
  float beta[kTokens];
  // What is left of the state after each token, and of what each has written after the last one.
  float of_state[kTokens], at_end[kTokens];
  const float* left;  // [k], where each channel forgets at a rate of its own: of the state after the last token
  // What token i sees of what token j has written: by its query, j <= i, and by its key, j < i.
  float by_query[kTokens][kTokens], by_key[kTokens][kTokens];

  TokenBlock(const Recurrence& call, int token, int head, float* workspace) {
    const int group = head / (call.heads / call.groups);
    for (int i = 0; i < kTokens; ++i) {
      const size_t t = static_cast<size_t>(token) + i, row = t * call.heads + head;
      q[i] = call.q + (t * call.groups + group) * call.key_dim;
      k[i] = added[i] = call.k + (t * call.groups + group) * call.key_dim;
      v[i] = call.v + row * call.value_dim;
      out[i] = call.out + row * call.value_dim;
      beta[i] = call.beta == nullptr ? 1.0f : call.beta[row];
    }
    const size_t first = static_cast<size_t>(token) * call.heads + head;
    if (call.by_channel) {
      forget_by_channel(call, call.decay + first * call.key_dim, workspace);
    } else {
      forget(call, call.decay + first);
    }
  }

  void forget(const Recurrence& call, const float* decay) {
    constexpr int kSums = kTokens * (kTokens + 1);
    constexpr int kPadded = (kSums + kLanes - 1) / kLanes * kLanes;
    float sums[kPadded] = {};  // [i, j + 1]: after token i of what token j has written, of the state where j = -1
    for (int i = 0; i < kTokens; ++i) {
      // Each sum by itself: differences of sums cancel where a token has forgotten nearly everything.
      for (int j = 0; j <= i; ++j) {
        sums[i * (kTokens + 1) + j] = (i > j ? sums[(i - 1) * (kTokens + 1) + j] : 0.0f) + decay[static_cast<size_t>(i) * call.heads];
      }
    }
    for (int i = 0; i < kPadded; i += kLanes) store(sums + i, vexp(load(sums + i)));
    for (int i = 0; i < kTokens; ++i) {
      of_state[i] = sums[i * (kTokens + 1)];
      at_end[i] = sums[(kTokens - 1) * (kTokens + 1) + i + 1];
      for (int j = 0; j <= i; ++j) {
        const float since = sums[i * (kTokens + 1) + j + 1];
        by_query[i][j] = since * dot(q[i], k[j], call.key_dim);
        if (call.beta != nullptr && j < i) by_key[i][j] = since * dot(k[i], k[j], call.key_dim);
      }
    }
  }

  // What is left becomes part of queries and keys.
  void forget_by_channel(const Recurrence& call, const float* decay, float* workspace) {
    const size_t size = call.key_dim, stride = call.heads * size;
    float *queries = workspace, *keys = queries + kTokens * size, *last = keys + kTokens * size, *rest = last + kTokens * size;
    Vec by_q[kTokens][kTokens] = {}, by_k[kTokens][kTokens] = {};
    each_vector(call.key_dim, [&](int c, auto get, auto put) {
      Vec state = splat(1.0f), key[kTokens];
#pragma GCC unroll 4
      for (int i = 0; i < kTokens; ++i) {
        const Vec kept = vexp(get(decay + i * stride + c)), q_i = get(q[i] + c), k_i = get(k[i] + c);
        state *= kept;
        put(queries + i * size + c, q_i * state);
        put(keys + i * size + c, k_i * state);
#pragma GCC unroll 4
        for (int j = 0; j < i; ++j) {
          key[j] *= kept;
          by_q[i][j] += q_i * key[j];
          by_k[i][j] += k_i * key[j];
        }
        key[i] = k_i;
        by_q[i][i] += q_i * k_i;
      }
      for (int j = 0; j < kTokens; ++j) put(last + j * size + c, key[j]);
      put(rest + c, state);
    });
    for (int i = 0; i < kTokens; ++i) {
      q[i] = queries + i * size;
      k[i] = keys + i * size;
      added[i] = last + i * size;
      of_state[i] = at_end[i] = 1.0f;
      for (int j = 0; j <= i; ++j) {
        by_query[i][j] = horizontal_sum(by_q[i][j]);
        by_key[i][j] = horizontal_sum(by_k[i][j]);
      }
    }
    left = rest;
  }
};

// Columns from `column` on, kVectors vectors of them.
template <Rule kRule, int kVectors, int kTokens, class Get, class Put>
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
  if constexpr (kRule != Rule::kAdd) {
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
        if constexpr (kRule == Rule::kAdd) {
#pragma GCC unroll 4
          for (int b = 0; b < kTokens; ++b) read[b][n] += splat(block.q[b][i]) * state;
        }
        state *= kRule == Rule::kChannelDelta ? splat(block.left[i]) : of_state;
      }
#pragma GCC unroll 4
      for (int b = 0; b < kTokens; ++b) state += splat(block.added[b][i]) * added[b][n];
      put(to + at + n * kLanes, state);
    }
  }
  if constexpr (kRule == Rule::kAdd) {
    for (int b = 0; b < kTokens; ++b) {
      for (int n = 0; n < kVectors; ++n) put(block.out[b] + column + n * kLanes, read_written(b, n));
    }
  }
}

template <Rule kRule, int kTokens>
inline void recur_block(const Recurrence& call, int token, int head, int begin, int end, const float* from, float* to,
                        float* workspace) {
  constexpr int kVectors = (kRegisters == 32 ? 2 : 1) * (kTokens == 1 ? 2 : 1);
  const TokenBlock<kTokens> block(call, token, head, workspace);
  const auto get = [](const float* p) { return load(p); };
  const auto put = [](float* p, Vec v) { store(p, v); };
  int column = begin;
  for (; column + kVectors * kLanes <= end; column += kVectors * kLanes) {
    recur_columns<kRule, kVectors>(call, block, column, from, to, get, put);
  }
  for (; column + kLanes <= end; column += kLanes) recur_columns<kRule, 1>(call, block, column, from, to, get, put);
  if (const int rest = end - column; rest > 0) {
    recur_columns<kRule, 1>(
        call, block, column, from, to, [rest](const float* p) { return load_part(p, rest); },
        [rest](float* p, Vec v) { store_part(p, v, rest); });
  }
}

template <Rule kRule>
inline void recur_tokens(const Recurrence& call, const Stretch& tokens, int head, int begin, int end, float* workspace) {
  const float* from = tokens.from;
  int done = 0;
  for (; done + kTokenBlock <= tokens.count; done += kTokenBlock, from = tokens.to) {
    recur_block<kRule, kTokenBlock>(call, tokens.token + done, head, begin, end, from, tokens.to, workspace);
  }
  for (; done < tokens.count; ++done, from = tokens.to) {
    recur_block<kRule, 1>(call, tokens.token + done, head, begin, end, from, tokens.to, workspace);
  }
}

void recur(const Recurrence& call, const Stretch& tokens, int head, int begin, int end, float* workspace) {
  if (call.beta == nullptr) {
    recur_tokens<Rule::kAdd>(call, tokens, head, begin, end, workspace);
  } else if (call.by_channel) {
    recur_tokens<Rule::kChannelDelta>(call, tokens, head, begin, end, workspace);
  } else {
    recur_tokens<Rule::kDelta>(call, tokens, head, begin, end, workspace);
  }
}

// Columns of some rows of an array, `stride` columns wide, as rows of their own.
inline void take_columns(const float* from, size_t stride, int rows, int size, float* to) {
  for (int i = 0; i < rows; ++i) std::memcpy(to + static_cast<size_t>(i) * size, from + i * stride, size * sizeof(float));
}

// Rows of states and rates are apart by what shares places of the nearest cache, so that tokens pass by copies of them.
void selective_scan(const SelectiveScan& call, const Stretch& tokens, int begin, int end, float* workspace) {
  const int size = end - begin, count = call.state_dim;
  const size_t stride = call.channels;
  float *state = workspace, *rates = workspace + static_cast<size_t>(count) * size;  // [n, size] each
  take_columns(call.rates + begin, stride, count, size, rates);
  if (tokens.from == nullptr) {
    std::memset(state, 0, static_cast<size_t>(count) * size * sizeof(float));
  } else {
    take_columns(tokens.from + begin, stride, count, size, state);
  }
  for (int t = tokens.token; t < tokens.token + tokens.count; ++t) {
    const size_t row = t * stride + begin;
    const float *b = call.b + static_cast<size_t>(t) * count, *c = call.c + static_cast<size_t>(t) * count;
    each_vector(size, [&](int i, auto get, auto put) {
      const Vec step = get(call.steps + row + i), written = step * get(call.x + row + i);
      Vec read{};
      for (int n = 0; n < count; ++n) {
        const size_t at = static_cast<size_t>(n) * size + i;
        const Vec next = vexp(step * get(rates + at)) * get(state + at) + splat(b[n]) * written;
        put(state + at, next);
        read += splat(c[n]) * next;
      }
      put(call.out + row + i, read);
    });
  }
  for (int n = 0; n < count; ++n) {
    std::memcpy(tokens.to + n * stride + begin, state + static_cast<size_t>(n) * size, size * sizeof(float));
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
  // The input `place` places after the oldest that the first token sees.
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
