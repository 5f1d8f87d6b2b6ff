// Blocks of GGUF files become the records of packed matrices (row_format.py) at the speed of memory: what
// llmjax/weights/ggml/unpack.py and `QuantizedRows.write` do, with their names. Matrices of 16 bits become panels (panels.py) as
// fast. Little-endian machines alone.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace llmjax {
namespace {

constexpr size_t kChunk = 32;  // columns whose codes fill whole words

// Where a row's numbers go, in its record.
struct Numbers {
  uint8_t *scales, *minima, *super_scales, *super_minima;
  bool finite = true;

  void half(uint8_t*& to, const uint8_t* from, bool negative = false) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    finite = finite && (bits & 0x7c00) != 0x7c00;
    bits ^= negative ? 0x8000 : 0;
    std::memcpy(to, &bits, 2);
    to += 2;
  }
};

// Codes from bytes of which each holds one of each run: the lowest bits of `size` bytes are the first codes, and so on.
template <int kBits>
void runs(const uint8_t* packed, size_t size, uint8_t* codes) {
  for (int shift = 0; shift < 8; shift += kBits) {
    for (size_t i = 0; i < size; ++i) codes[i] = packed[i] >> shift & ((1 << kBits) - 1);
    codes += size;
  }
}

// Adds one bit to 8 runs of 32 codes: bit s of byte l is that of code l of run s.
void add_bits(const uint8_t* bits, int at, uint8_t* codes) {
  for (int run = 0; run < 8; ++run) {
    for (size_t i = 0; i < 32; ++i) codes[32 * run + i] |= (bits[i] >> run & 1) << at;
  }
}

// Adds bit j of 32 bits to code j.
void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t alone = bits[i] * 0x0101010101010101u & 0x8040201008040201u;  // bit j, in byte j
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= (alone + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// Q4_0 to Q5_1: a scale, perhaps a minimum, perhaps fifth bits, then 32 codes.
template <bool kMinimum, bool kFifth>
struct Small {
  static constexpr size_t kElems = 32, kFifths = kMinimum ? 4 : 2, kNibbles = kFifths + (kFifth ? 4 : 0), kBytes = kNibbles + 16;
  static constexpr int kBits = kFifth ? 5 : 4;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    numbers.half(numbers.scales, block);
    if (kMinimum) numbers.half(numbers.minima, block + 2, true);
    runs<4>(block + kNibbles, 16, codes);
    if (kFifth) add_fifth_bits(block + kFifths, codes);
  }
};

struct Q8_0 {
  static constexpr size_t kElems = 32, kBytes = 34;
  static constexpr int kBits = 8;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    numbers.half(numbers.scales, block);
    std::memcpy(codes, block + 2, 32);
  }
};

struct Mxfp4 {
  static constexpr size_t kElems = 32, kBytes = 17;
  static constexpr int kBits = 4;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    numbers.finite = numbers.finite && block[0] != 0xff;
    *numbers.scales++ = block[0];
    runs<4>(block + 1, 16, codes);
  }
};

struct Q2_K {
  static constexpr size_t kElems = 256, kBytes = 84;
  static constexpr int kBits = 2;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    for (int i = 0; i < 16; ++i) {
      *numbers.scales++ = block[i] & 15;
      *numbers.minima++ = block[i] >> 4;
    }
    for (int half = 0; half < 2; ++half) runs<2>(block + 16 + 32 * half, 32, codes + 128 * half);
    numbers.half(numbers.super_scales, block + 80);
    numbers.half(numbers.super_minima, block + 82);
  }
};

struct Q3_K {
  static constexpr size_t kElems = 256, kBytes = 110;
  static constexpr int kBits = 3;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    const uint8_t* packed = block + 96;
    for (int i = 0; i < 16; ++i) {
      const int low = packed[i % 8] >> 4 * (i / 8) & 15, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
      *numbers.scales++ = static_cast<uint8_t>((low | high << 4) - 32);
    }
    for (int half = 0; half < 2; ++half) runs<2>(block + 32 + 32 * half, 32, codes + 128 * half);
    add_bits(block, 2, codes);
    numbers.half(numbers.super_scales, block + 108);
  }
};

