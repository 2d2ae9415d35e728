// Replaces CUDA and ptx.cuh for the kernels that are tested on the host, see cuda_threads.h.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "cuda_threads.h"
#include "e4m3.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace meshserve {

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct bf16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};

// A copy to shared memory by cp.async.
struct Copy {
  uint32_t to;
  const void* from;
  int size, bytes;
};

// State shared by the threads of a block.
struct Block {
  explicit Block(int threads) : all(threads), copies(threads) {}
  Meeting all;
  std::vector<std::deque<std::vector<Copy>>> copies;  // of each thread, by group; the last one is not committed
  struct Warp {
    Meeting meet{32};
    float values[32] = {};
    uint32_t words[32] = {};
    uint32_t fragments[32][6] = {};
  } warps[16];
  std::mutex lock;
  std::map<int, std::unique_ptr<Meeting>> barriers;  // by number
};

struct Index {
  unsigned x, y, z;
};
inline thread_local Index threadIdx, blockIdx, gridDim;
inline thread_local Block* block;

inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void sync_threads(int number, int threads) {
  Meeting* meet;
  {
    const std::lock_guard guard(block->lock);
    auto& found = block->barriers[number];
    if (found == nullptr) found = std::make_unique<Meeting>(threads);
    meet = found.get();
  }
  meet->arrive_and_wait();
}
inline void arrive_threads(int number, int threads) { sync_threads(number, threads); }
inline void __syncwarp() { block->warps[threadIdx.x / 32].meet.arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
inline void __trap() {
  std::fprintf(stderr, "trap\n");
  std::abort();
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
using std::max, std::min;
inline int atomicAdd(int* to, int value) { return std::atomic_ref<int>(*to).fetch_add(value); }
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) { return std::atomic_ref<uint32_t>(*to).fetch_add(value); }
inline uint32_t atomicOr(uint32_t* to, uint32_t value) { return std::atomic_ref<uint32_t>(*to).fetch_or(value); }

inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}
template <class Parameters>
void touch_parameters(const Parameters&) {}

inline float sum_over_lanes(float value, int lanes) {
  const int lane = threadIdx.x % 32;
  Block::Warp& warp = block->warps[threadIdx.x / 32];
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    warp.values[lane] = value;
    warp.meet.arrive_and_wait();
    value += warp.values[lane ^ offset];
    warp.meet.arrive_and_wait();
  }
  return value;
}

