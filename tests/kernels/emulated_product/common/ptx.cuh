// Replaces CUDA and ptx.cuh for converted_product.cuh on the host. For its threads see cuda_threads.h; a warp is a
// group of 32 that meet at a barrier, and shared memory is an array.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_threads.h"
#include "e4m3.h"

#define __device__
#define __host__
#define __forceinline__ inline

namespace meshserve {

using std::max, std::min;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct bf16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};

struct Warp {
  Meeting meet{32};
  uint32_t words[32][4];
  Meeting meet_half[2]{Meeting(16), Meeting(16)};
  float values[32];
};
struct Index {
  unsigned x, y, z;  // as in emulated/ptx.cuh: libraries of one process share such variables
};
inline thread_local Index threadIdx;
inline thread_local Warp* warp_state;
alignas(1024) inline uint8_t shared_memory[1 << 17];

// Calls `read` with 4 words of each lane of the warp.
template <class Read>
void read_lanes(const uint32_t* mine, Read read) {
  std::memcpy(warp_state->words[threadIdx.x % 32], mine, 16);
  warp_state->meet.arrive_and_wait();
  read(warp_state->words);
  warp_state->meet.arrive_and_wait();
}

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int lanes) {
  const uint32_t mine[4] = {value};
  uint32_t found = 0;
  read_lanes(mine, [&](const auto& words) { found = words[threadIdx.x % 32 ^ lanes][0]; });
  return found;
}

inline float largest_of_16_lanes(float value) {
  const int lane = threadIdx.x % 32, first = lane & 16;
  warp_state->values[lane] = value;
  warp_state->meet_half[lane / 16].arrive_and_wait();
  for (int i = 0; i < 16; ++i) value = std::fmax(value, warp_state->values[first + i]);
  warp_state->meet_half[lane / 16].arrive_and_wait();
  return value;
}

inline float4 load_shared_float4(uint32_t address) {
  float4 v;
  std::memcpy(&v, shared_memory + address, 16);
  return v;
}
inline uint32_t load_shared_byte(uint32_t address) { return shared_memory[address]; }
inline uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  std::memcpy(&half, shared_memory + address, 2);
  return half;
}
inline void store_shared_byte(uint32_t address, uint8_t byte) { shared_memory[address] = byte; }
inline uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, shared_memory + address, 4);
  return word;
}
inline void store_shared_word(uint32_t address, uint32_t word) { std::memcpy(shared_memory + address, &word, 4); }

// ldmatrix: lane i gives the address of row i % 8 of matrix i / 8, and gets 4 bytes of row i / 4 of each matrix.
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  const uint32_t mine[4] = {address};
  read_lanes(mine, [&](const auto& words) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) r[m] = load_shared_word(words[8 * m + lane / 4][0] + lane % 4 * 4);
  });
}

inline void store_shared(uint32_t address, uint4 v) { std::memcpy(shared_memory + address, &v, 16); }
inline uint4 load_shared(uint32_t address) {
  uint4 v;
  std::memcpy(&v, shared_memory + address, 16);
  return v;
}

// c[16, 8] += a[16, 32] b[32, 8] in 8-bit integers: of k, a lane holds 4 (lane % 4) to + 3, then the same + 16.
inline void multiply_16x8x32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto byte = [](const uint32_t* words, int k) { return static_cast<int8_t>(words[k / 16] >> k % 4 * 8); };
  const int lane = threadIdx.x % 32;
  uint32_t rows[2][4][2];  // of the lane's two rows: the words of each lane
  read_lanes(a, [&](const auto& words) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        for (int w = 0; w < 2; ++w) rows[half][i][w] = words[lane / 4 * 4 + i][2 * w + half];
      }
    }
  });
  const uint32_t b[4] = {b0, b1};
  read_lanes(b, [&](const auto& words) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 32; ++k) {
        const int from = k % 16 / 4, column = lane % 4 * 2 + i % 2;
        c[i] += byte(rows[i / 2][from], k) * byte(words[column * 4 + from], k);
      }
    }
  });
}

inline float from_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
inline uint32_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF), from_bf16(a >> 16) * from_bf16(b >> 16));
}
inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(from_bf16(a & 0xFFFF) - from_bf16(b & 0xFFFF), from_bf16(a >> 16) - from_bf16(b >> 16));
}
inline float __bfloat162float(bf16 value) { return from_bf16(value.bits); }
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flipped) { return (x & mask) ^ flipped; }
inline int __float2int_rn(float value) {
  return static_cast<int>(std::clamp(std::nearbyint(static_cast<double>(value)), -2147483648.0, 2147483647.0));
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}

}  // namespace meshserve
