// Wrappers of the PTX instructions that CUDA C++ does not expose: barriers in shared memory, bulk tensor copies,
// clusters, programmatic dependent launch, and the small matrix instructions.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
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
// to the kernel and its bulk copies, as with ordinary consecutive launches.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Reads every cache line of a kernel's parameters before the wait, because the constant cache is cold at each launch.
template <class Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters& parameters) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Parameters) / 4); i += 16) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&parameters)[i]));
  }
}

// ---- barriers in shared memory -----------------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// ---- bulk tensor copies ------------------------------------------------------------------------------------------
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
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies a box. Every tensor map here is [outer, row, 64 columns], and a box has all 64 columns.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int row, int outer, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(outer), "l"(policy)
      : "memory");
}
// Asks for the same box in the L2.
__device__ __forceinline__ void prefetch_tile(const CUtensorMap* map, int row, int outer) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(0), "r"(row),
               "r"(outer)
               : "memory");
}
// Copies a box of 128 bytes of each row, from a map [row, bytes] whose third dimension is 1.
__device__ __forceinline__ void copy_bytes(uint32_t to, const CUtensorMap* map, int row, int first, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(first), "r"(row), "r"(0), "l"(policy)
      : "memory");
}
// Copies a box of 64 columns from a map [matrix, row, column].
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, int matrix,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}
// The same to both blocks of a cluster, at the same place of their shared memory; each block's barrier counts the
// bytes.
__device__ __forceinline__ void copy_box_to_pair(uint32_t to, const CUtensorMap* map, int column, int row, int matrix,
                                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Copies consecutive bytes, a multiple of 16.
__device__ __forceinline__ void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Copies 16 or 4 bytes to shared memory, of which the first `bytes` are read and the others become zero. They are
// ordered as ordinary stores are. `commit_copies` makes a group of the thread's copies so far; `wait_for_copies` waits
// until at most kLeft groups are not complete.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// Orders ordinary stores to shared memory before reads by the copy engine and by wgmma.
__device__ __forceinline__ void fence_shared_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------
// A release at cluster scope waits until all writes to global memory are visible on the GPU, about a microsecond.
// Arrivals are therefore relaxed, and data that a cluster exchanges through shared memory uses a separate fence.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// Waits for all blocks of the cluster. Each then sees what the others wrote to their own shared memory before. The
// fence does not order stores to another block's: send_float4 counts those.
__device__ __forceinline__ void cluster_sync_shared() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
#else
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  cluster_wait();
#endif
}
// Waits for all blocks of the cluster. Each then sees what the others wrote to global memory before, also through the
// copy engine.
__device__ __forceinline__ void cluster_sync_global() {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  cluster_wait();
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Arrives once the loaded `value` is available: the waiting block may then exit, and its shared memory is gone.
__device__ __forceinline__ void cluster_arrive_having(float value) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.eq.u32 p, %0, 0xFFFFFFFF;\n"
      "@p nanosleep.u32 1;\n"
      "barrier.cluster.arrive.relaxed;\n}\n" ::"r"(__float_as_uint(value))
      : "memory");
}
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Arrives at a barrier of a block of the cluster, to say that it has read shared memory. A release at cluster scope
// would wait for all of the thread's writes to global memory.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Waits at a barrier for `threads` threads of the block (__syncthreads uses number 0).
__device__ __forceinline__ void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at such a barrier without waiting at it. Others wait in sync_threads with the same number of threads.
__device__ __forceinline__ void arrive_threads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Stores to another block of a cluster of two or more, and counts the bytes on that block's barrier.
__device__ __forceinline__ void send_float4(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send_float(uint32_t address, float v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
}
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

// ---- registers ---------------------------------------------------------------------------------------------------
// Changes how many registers a thread of the warpgroup may use.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
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
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
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
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ E4m3Pair split_e4m3(float low, float high) {
  const uint16_t first = to_e4m3(low, high);
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(first));
  const float2 rounded = __half22float2(*reinterpret_cast<__half2*>(&halves));
  return {first, to_e4m3(low - rounded.x, high - rounded.y)};
}

}  // namespace meshserve