// Returns the values of all lanes.
template <class Read>
auto read_lanes(uint32_t mine, Read read) {
  Block::Warp& warp = block->warps[threadIdx.x / 32];
  warp.words[threadIdx.x % 32] = mine;
  warp.meet.arrive_and_wait();
  const auto result = read(warp.words);
  warp.meet.arrive_and_wait();
  return result;
}
inline int __reduce_add_sync(uint32_t, int value) {
  return read_lanes(value, [](const uint32_t* words) { return std::accumulate(words, words + 32, 0); });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return read_lanes(value, [](const uint32_t* words) {
    int largest = static_cast<int>(words[0]);
    for (int lane = 1; lane < 32; ++lane) largest = max(largest, static_cast<int>(words[lane]));
    return largest;
  });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return read_lanes(value, [](const uint32_t* words) { return *std::max_element(words, words + 32); });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  return read_lanes(value, [](const uint32_t* words) { return *std::min_element(words, words + 32); });
}
inline uint32_t __ballot_sync(uint32_t, bool is_set) {
  return read_lanes(is_set, [](const uint32_t* words) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= words[lane] << lane;
    return bits;
  });
}
inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
  return read_lanes(value, [=](const uint32_t* words) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(words[lane] == value) << lane;
    return bits;
  });
}
inline int __shfl_sync(uint32_t, int value, int lane) {
  return read_lanes(value, [=](const uint32_t* words) { return static_cast<int>(words[lane]); });
}
inline int __shfl_sync(uint32_t all, unsigned value, int lane) {
  return __shfl_sync(all, static_cast<int>(value), lane);
}
inline float __shfl_sync(uint32_t, float value, int lane) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return read_lanes(bits, [=](const uint32_t* words) {
    float result;
    std::memcpy(&result, words + lane, 4);
    return result;
  });
}
inline float __shfl_xor_sync(uint32_t, float value, int lanes) {
  const uint32_t found = read_lanes(std::bit_cast<uint32_t>(value),
                                    [&](const uint32_t* words) { return words[(threadIdx.x % 32) ^ lanes]; });
  return std::bit_cast<float>(found);
}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int lanes) {
  const unsigned from = threadIdx.x % 32 ^ lanes;
  return read_lanes(value, [=](const uint32_t* words) { return words[from]; });
}
inline int __shfl_up_sync(uint32_t, int value, int distance) {
  const int from = static_cast<int>(threadIdx.x % 32) - distance;
  return read_lanes(value, [=](const uint32_t* words) { return from < 0 ? value : static_cast<int>(words[from]); });
}
inline bool __all_sync(uint32_t, bool is_set) { return __ballot_sync(0xffffffffu, is_set) == 0xffffffffu; }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(bits)) + 1; }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline uint32_t __float_as_uint(float value) { return bits_of(value); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t round_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return round_to_bf16(low) | round_to_bf16(high) << 16; }
inline float from_bf16(uint32_t bits) {
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float4 unpack_bf16(uint2 v) {
  return {from_bf16(v.x & 0xFFFF), from_bf16(v.x >> 16), from_bf16(v.y & 0xFFFF), from_bf16(v.y >> 16)};
}
inline float __bfloat162float(bf16 value) { return from_bf16(value.bits); }
inline bf16 __float2bfloat16(float value) { return {static_cast<uint16_t>(round_to_bf16(value))}; }
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF), from_bf16(a >> 16) * from_bf16(b >> 16));
}
inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(from_bf16(a & 0xFFFF) - from_bf16(b & 0xFFFF), from_bf16(a >> 16) - from_bf16(b >> 16));
}
inline int __float2int_rn(float value) {
  return static_cast<int>(std::clamp(std::nearbyint(static_cast<double>(value)), -2147483648.0, 2147483647.0));
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_last_policy() { return 0; }
inline uint4 load_weights(const bf16* from, uint64_t) { return *reinterpret_cast<const uint4*>(from); }

inline float from_f16(uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  return static_cast<float>(std::bit_cast<_Float16>(low));
}
inline uint32_t pack_f16(float low, float high) {
  return std::bit_cast<uint16_t>(static_cast<_Float16>(low)) |
         static_cast<uint32_t>(std::bit_cast<uint16_t>(static_cast<_Float16>(high))) << 16;
}
inline void e4m3_to_f16(uint32_t word, uint32_t& low, uint32_t& high) {
  low = pack_f16(from_e4m3(word & 255), from_e4m3(word >> 8 & 255));
  high = pack_f16(from_e4m3(word >> 16 & 255), from_e4m3(word >> 24));
}

// c[16, 8] += a[16, 16] b[16, 8], in the fragments of mma.m16n8k16, of elements that `convert` turns into floats.
inline void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                               float (*convert)(uint32_t)) {
  const int lane = threadIdx.x % 32;
  Block::Warp& warp = block->warps[threadIdx.x / 32];
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::copy(mine, mine + 6, warp.fragments[lane]);
  warp.meet.arrive_and_wait();
  auto element = [=](uint32_t pair, int k) { return convert(k % 2 ? pair >> 16 : pair & 0xFFFF); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;
      const float left = element(warp.fragments[row % 8 * 4 + holder][row / 8 + k / 8 * 2], k);
      c[i] += left * element(warp.fragments[column * 4 + holder][4 + k / 8], k);
    }
  }
  warp.meet.arrive_and_wait();
}
inline void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments(c, a, b0, b1, from_bf16);
}
inline void multiply_16x8x16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments(c, a, b0, b1, from_f16);
}

