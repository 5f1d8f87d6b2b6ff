// One token of a row: temperature, min-p, top-k, top-p, then the largest sum of logit and Gumbel noise.
//
// The vocabulary is passed over once, which gives the mass of all tokens and a list of those that are not far below the
// peak; filters look at the list alone, unless what they need lies deeper. Noise is computed for few tokens: most cannot
// win whatever theirs is.

#ifndef LLMJAX_SAMPLE_KERNEL_H_
#define LLMJAX_SAMPLE_KERNEL_H_

#include "rows_kernel.h"

namespace {

using llmjax::SampleRow;

constexpr float kNear = -16.0f;  // below the peak; tokens above it are listed at first
constexpr float kNothing = -__builtin_inff();

// The integer hash "lowbias32", as llmjax/sampling/noise.py.
template <class T>
inline T mix(T h) {
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return h ^ (h >> 16);
}

class Sampler {
 public:
  Sampler(const SampleRow& row, float* workspace)
      : row_(row), z_(workspace), mass_(z_ + padded()), ids_(reinterpret_cast<int32_t*>(mass_ + padded())) {}

  int run() {
    first_ = first_largest(row_.x, row_.size);
    if (first_ < 0) return 0;
    peak_ = row_.x[first_];
    if (row_.temperature <= 0 || peak_ == kNothing) return first_;
    temperature_ = row_.temperature;
    const float lowest = row_.min_p > 0 ? __builtin_logf(row_.min_p) : kNothing;
    if (row_.top_k <= 0 && row_.top_p >= 1) return draw_from_all(lowest);
    list(fmax2(lowest, kNear), lowest);
    float floor = lowest, total = total_;
    if (row_.top_k > 0) {
      if (count_ < row_.top_k) list(lowest, lowest);
      floor = fmax2(floor, search(static_cast<float>(row_.top_k), false));
      total = mass_above(floor);
    }
    if (row_.top_p < 1) {
      if (mass_above(floor) < row_.top_p * total) list(lowest, lowest);
      keep_mass_above(floor);
      floor = fmax2(floor, search(row_.top_p * total, true));
    }
    return cut_ <= floor ? draw_from_list(floor) : draw_from_all(floor);
  }

 private:
  int padded() const { return (row_.size + kLanes - 1) / kLanes * kLanes; }

  // Logits over temperature, less their maximum.
  Vec scaled(Vec x) const {
    const Vec z = (x - splat(peak_)) / splat(temperature_);
    return select((Int)(x == splat(peak_)), Vec{}, z);
  }

  // Calls body(i, z) for the vectors of the row; past its end z is -infinity.
  template <class Body>
  void each(const Body& body) const {
    int i = 0;
    for (; i + kLanes <= row_.size; i += kLanes) body(i, scaled(load(row_.x + i)));
    if (i == row_.size) return;
    Vec last = splat(kNothing);
    std::memcpy(&last, row_.x + i, (row_.size - i) * sizeof(float));
    body(i, scaled(last));
  }

  // Lists the tokens from `cut` upward and sums the mass of those from `lowest` upward.
  void list(float cut, float lowest) {
    cut_ = cut, count_ = 0;
    Vec total{};
    each([&](int i, Vec z) {
      const Int kept = (Int)(z >= splat(lowest)) & (Int)(z > splat(kNothing));
      const Vec mass = select(kept, vexp(z), Vec{});
      total += mass;
      const Int near = kept & (Int)(z >= splat(cut));
      if (!any(near)) return;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (near[lane] == 0) continue;
        z_[count_] = z[lane], mass_[count_] = mass[lane], ids_[count_] = i + lane;
        ++count_;
      }
    });
    total_ = horizontal_sum(total);
    for (int i = count_; i < (count_ + kLanes - 1) / kLanes * kLanes; ++i) z_[i] = kNothing, mass_[i] = 0;
  }

  static bool any(Int mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
  }

  // Over the list: its mass, or its number of tokens, from t upward.
  float sum_from(float t, bool of_mass) const {
    Vec sum{};
    for (int i = 0; i < count_; i += kLanes) {
      const Int above = (Int)(load(z_ + i) >= splat(t)) & (Int)(load(z_ + i) > splat(kNothing));
      sum += select(above, of_mass ? load(mass_ + i) : splat(1.0f), Vec{});
    }
    return horizontal_sum(sum);
  }
  float mass_above(float t) const { return sum_from(t, true); }
  void keep_mass_above(float t) {
    for (int i = 0; i < count_; ++i) mass_[i] = z_[i] >= t ? mass_[i] : 0;
  }

  // The largest t from which on the list has `target`: by bisection over the bits of -t, which are ordered as it is.
  float search(float target, bool of_mass) const {
    if (sum_from(kNothing, of_mass) < target) return kNothing;
    int64_t low = -1, high = 0x7f800000;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      const float t = -bit_cast<float>(static_cast<uint32_t>(middle));
      (sum_from(t, of_mass) >= target ? high : low) = middle;
    }
    return -bit_cast<float>(static_cast<uint32_t>(high));
  }

  static float uniform(uint32_t bits) { return (static_cast<float>(bits) + 0.5f) * 0x1p-32f; }
  uint32_t bits_of(uint32_t id) const { return mix(mix(id ^ row_.key[0]) ^ row_.key[1]); }

  void offer(int id, float z) {
    const float u = uniform(bits_of(static_cast<uint32_t>(id)));
    const float noise = -__builtin_logf(-__builtin_log1pf(-(u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f)));
    const float score = z + noise;
    if (score > best_ || (score == best_ && id < winner_)) {
      best_ = score, winner_ = id;
      // A token of mass m beats it with a uniform below m * bound_ only: noise is at most -log(u).
      bound_ = vexp(splat(-best_))[0] * 1.001f;
    }
  }

  int draw_from_list(float floor) {
    offer(first_, 0);
    for (int i = 0; i < count_; ++i) {
      const float u = uniform(bits_of(static_cast<uint32_t>(ids_[i])));
      if (z_[i] >= floor && u <= mass_[i] * bound_) offer(ids_[i], z_[i]);
    }
    return winner_;
  }

  int draw_from_all(float floor) {
    offer(first_, 0);
    Bits lanes{};
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<uint32_t>(lane);
    each([&](int i, Vec z) {
      const Bits bits = mix(mix((lanes + static_cast<uint32_t>(i)) ^ row_.key[0]) ^ row_.key[1]);
      // Half of the bits, so that the conversion is one of signed integers; rounded down, as is fitting.
      const Vec u = __builtin_convertvector(bit_cast<Int>(bits >> 1), Vec) * splat(0x1p-31f * 0.9999f);
      const Int able = (Int)(u <= vexp(z) * splat(bound_)) & (Int)(z >= splat(floor)) & (Int)(z > splat(kNothing));
      if (!any(able)) return;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (able[lane] != 0) offer(i + lane, z[lane]);
      }
    });
    return winner_;
  }

  const SampleRow& row_;
  float *z_, *mass_;  // of the list
  int32_t* ids_;
  int count_ = 0, first_ = 0, winner_ = 0;
  float cut_ = 0, total_ = 0, peak_ = 0, temperature_ = 1, best_ = kNothing, bound_ = __builtin_inff();
};

int sample(const SampleRow& row, float* workspace) { return Sampler(row, workspace).run(); }

}  // namespace

#endif  // LLMJAX_SAMPLE_KERNEL_H_
