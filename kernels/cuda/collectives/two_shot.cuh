// Two-shot P2P all-reduce of long arrays: x is split into one chunk per rank. Every GPU sends its summand of a chunk to
// the chunk's rank, which sums them and sends the result to all. x therefore crosses NVLink twice (less the part that a
// GPU keeps) for any number of GPUs; in one shot (p2p.cuh), x is sent once to each GPU.
//
// Words are exchanged as in p2p.cuh, with one inbox per shot: a word that has not arrived holds kEmpty, its reader
// resets it, and rounds (here calls) alternate. No place is used twice within a call, because a word is certain to be
// reset only when the kernel that reset it has ended. When places were reused within a kernel, words were lost
// (docs/decisions/027).
//
// A thread processes 16 bytes of every chunk per iteration. It sends summands one iteration before it adds them, and
// reads the sums one iteration later, so that transfer latency is hidden.
#pragma once
#include "collectives/p2p.cuh"

namespace meshserve {

constexpr int kTwoShotThreads = 256;
constexpr size_t kTwoShotBytes = 32 << 20;  // maximum bytes of x per call
constexpr bool has_two_shots(int num) { return num == 2 || num == 4; }
// Returns the bytes of a GPU's inbox: [2 rounds, 2 shots, other ranks, chunk].
constexpr size_t two_shot_inbox_bytes(int num) {
  return has_two_shots(num) ? 4 * (num - 1) * (kTwoShotBytes / num) : 0;
}

struct TwoShotArgs {
  P2PGroup p2p;
  const uint4* in;  // [ranks, chunk]
  uint4* out;
  int chunk;  // in units of 16 bytes
};

template <int kNum>
__global__ void __launch_bounds__(kTwoShotThreads, 2) two_shot_kernel(const __grid_constant__ TwoShotArgs args) {
  constexpr int kMostChunk = kTwoShotBytes / kNum / sizeof(uint4);
  const P2PGroup& p2p = args.p2p;
  const int rank = p2p.rank, step = gridDim.x * kTwoShotThreads;
  const int first = blockIdx.x * kTwoShotThreads + threadIdx.x;
  const int round = *const_cast<volatile uint32_t*>(&p2p.counter->round) % 2;
  auto at = [&](int owner, int i) { return static_cast<size_t>(owner) * args.chunk + i; };
  auto slot = [&](int to, int shot, int from, int i) {
    const int other = (from - to + kNum) % kNum - 1;
    uint8_t* inbox = p2p.inboxes[(to - rank + kNum) % kNum];
    const size_t slots_before = (2 * round + shot) * (kNum - 1) + other;
    return reinterpret_cast<uint4*>(inbox) + slots_before * kMostChunk + i;
  };

#pragma unroll 1
  for (int i = first - step; i < args.chunk + step; i += step) {
    const int sent = i + step, taken = i - step;
    const bool sends = sent < args.chunk, adds = i >= 0 && i < args.chunk, takes = taken >= 0;
    uint4 shares[kNum], parts[kNum], sums[kNum];
#pragma unroll
    for (int r = 0; r < kNum; ++r) {  // all loads before the first wait
      if (sends && r != rank) shares[r] = args.in[at(r, sent)];
      if (adds) parts[r] = r == rank ? args.in[at(r, i)] : load_p2p<uint4>(slot(rank, 0, r, i));
      if (takes && r != rank) sums[r] = load_p2p<uint4>(slot(rank, 1, r, taken));
    }
    if (sends) {
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) store_p2p(slot(r, 0, rank, sent), not_empty(shares[r]));
      }
    }
    if (adds) {
      float4 low = {}, high = {};
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) parts[r] = take(p2p, slot(rank, 0, r, i), parts[r], r);
        low = add(low, unpack_bf16(make_uint2(parts[r].x, parts[r].y)));
        high = add(high, unpack_bf16(make_uint2(parts[r].z, parts[r].w)));
      }
      const uint4 sum = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                                   pack_bf16(high.z, high.w));
      args.out[at(rank, i)] = sum;
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) store_p2p(slot(r, 1, rank, i), sum);
      }
    }
    if (takes) {
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) args.out[at(r, taken)] = take(p2p, slot(rank, 1, r, taken), sums[r], r);
      }
    }
  }
  end_call(p2p);
}

}  // namespace meshserve
