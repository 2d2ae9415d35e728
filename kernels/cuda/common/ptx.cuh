// Wrappers of the PTX instructions that CUDA C++ does not expose and that all supported GPUs have: copies to shared
// memory, barriers of a block, words that other GPUs see, and the matrix instructions of a warp.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace meshserve {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- programmatic dependent launch -------------------------------------------------------------------------------
// Every kernel lets the next one start at once, and waits before it accesses data that an earlier kernel wrote. Data
// that no kernel of the call writes (weights, pages of earlier tokens) is fetched before the wait. After the wait, the
// predecessor has ended, and because every kernel waits, so have all kernels before it. Their writes are then visible
// to the kernel and its bulk copies, as with ordinary consecutive launches. Kernels of earlier GPUs start in order.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Reads every cache line of a kernel's parameters before the wait, because the constant cache is cold at each launch.
template <class Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters& parameters) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Parameters) / 4); i += 16) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&parameters)[i]));
  }
}

// ---- copies to shared memory --------------------------------------------------------------------------------------
// Weights and pages are read once per step and marked to be evicted from the L2 first, so that activations stay in it.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Loads 16 bytes of weights to registers.
__device__ __forceinline__ uint4 load_weights(const bf16* from, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}
// Copies 16 or 4 bytes to shared memory, of which the first `bytes` are read and the others become zero. They are
// ordered as ordinary stores are. `commit_copies` makes a group of the thread's copies so far; `wait_for_copies` waits
// until at most kLeft groups are not complete.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies 16 bytes of weights likewise, whose neighbors are needed soon.
__device__ __forceinline__ void copy_weights(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- threads of a block -------------------------------------------------------------------------------------------
// Waits at a barrier for `threads` threads of the block (__syncthreads uses number 0).
__device__ __forceinline__ void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at such a barrier without waiting at it. Others wait in sync_threads with the same number of threads.
__device__ __forceinline__ void arrive_threads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- shared memory ------------------------------------------------------------------------------------------------
__device__ __forceinline__ void store_shared_float4(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared_byte(uint32_t address, uint8_t byte) {
  asm volatile("st.shared.b8 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(byte)) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}
__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}

// ---- other GPUs ---------------------------------------------------------------------------------------------------
// Stores and loads visible to other GPUs. They are unordered, but each word is written whole.
__device__ __forceinline__ void store_p2p(void* to, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_p2p(void* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
template <class Words>
__device__ Words load_p2p(const void* from);
template <>
__device__ __forceinline__ uint2 load_p2p(const void* from) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint4 load_p2p(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_past_l1(const bf16* from) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ int load_past_l1(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_past_l1(int* to, int v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// ---- matrix fragments of one warp --------------------------------------------------------------------------------
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t fragment) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
  return out;
}
// c[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16, 8] += a[16, 32] b[32, 8], in 8-bit integers with signs
__device__ __forceinline__ void multiply_16x8x32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with f16 operands.
__device__ __forceinline__ void multiply_16x8x16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- small arithmetic --------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}
// Converts the lower two e4m3 numbers of a word, and the upper two, to pairs of f16, which hold them exactly.
__device__ __forceinline__ void e4m3_to_f16(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));  // less 0
#endif
  return out;
}
__device__ __forceinline__ uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
#if __CUDA_ARCH__ >= 900
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(b), "r"(0xBF80BF80u), "r"(a));  // b times -1
#endif
  return out;
}
// Returns (x & mask) ^ flipped, as one instruction: the compiler would make two of two constants.
__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flipped) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(out) : "r"(x), "r"(mask), "r"(flipped));
  return out;
}
__device__ __forceinline__ float4 unpack_bf16(uint2 packed) {
  float2 low = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&packed.x));
  float2 high = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&packed.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// Returns the sum over the `lanes` (a power of two) neighboring lanes that hold one row.
__device__ __forceinline__ float sum_over_lanes(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Returns the largest value of the 16 neighboring lanes; other lanes need not take part.
__device__ __forceinline__ float largest_of_16_lanes(float value) {
  const uint32_t lanes = 0xFFFFu << (threadIdx.x & 16);
  for (int offset = 8; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(lanes, value, offset));
  return value;
}

// Two numbers as the nearest e4m3 (the first in the low byte), and the nearest e4m3 of what is then missing.
struct E4m3Pair {
  uint16_t first, second;
};
__device__ __forceinline__ uint16_t to_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
#else
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
#endif
}
__device__ __forceinline__ E4m3Pair split_e4m3(float low, float high) {
  const uint16_t first = to_e4m3(low, high);
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(first));
  const float2 rounded = __half22float2(*reinterpret_cast<__half2*>(&halves));
  return {first, to_e4m3(low - rounded.x, high - rounded.y)};
}

}  // namespace meshserve