// Of 4-bit weights, whose products the tests of converted_product.cuh run.
inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flipped) { return (x & mask) ^ flipped; }
inline void multiply_16x8x32(int (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) { __trap(); }

// ---- the copy engine: a copy is finished when it is issued -------------------------------------------------------
inline uint8_t* shared_base = nullptr;  // the shared memory of a kernel that takes addresses
inline uint32_t shared_address(const void* pointer) {
  return shared_base == nullptr ? 0 : static_cast<const uint8_t*>(pointer) - shared_base;
}
inline uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, shared_base + address, 4);
  return word;
}
inline void store_shared_word(uint32_t address, uint32_t word) { std::memcpy(shared_base + address, &word, 4); }
inline uint4 load_shared(uint32_t address) {
  uint4 v;
  std::memcpy(&v, shared_base + address, 16);
  return v;
}
inline float4 load_shared_float4(uint32_t address) {
  float4 v;
  std::memcpy(&v, shared_base + address, 16);
  return v;
}
inline void store_shared_byte(uint32_t address, uint8_t byte) { shared_base[address] = byte; }
inline uint32_t load_shared_byte(uint32_t address) { return shared_base[address]; }
inline uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  std::memcpy(&half, shared_base + address, 2);
  return half;
}
inline void store_shared(uint32_t address, uint4 v) { std::memcpy(shared_base + address, &v, 16); }
inline void store_shared_float4(uint32_t address, float4 v) { std::memcpy(shared_base + address, &v, 16); }

struct Arrivals {
  int all = 0, missing = 0, num_phases = 0;
  long bytes = 0;
};
inline std::mutex arrivals_lock;
inline std::map<uint32_t, Arrivals> arrivals;
inline void change(uint32_t barrier, int arrived, long bytes) {
  const std::lock_guard guard(arrivals_lock);
  Arrivals& state = arrivals[barrier];
  state.missing -= arrived;
  state.bytes += bytes;
  if (state.missing == 0 && state.bytes == 0) state.missing = state.all, ++state.num_phases;
}
inline void barrier_init(uint32_t barrier, uint32_t count) {
  const std::lock_guard guard(arrivals_lock);
  arrivals[barrier] = {static_cast<int>(count), static_cast<int>(count), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) { change(barrier, 1, bytes); }
inline void barrier_arrive(uint32_t barrier) { change(barrier, 1, 0); }

// ---- clusters ----------------------------------------------------------------------------------------------------
// The blocks of a cluster have parts of one array as their shared memory. What a block sends to another arrives when
// that one waits for it, as late as CUDA allows: stores to another block's memory are not ordered by the cluster's
// barrier, whose arrivals are relaxed.
struct Cluster {
  Cluster(unsigned blocks, unsigned threads, uint32_t bytes)
      : num_threads(threads), block_bytes(bytes), num_arrivals(blocks * threads) {}
  unsigned num_threads;                // of a block
  uint32_t block_bytes;                // of its shared memory
  std::vector<unsigned> num_arrivals;  // of each thread
  std::mutex lock;
  struct Sent {
    uint32_t address, barrier;
    float4 value;
    int bytes = 16;  // of `value`: 4 or 16
  };
  std::vector<Sent> sent;

  unsigned& mine() {
    return num_arrivals[blockIdx.x % (num_arrivals.size() / num_threads) * num_threads + threadIdx.x];
  }
};
inline Cluster* cluster = nullptr;  // null: kernels of a cluster compile, but cannot run

inline uint8_t* of_block(uint8_t* shared) {
  const unsigned blocks = cluster->num_arrivals.size() / cluster->num_threads;
  return shared + blockIdx.x % blocks * cluster->block_bytes;
}
inline uint32_t address_in_cluster(uint32_t address, uint32_t rank) {
  return cluster == nullptr ? 0 : address % cluster->block_bytes + rank * cluster->block_bytes;
}
inline void send_float4(uint32_t address, float4 value, uint32_t barrier) {
  if (cluster == nullptr) __trap();
  const std::lock_guard guard(cluster->lock);
  cluster->sent.push_back({address, barrier, value});
}
inline void send_float(uint32_t address, float value, uint32_t barrier) {
  if (cluster == nullptr) __trap();
  const std::lock_guard guard(cluster->lock);
  cluster->sent.push_back({address, barrier, {value}, 4});
}
inline void receive(uint32_t barrier) {
  if (cluster == nullptr) return;
  const std::lock_guard guard(cluster->lock);
  std::erase_if(cluster->sent, [=](const Cluster::Sent& each) {
    if (each.barrier != barrier) return false;
    each.bytes == 16 ? store_shared_float4(each.address, each.value)
                     : store_shared_word(each.address, std::bit_cast<uint32_t>(each.value.x));
    change(barrier, 0, -each.bytes);
    return true;
  });
}
inline void cluster_arrive() {
  if (cluster == nullptr) __trap();
  ++cluster->mine();
}
inline void cluster_wait() {
  const auto& all = cluster->num_arrivals;
  while (*std::min_element(all.begin(), all.end()) < cluster->mine()) give_way();
}
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline void cluster_sync_shared() { cluster_sync(); }
inline void cluster_sync_global() { cluster_sync(); }
inline void barrier_arrive_in_cluster(uint32_t barrier) { change(barrier, 1, 0); }
inline void cluster_arrive_having(float) { cluster_arrive(); }
inline float4 load_cluster_float4(uint32_t address) {
  float4 v;
  std::memcpy(&v, shared_base + address, 16);
  return v;
}

inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  for (;; give_way()) {
    receive(barrier);
    const std::lock_guard guard(arrivals_lock);
    if (arrivals[barrier].num_phases % 2 != static_cast<int>(parity)) return;
  }
}