// Scales and minima of six bits, of Q4_K and Q5_K: the last four have their top two bits where the first four leave room.
void unpack_six_bits(const uint8_t* packed, Numbers& numbers) {
  for (int i = 0; i < 4; ++i) {
    numbers.scales[i] = packed[i] & 63;
    numbers.minima[i] = packed[4 + i] & 63;
    numbers.scales[4 + i] = (packed[8 + i] & 15) | packed[i] >> 6 << 4;
    numbers.minima[4 + i] = packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
  }
  numbers.scales += 8;
  numbers.minima += 8;
}

// Q4_K, and with fifth bits Q5_K.
template <bool kFifth>
struct EightSubBlocks {
  static constexpr size_t kElems = 256, kNibbles = kFifth ? 48 : 16, kBytes = kNibbles + 128;
  static constexpr int kBits = kFifth ? 5 : 4;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    numbers.half(numbers.super_scales, block);
    numbers.half(numbers.super_minima, block + 2);
    unpack_six_bits(block + 4, numbers);
    for (int run = 0; run < 4; ++run) runs<4>(block + kNibbles + 32 * run, 32, codes + 64 * run);
    if (kFifth) add_bits(block + 16, 4, codes);
  }
};

struct Q6_K {
  static constexpr size_t kElems = 256, kBytes = 210;
  static constexpr int kBits = 6;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    uint8_t high[256];
    for (int half = 0; half < 2; ++half) {
      runs<4>(block + 64 * half, 64, codes + 128 * half);
      runs<2>(block + 128 + 32 * half, 32, high + 128 * half);
    }
    for (int i = 0; i < 256; ++i) codes[i] |= high[i] << 4;
    std::memcpy(numbers.scales, block + 192, 16);
    numbers.scales += 16;
    numbers.half(numbers.super_scales, block + 208);
  }
};

struct Iq4_Xs {
  static constexpr size_t kElems = 256, kBytes = 136;
  static constexpr int kBits = 4;
  static void unpack(const uint8_t* block, uint8_t* codes, Numbers& numbers) {
    numbers.half(numbers.super_scales, block);
    const int top = block[2] | block[3] << 8;
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> 4 * (i % 2) & 15;
      *numbers.scales++ = static_cast<uint8_t>((low | (top >> 2 * i & 3) << 4) - 32);
    }
    for (int run = 0; run < 8; ++run) runs<4>(block + 8 + 16 * run, 16, codes + 32 * run);
  }
};

// Bits `kLow` to `kLow + kWidth` of the codes of a chunk: byte b of word q has column 4 * (s * kWidth + q) + b in piece s.
template <int kLow, int kWidth>
void plane(const uint8_t* codes, uint8_t* words) {
  for (int i = 0; i < 4 * kWidth; ++i) {
    int byte = 0;
    for (int piece = 0; piece < 8 / kWidth; ++piece) {
      byte |= (codes[4 * kWidth * piece + i] >> kLow & ((1 << kWidth) - 1)) << kWidth * piece;
    }
    words[i] = static_cast<uint8_t>(byte);
  }
}

template <int kBits>
void planes(const uint8_t* codes, uint8_t* words) {
  constexpr int kWide = kBits == 8 ? 8 : kBits >= 4 ? 4 : kBits >= 2 ? 2 : 1;
  plane<0, kWide>(codes, words);
  if constexpr (kBits > kWide) plane<kWide, kBits - kWide>(codes, words + 4 * kWide);
}

// What `RowFormat` says: words of a record, and where its runs of numbers begin.
struct Record {
  size_t words, starts[4];
};

