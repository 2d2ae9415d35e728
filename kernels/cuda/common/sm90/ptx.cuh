// Wrappers of the PTX instructions of Hopper GPUs: barriers that count bytes, bulk tensor copies, clusters, and
// registers of a warpgroup.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {

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

}  // namespace meshserve