struct CUtensorMap {  // of three dimensions, with the 128-byte swizzle, or none if the box is a single row
  const uint8_t* data;
  int sizes[3], box[3], element_bytes;  // sizes in elements
};
inline void prefetch_map(const CUtensorMap*) {}
inline void prefetch_tile(const CUtensorMap*, int, int) {}
inline void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, int matrix, uint32_t barrier) {
  const size_t row_bytes = static_cast<size_t>(map->sizes[0]) * map->element_bytes;
  const int bytes = map->box[0] * map->element_bytes;
  if (column * map->element_bytes % 16 != 0) __trap();  // an illegal instruction on a GPU
  if (map->box[1] == 1 ? bytes % 16 != 0 || to % 128 != 0 : bytes != 128 || to % 1024 != 0) __trap();
  for (int r = 0; r < map->box[1]; ++r) {
    const size_t from_row = static_cast<size_t>(matrix) * map->sizes[1] + row + r;
    for (int i = 0; i < bytes; ++i) {  // zero beyond the matrix
      const bool is_inside = row + r < map->sizes[1] && column + i / map->element_bytes < map->sizes[0];
      const uint8_t* from = map->data + from_row * row_bytes + column * map->element_bytes + i;
      shared_base[to + 128 * r + (i ^ r % 8 * 16)] = is_inside ? *from : 0;
    }
  }
  change(barrier, 0, -static_cast<long>(bytes) * map->box[1]);
}
inline void copy_box_to_pair(uint32_t to, const CUtensorMap* map, int column, int row, int matrix, uint32_t barrier) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    copy_box(address_in_cluster(to, rank), map, column, row, matrix, address_in_cluster(barrier, rank));
  }
}
inline void copy_bytes(uint32_t to, const CUtensorMap* map, int row, int first, uint32_t barrier, uint64_t) {
  copy_box(to, map, first, row, 0, barrier);
}
inline void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) __trap();
  std::memcpy(shared_base + to, from, bytes);
  change(barrier, 0, -static_cast<long>(bytes));
}
// A tile [box[2], box[1] rows, box[0] elements] of rows of sizes[0] * sizes[2] elements, in a swizzle as wide as a row
// of the box.
inline void copy_tile(uint32_t to, const CUtensorMap* map, int row, int outer, uint32_t barrier, uint64_t) {
  const int bytes = map->box[0] * map->element_bytes;
  const size_t row_bytes = static_cast<size_t>(map->sizes[0]) * map->sizes[2] * map->element_bytes;
  if ((bytes != 64 && bytes != 128) || to % 1024 != 0) __trap();
  for (int part = 0; part < map->box[2]; ++part) {
    for (int r = 0; r < map->box[1]; ++r) {
      for (int i = 0; i < bytes; ++i) {
        const uint32_t offset = (part * map->box[1] + r) * bytes + i;
        const bool is_inside = row + r < map->sizes[1] && outer + part < map->sizes[2];
        shared_base[to + (offset ^ (offset / 128 % (bytes / 16) * 16))] =
            is_inside ? map->data[(row + r) * row_bytes + (outer + part) * bytes + i] : 0;
      }
    }
  }
  change(barrier, 0, -static_cast<long>(bytes) * map->box[1] * map->box[2]);
}
inline void copy_shared(uint32_t to, const void* from, int size, int bytes) {
  if (to % size != 0 || reinterpret_cast<uintptr_t>(from) % size != 0) __trap();
  std::memset(shared_base + to, 0, size);
  std::memcpy(shared_base + to, from, bytes);
}
// A thread's copies arrive when it waits for them, as late as CUDA allows.
inline std::deque<std::vector<Copy>>& my_copies() {
  auto& groups = block->copies[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  return groups;
}
inline void copy_16(uint32_t to, const void* from, int bytes) { my_copies().back().push_back({to, from, 16, bytes}); }
inline void copy_4(uint32_t to, const void* from, int bytes) { my_copies().back().push_back({to, from, 4, bytes}); }
inline void copy_weights(uint32_t to, const void* from, int bytes) { copy_16(to, from, bytes); }
inline void commit_copies() { my_copies().emplace_back(); }
template <int kLeft>
void wait_for_copies() {
  for (auto& groups = my_copies(); groups.size() > kLeft + 1; groups.pop_front()) {
    for (const Copy& copy : groups.front()) copy_shared(copy.to, copy.from, copy.size, copy.bytes);
  }
}
// Returns whether copies of this thread have not arrived.
inline bool has_copies() {
  const auto& groups = my_copies();
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return !group.empty(); });
}
inline void fence_shared_before_copies() {}
template <int kRegisters>
void give_up_registers() {}
template <int kRegisters>
void take_registers() {}

