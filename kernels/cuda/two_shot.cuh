// A long sum over the GPUs of a mesh, in two shots: x is cut into a chunk a rank. Every GPU sends its share of a chunk
// to the chunk's rank, which adds up and sends the sum to all. So x crosses the wire twice, less what a GPU keeps,
// however many they are; in one shot (peers.cuh) it goes to each of them, in one trip.
//
// Words travel as there, with an inbox for each shot: one that has not come holds kEmpty, who has read it empties it,
// and rounds, here calls, alternate. No place is used twice in a call: that a word has been emptied is certain only
// when the kernel that did it has ended. Emptied and used again within a kernel, words were lost (docs/decisions/027).
//
// A thread takes 16 bytes of every chunk a turn. It sends its shares a turn before it adds them up and looks for the
// sums a turn after, so that trips take no time.
#pragma once
#include "peers.cuh"

namespace meshserve {

constexpr int kTwoShotThreads = 256;
constexpr size_t kTwoShotBytes = 32 << 20;  // of x in a call
constexpr bool has_two_shots(int num) { return num == 2 || num == 4; }
// In a GPU's memory: [2 rounds, 2 shots, the other ranks, chunk].
constexpr size_t two_shot_inbox_bytes(int num) {
  return has_two_shots(num) ? 4 * (num - 1) * (kTwoShotBytes / num) : 0;
}

struct TwoShotArgs {
  Peers peers;
  const uint4* in;  // [ranks, chunk]
  uint4* out;
  int chunk;  // of 16 bytes
};

template <int kNum>
__global__ void __launch_bounds__(kTwoShotThreads, 2) two_shot_kernel(const __grid_constant__ TwoShotArgs args) {
  constexpr int kMostChunk = kTwoShotBytes / kNum / sizeof(uint4);
  const Peers& peers = args.peers;
  const int rank = peers.rank, step = gridDim.x * kTwoShotThreads;
  const int first = blockIdx.x * kTwoShotThreads + threadIdx.x;
  const int round = *const_cast<volatile uint32_t*>(&peers.counter->round) % 2;
  auto at = [&](int owner, int i) { return static_cast<size_t>(owner) * args.chunk + i; };
  auto slot = [&](int to, int shot, int from, int i) {
    const int other = (from - to + kNum) % kNum - 1;
    uint8_t* inbox = peers.inboxes[(to - rank + kNum) % kNum];
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
      if (adds) parts[r] = r == rank ? args.in[at(r, i)] : load_from_peers<uint4>(slot(rank, 0, r, i));
      if (takes && r != rank) sums[r] = load_from_peers<uint4>(slot(rank, 1, r, taken));
    }
    if (sends) {
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) store_for_peers(slot(r, 0, rank, sent), not_empty(shares[r]));
      }
    }
    if (adds) {
      float4 low = {}, high = {};
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) parts[r] = take(peers, slot(rank, 0, r, i), parts[r], r);
        low = add(low, unpack_bf16(make_uint2(parts[r].x, parts[r].y)));
        high = add(high, unpack_bf16(make_uint2(parts[r].z, parts[r].w)));
      }
      const uint4 sum = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                                   pack_bf16(high.z, high.w));
      args.out[at(rank, i)] = sum;
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) store_for_peers(slot(r, 1, rank, i), sum);
      }
    }
    if (takes) {
#pragma unroll
      for (int r = 0; r < kNum; ++r) {
        if (r != rank) args.out[at(r, taken)] = take(peers, slot(rank, 1, r, taken), sums[r], r);
      }
    }
  }
  end_call(peers);
}

}  // namespace meshserve
