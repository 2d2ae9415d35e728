// Replaces CUDA for threshold.cuh on the host. For threads see cuda_threads.h; one block runs at a time.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_threads.h"

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

using std::isfinite;
using std::max;
using std::min;

struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;

struct Warp {
  Meeting meet{32};
  unsigned long long values[32] = {};
};
struct Block {
  explicit Block(int threads) : all(threads) {
    for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
  }
  Meeting all;
  std::vector<std::unique_ptr<Warp>> warps;
};
inline thread_local Block* block;

inline void __syncthreads() { block->all.arrive_and_wait(); }

// Exchanges one value per lane.
inline const unsigned long long* shown(unsigned long long value, bool ends) {
  Warp& warp = *block->warps[threadIdx.x / 32];
  if (!ends) warp.values[threadIdx.x % 32] = value;
  warp.meet.arrive_and_wait();
  return warp.values;
}
inline unsigned long long __shfl_up_sync(unsigned, unsigned long long value, int distance) {
  const int lane = threadIdx.x % 32;
  const unsigned long long found = shown(value, false)[lane >= distance ? lane - distance : lane];
  shown(0, true);
  return found;
}
inline unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int distance) {
  const int lane = threadIdx.x % 32;
  const unsigned long long found = shown(value, false)[lane + distance < 32 ? lane + distance : lane];
  shown(0, true);
  return found;
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  const unsigned long long* values = shown(value, false);
  const auto found = static_cast<uint32_t>(*std::min_element(values, values + 32));
  shown(0, true);
  return found;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) { return ~__reduce_min_sync(0, ~value); }

// The lanes of a branch run one by one.
inline unsigned __activemask() { return 1u << threadIdx.x % 32; }
inline int __shfl_sync(unsigned, int value, int) { return value; }

inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

template <class T>
T atomicAdd(T* to, T value) {
  return std::atomic_ref<T>(*to).fetch_add(value);
}
inline int atomicAdd(int* to, int value) { return std::atomic_ref<int>(*to).fetch_add(value); }
template <class F>
void update(uint32_t* to, F function) {
  std::atomic_ref<uint32_t> place(*to);
  uint32_t seen = place.load();
  while (!place.compare_exchange_weak(seen, function(seen))) {
  }
}
inline void atomicMin(uint32_t* to, uint32_t value) {
  update(to, [=](uint32_t seen) { return std::min(seen, value); });
}
inline void atomicMax(uint32_t* to, uint32_t value) {
  update(to, [=](uint32_t seen) { return std::max(seen, value); });
}

template <class To, class From>
To bits_as(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline unsigned long long __float2ull_rn(float x) { return std::isnan(x) ? 0 : std::llrint(x); }
inline int __float2int_rz(float x) {
  return std::isnan(x) ? 0 : static_cast<int>(std::clamp(static_cast<double>(x), -2147483648.0, 2147483647.0));
}
