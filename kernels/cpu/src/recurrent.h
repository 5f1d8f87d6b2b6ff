// What the objects compiled for each instruction set offer to recurrent mixers (contracts: kernels/recurrent/).

#ifndef LLMJAX_RECURRENT_H_
#define LLMJAX_RECURRENT_H_

namespace llmjax {

constexpr int kTokenBlock = 4;  // tokens that rewrite a state at once

// Tokens that rewrite states of heads, [k, v] each, and read them. Heads of one group, which follow each other, share
// queries and keys.
struct Recurrence {
  int heads, groups, key_dim, value_dim;
  const float *q, *k;  // [T, G, k]
  const float* v;      // [T, H, v]
  const float* decay;  // [T, H], logarithms; or, with beta alone, [T, H, k]
  const float* beta;   // [T, H]: the delta rule; null: v is added as it is
  bool by_channel;     // each channel of keys forgets at a rate of its own
  float* out;          // [T, H, v]
};

// Tokens that rewrite states of channels, each with rates of its own, and read them.
struct SelectiveScan {
  int channels, state_dim;
  const float *c, *b;         // [T, n]: what is read and written with
  const float *x, *steps;     // [T, I]
  const float* rates;         // [n, I]
  float* out;                 // [T, I]
};

// A causal convolution of each channel by itself.
struct Convolution {
  int channels, width;
  const float* x;       // [T, C]
  const float* weight;  // [C, W], the newest token's last
  float* out;           // [T, C]
};

// Tokens token..token + count of a row, from one state to another, or to the same one; `from` null: zeros.
struct Stretch {
  int token, count;
  const float* from;
  float* to;
};

}  // namespace llmjax

#endif  // LLMJAX_RECURRENT_H_
