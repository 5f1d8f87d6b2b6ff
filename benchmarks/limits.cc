// What no kernel exceeds: a loop that does nothing but read memory, and loops that do nothing but multiply registers, on several
// threads at once. Compiled for one instruction set, loaded by benchmarks/limits.py.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "simd.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#endif

#define LLMJAX_OFFERED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kChains = 12;  // sums that do not wait for each other

// The compiler no longer knows what the vector holds, so that a product is made again each time.
template <class V>
inline void forget(V& v) {
#if defined(__aarch64__)
  __asm__ volatile("" : "+w"(v));
#elif defined(__AVX512F__)
  __asm__ volatile("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__ volatile("" : "+x"(v));
#else
  __asm__ volatile("" : "+m"(v));
#endif
}

// sum = step(sum, a, b) over and over.
template <class V, class Step>
inline void repeat_step(int64_t rounds, const Step& step) {
  V sums[kChains] = {}, a{}, b{};
  forget(b);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      forget(a);
      sums[i] = step(sums[i], a, b);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) forget(sums[i]);
  }
}

#if defined(__AMX_INT8__)
// Four products of 16 x columns and columns x 16 numbers, over and over.
template <class Products>
inline double repeat_tiles(int64_t rounds, int columns, const Products& products) {
  const Tiles tiles;
  for (int64_t round = 0; round < rounds; ++round) products();
  return 2.0 * 4 * kTile * kTile * columns;
}
#endif

// The loops return how many operations a round makes, a product and its addition as two.
double f32_loop(int64_t rounds) {
  repeat_step<Vec>(rounds, [](Vec sum, Vec a, Vec b) { return sum + a * b; });
  return 2.0 * kChains * kLanes;
}

double int8_loop(int64_t rounds) {
#if defined(__AMX_INT8__)
  return repeat_tiles(rounds, 64, [] {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  });
#elif defined(__AVX512VNNI__)
  repeat_step<__m512i>(rounds, [](__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); });
  return 2.0 * kChains * 64;
#elif defined(__AVXVNNI__)
  repeat_step<__m256i>(rounds, [](__m256i sum, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sum, a, b); });
  return 2.0 * kChains * 32;
#elif defined(__AVX512BW__)
  repeat_step<__m512i>(rounds, [](__m512i sum, __m512i a, __m512i b) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b)); });
  return 2.0 * kChains * 64;
#elif defined(__AVX2__)
  repeat_step<__m256i>(rounds, [](__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); });
  return 2.0 * kChains * 32;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  repeat_step<int32x4_t>(rounds, [](int32x4_t sum, int32x4_t a, int32x4_t b) { return vmmlaq_s32(sum, (int8x16_t)a, (int8x16_t)b); });
  return 2.0 * kChains * 32;
#elif defined(__ARM_FEATURE_DOTPROD)
  repeat_step<int32x4_t>(rounds, [](int32x4_t sum, int32x4_t a, int32x4_t b) { return vdotq_s32(sum, (int8x16_t)a, (int8x16_t)b); });
  return 2.0 * kChains * 16;
#else
  return f32_loop(rounds);  // no products of bytes
#endif
}

double bf16_loop(int64_t rounds) {
#if defined(__AMX_BF16__)
  return repeat_tiles(rounds, 32, [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  });
#elif defined(__AVX512BF16__)
  repeat_step<__m512>(rounds, [](__m512 sum, __m512 a, __m512 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); });
  return 2.0 * kChains * 32;
#else
  return f32_loop(rounds);  // bf16 is widened
#endif
}

double int16_loop(int64_t rounds) {
#if defined(__AVX512VNNI__)
  repeat_step<__m512i>(rounds, [](__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); });
  return 2.0 * kChains * 32;
#elif defined(__AVXVNNI__)
  repeat_step<__m256i>(rounds, [](__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(sum, a, b); });
  return 2.0 * kChains * 16;
#elif defined(__AVX2__) && !defined(__AVX512F__)
  repeat_step<__m256i>(rounds, [](__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); });
  return 2.0 * kChains * 16;
#else
  return f32_loop(rounds);  // no kernel multiplies int16
#endif
}

// In four places side by side, since memory gives less to a core that reads it in one.
void read_memory(const char* from, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64)));
  Line sums[4] = {};
  const int64_t run = bytes / 256 * 64;
  for (int64_t at = 0; at < run; at += 64) {
    for (int i = 0; i < 4; ++i) sums[i] += load_as<Line>(from + i * run + at);
  }
  const Line all = sums[0] + sums[1] + sums[2] + sums[3];
  __asm__ volatile("" : : "m"(all));
}

// Seconds of the fastest of `repeat` times that all threads run body(thread) side by side.
template <class Body>
double fastest(int threads, int repeat, const Body& body) {
  std::atomic<int> arrived{0};
  double best = 1e30;
  const auto meet = [&](int all) {
    arrived.fetch_add(1);
    while (arrived.load() < all) std::this_thread::yield();
  };
  const auto work = [&](int thread) {
    for (int i = 0; i < repeat; ++i) {
      meet((2 * i + 1) * threads);
      const auto start = std::chrono::steady_clock::now();
      body(thread);
      meet((2 * i + 2) * threads);
      if (thread == 0) best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  return best;
}

}  // namespace

// Bytes a second.
LLMJAX_OFFERED double llmjax_read_speed(const char* from, int64_t bytes, int threads, int repeat) {
  const int64_t part = bytes / threads / 256 * 256;
  return static_cast<double>(part * threads) / fastest(threads, repeat, [&](int i) { read_memory(from + i * part, part); });
}

// Operations a second: `kind` 0 f32, 1 int8, 2 bf16, 3 int16.
LLMJAX_OFFERED double llmjax_multiply_speed(int kind, int64_t rounds, int threads, int repeat) {
  const auto multiply = kind == 0 ? f32_loop : kind == 1 ? int8_loop : kind == 2 ? bf16_loop : int16_loop;
  const double operations = multiply(0) * static_cast<double>(rounds) * threads;
  return operations / fastest(threads, repeat, [&](int) { multiply(rounds); });
}