template <typename Type>
bool pack(const uint8_t* raw, size_t rows, size_t blocks, const Record& record, size_t tile, uint32_t* out) {
  constexpr size_t kCodeBytes = Type::kBits * 4;  // of a chunk
  std::vector<uint32_t> records(tile * record.words);
  bool finite = true;
  for (size_t first = 0; first < rows; first += tile, out += tile * record.words) {
    if (rows - first < tile) std::fill(records.begin(), records.end(), 0u);
    for (size_t row = 0; row < tile && first + row < rows; ++row) {
      uint8_t* const bytes = reinterpret_cast<uint8_t*>(&records[row * record.words]);
      const auto at = [&](int field) { return bytes + 4 * record.starts[field]; };
      Numbers numbers{at(0), at(1), at(2), at(3)};
      uint8_t* words = bytes;
      for (size_t block = 0; block < blocks; ++block, raw += Type::kBytes) {
        uint8_t codes[Type::kElems];
        Type::unpack(raw, codes, numbers);
        for (size_t chunk = 0; chunk < Type::kElems / kChunk; ++chunk, words += kCodeBytes) {
          planes<Type::kBits>(codes + chunk * kChunk, words);
        }
      }
      finite = finite && numbers.finite;
    }
    constexpr size_t kLine = 16;  // words of a cache line
    for (size_t start = 0; start < record.words; start += kLine) {
      const size_t end = start + kLine < record.words ? start + kLine : record.words;
      for (size_t row = 0; row < tile; ++row) {
        const uint32_t* const from = &records[row * record.words];
        for (size_t word = start; word < end; ++word) out[word * tile + row] = from[word];
      }
    }
  }
  return finite;
}

struct Packer {
  int type;  // as GGUF files number them
  bool (*pack)(const uint8_t*, size_t, size_t, const Record&, size_t, uint32_t*);
};

template <typename Type>
constexpr Packer packer(int type) {
  return {type, pack<Type>};
}

constexpr Packer kPackers[] = {
    packer<Small<false, false>>(2),      packer<Small<true, false>>(3),      packer<Small<false, true>>(6),
    packer<Small<true, true>>(7),        packer<Q8_0>(8),                    packer<Q2_K>(10),
    packer<Q3_K>(11),                    packer<EightSubBlocks<false>>(12),  packer<EightSubBlocks<true>>(13),
    packer<Q6_K>(14),                    packer<Small<false, false>>(20),    packer<Iq4_Xs>(23),
    packer<Mxfp4>(39),
};

// Words of two columns of each row, of 16 rows and 32 columns: [pairs of columns][rows]. What is not there is zeros.
void fill_tile(const uint16_t* rows, size_t count, size_t stride, size_t columns, uint32_t* to) {
  constexpr size_t kRows = 16, kWords = kChunk / 2;
  uint32_t words[kRows][kWords];
  if (count < kRows || columns < kChunk) std::memset(words, 0, sizeof(words));
  for (size_t row = 0; row < count; ++row) {
    if (columns == kChunk) {  // a length that compilers know
      std::memcpy(words[row], rows + row * stride, sizeof(words[row]));
    } else {
      std::memcpy(words[row], rows + row * stride, columns * sizeof(uint16_t));
    }
  }
  for (size_t i = 0; i < kWords; ++i) {
    for (size_t row = 0; row < kRows; ++row) to[i * kRows + row] = words[row][i];
  }
}

}  // namespace
}  // namespace llmjax

#pragma GCC visibility push(default)
extern "C" {
// rows: [rows, columns] of 16 bits each; panels: as kernels/panels.py says, all of which is written.
void llmjax_fill_panels(const uint16_t* rows, size_t num_rows, size_t columns, uint32_t* panels) {
  constexpr size_t kRows = 16, kWords = kRows * llmjax::kChunk / 2;
  for (size_t panel = 0; panel < num_rows; panel += 2 * kRows) {
    for (size_t column = 0; column < columns; column += llmjax::kChunk) {
      for (size_t first = panel; first < panel + 2 * kRows; first += kRows, panels += kWords) {
        const size_t count = first < num_rows ? std::min(kRows, num_rows - first) : 0;
        llmjax::fill_tile(rows + (count == 0 ? 0 : first * columns + column), count, columns, std::min(llmjax::kChunk, columns - column), panels);
      }
    }
  }
}

// raw: rows of `blocks` blocks; starts: of scales, minima, super scales and super minima in a record of `num_words` words;
// words: whole tiles. 1 if it was done; -1: it was, and a scale is infinite or not a number; 0: the type is not known here.
int llmjax_pack_blocks(int type, const uint8_t* raw, size_t rows, size_t blocks, size_t num_words, const size_t* starts,
                       size_t tile, uint32_t* words) {
  for (const llmjax::Packer& packer : llmjax::kPackers) {
    if (packer.type != type) continue;
    const llmjax::Record record{num_words, {starts[0], starts[1], starts[2], starts[3]}};
    return packer.pack(raw, rows, blocks, record, tile, words) ? 1 : -1;
  }
  return 0;
}
}
#pragma GCC visibility pop