// ldmatrix: lane i gives the address of row i % 8 of matrix i / 8, and gets 4 bytes of row i / 4 of each matrix.
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  uint32_t found[4];
  read_lanes(address, [&](const uint32_t* words) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) found[m] = load_shared_word(words[8 * m + lane / 4] + lane % 4 * 4);
    return 0;
  });
  std::copy(found, found + 4, r);
}

// The same of transposed matrices of 16-bit elements.
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  uint32_t found[4];
  read_lanes(address, [&](const uint32_t* words) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
    for (int m = 0; m < 4; ++m) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) std::memcpy(&pair[i], shared_base + words[8 * m + row + i] + 2 * column, 2);
      found[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
    return 0;
  });
  std::copy(found, found + 4, r);
}
inline uint32_t transpose_8x8(uint32_t fragment) {
  return read_lanes(fragment, [](const uint32_t* words) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
    auto element = [&](int from_row) { return words[from_row * 4 + column / 2] >> column % 2 * 16 & 0xFFFF; };
    return element(row) | element(row + 1) << 16;
  });
}

template <class T>
T __ldg(const T* from) {
  return *from;
}

inline float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

inline void store_p2p(void* to, uint2 v) {
  uint32_t* words = static_cast<uint32_t*>(to);
  std::atomic_ref<uint32_t>(words[1]).store(v.y, std::memory_order_relaxed);
  std::atomic_ref<uint32_t>(words[0]).store(v.x, std::memory_order_relaxed);
}
inline void store_p2p(void* to, uint4 v) {
  store_p2p(static_cast<uint32_t*>(to) + 2, uint2{v.z, v.w});
  store_p2p(to, uint2{v.x, v.y});
}
inline uint32_t load_word(const void* from, int index) {
  uint32_t* words = static_cast<uint32_t*>(const_cast<void*>(from));
  const uint32_t word = std::atomic_ref<uint32_t>(words[index]).load(std::memory_order_relaxed);
  if (word == 0xFFFFFFFFu) give_way();  // the word has not arrived: let other threads run
  return word;
}
template <class Words>
Words load_p2p(const void* from);
template <>
inline uint2 load_p2p(const void* from) {
  return {load_word(from, 0), load_word(from, 1)};
}
template <>
inline uint4 load_p2p(const void* from) {
  return {load_word(from, 0), load_word(from, 1), load_word(from, 2), load_word(from, 3)};
}
inline uint2 load_past_l1(const bf16* from) { return *reinterpret_cast<const uint2*>(from); }
inline int load_past_l1(const int* from) { return *from; }
inline void store_past_l1(int* to, int v) { *to = v; }

// All 32 lanes of a warp take part.
inline float largest_of_16_lanes(float value) {
  const int lane = threadIdx.x % 32;
  Block::Warp& warp = block->warps[threadIdx.x / 32];
  for (int offset = 8; offset > 0; offset /= 2) {
    warp.values[lane] = value;
    warp.meet.arrive_and_wait();
    value = std::fmax(value, warp.values[lane ^ offset]);
    warp.meet.arrive_and_wait();
  }
  return value;
}
inline unsigned long long nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace meshserve
