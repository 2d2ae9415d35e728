// P2P all-reduce and all-gather between the GPUs of a mesh within kernels, by plain stores over NVLink. No multicast.
//
// Every GPU has an inbox with one slot per rank for each of two rounds. To sum, a GPU writes its summand to its slot in
// every inbox, and every GPU adds the slots of its own inbox in rank order. This takes one transfer over NVLink, and
// all GPUs get the same bits. No flags are sent: a word that has not arrived holds kEmpty, which rounding to bfloat16
// never produces, and the reader of a word resets it to kEmpty.
//
// Rounds alternate between the two sets of slots. A GPU begins round n + 1 when it has all summands of round n. Their
// senders had completed round n - 1 before, so its slots, which round n + 1 uses again, are empty everywhere.
#pragma once
#include "common/weight_formats.cuh"

namespace meshserve {

constexpr int kMaxRanks = 8;
constexpr size_t kSlotBytes = 2 << 20;
constexpr uint32_t kEmpty = 0xFFFFFFFFu;  // two bfloat16 NaNs; the NaN that rounding gives is 0x7FFF
constexpr uint32_t kInsteadOfEmpty = 0x7FFF7FFFu;

// The decode layers, one-shot operations and two-shot sums (two_shot.cuh) count rounds separately and have separate
// inboxes.
enum class Channel : int { kLayers, kOneShot, kTwoShot };
constexpr int kChannels = 3;

// Counters in a GPU's memory of a channel with one kernel per round: completed rounds, and the blocks of the current
// round that have ended.
struct RoundCounter {
  uint32_t round, blocks;
};

// One channel from the point of view of one GPU.
struct P2PGroup {
  // This rank's inbox, then those of the next ranks: [2 rounds, num slots, kSlotBytes]; two-shot inboxes differ.
  uint8_t* inboxes[kMaxRanks];
  int num, rank;
  RoundCounter* counter;
  int* stalled;  // in host memory, per rank: 1 + the rank for which it timed out waiting, or 0
  unsigned long long patience_nanoseconds;

  // Returns the slot of rank `from` in the inbox of the GPU `distance` ranks further.
  __device__ __forceinline__ uint8_t* slot(int distance, int round, int from) const {
    return inboxes[distance] + (round * num + from) * kSlotBytes;
  }
};

__device__ __forceinline__ bool is_empty(uint2 v) { return v.x == kEmpty || v.y == kEmpty; }
__device__ __forceinline__ bool is_empty(uint4 v) {
  return v.x == kEmpty || v.y == kEmpty || v.z == kEmpty || v.w == kEmpty;
}
__device__ __forceinline__ uint32_t not_empty(uint32_t word) { return word == kEmpty ? kInsteadOfEmpty : word; }
__device__ __forceinline__ uint2 not_empty(uint2 v) { return make_uint2(not_empty(v.x), not_empty(v.y)); }
__device__ __forceinline__ uint4 not_empty(uint4 v) {
  return make_uint4(not_empty(v.x), not_empty(v.y), not_empty(v.z), not_empty(v.w));
}
__device__ __forceinline__ void make_empty(uint2* at) { store_p2p(at, make_uint2(kEmpty, kEmpty)); }
__device__ __forceinline__ void make_empty(uint4* at) { store_p2p(at, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty)); }

// Waits for the words of a uint2 or uint4 in this GPU's inbox. Traps if they do not arrive in time.
template <class Words>
static __device__ __noinline__ Words wait_for_rank(const P2PGroup& p2p, const Words* at, int from) {
  const unsigned long long start = nanoseconds();
  Words v;
  for (int i = 1; is_empty(v = load_p2p<Words>(at)); ++i) {
    if (i % 1024 == 0 && nanoseconds() - start > p2p.patience_nanoseconds) {
      p2p.stalled[p2p.rank] = from + 1;
      __threadfence_system();
      __trap();
    }
  }
  return v;
}

// Waits for words in this GPU's inbox, whose last loaded value was `v`, and resets their place to empty.
template <class Words>
__device__ __forceinline__ Words take(const P2PGroup& p2p, Words* at, Words v, int from) {
  if (is_empty(v)) v = wait_for_rank(p2p, at, from);
  make_empty(at);
  return v;
}

// Writes 8 bytes at `offset` of this GPU's slot in every inbox, in its own last. Each GPU begins with a different one.
__device__ __forceinline__ void send(const P2PGroup& p2p, int round, size_t offset, uint2 v) {
#pragma unroll
  for (int i = 1; i < kMaxRanks; ++i) {
    if (i < p2p.num) store_p2p(p2p.slot(i, round, p2p.rank) + offset, v);
  }
  store_p2p(p2p.slot(0, round, p2p.rank) + offset, v);
}

// Reads 8 bytes at `offset` of every slot in this GPU's inbox as they arrive, and resets them to empty.
__device__ __forceinline__ void receive(const P2PGroup& p2p, int round, size_t offset, uint2 (&v)[kMaxRanks]) {
  auto place = [&](int from) { return reinterpret_cast<uint2*>(p2p.slot(0, round, from) + offset); };
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r < p2p.num) v[r] = load_p2p<uint2>(place(r));
  }
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r < p2p.num) v[r] = take(p2p, place(r), v[r], r);
  }
}

// Returns the sum of four bfloat16 of every slot, in float32 and in rank order.
__device__ __forceinline__ float4 add_up(const P2PGroup& p2p, const uint2 (&v)[kMaxRanks]) {
  float4 sum = unpack_bf16(v[0]);
#pragma unroll
  for (int r = 1; r < kMaxRanks; ++r) {
    if (r < p2p.num) {
      float4 share = unpack_bf16(v[r]);
      sum = make_float4(sum.x + share.x, sum.y + share.y, sum.z + share.z, sum.w + share.w);
    }
  }
  return sum;
}

constexpr int kP2PThreads = 128;

// ---- a single all-reduce or all-gather as a call ------------------------------------------------------------------
struct OneShotArgs {
  P2PGroup p2p;
  const uint2* in;  // [num_pairs]
  uint2* out;       // the sum [num_pairs], or the words of every rank [num, num_pairs]
  int num_pairs;    // pairs of 32-bit words
};

// Ends a call. Every block reads the round at its start, so the block that ends last increments it.
__device__ __forceinline__ void end_call(const P2PGroup& p2p) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&p2p.counter->blocks, 1) == gridDim.x - 1) {
    p2p.counter->blocks = 0;
    p2p.counter->round += 1;
  }
}

template <bool kIsSum>
__global__ void __launch_bounds__(kP2PThreads) one_shot_kernel(const __grid_constant__ OneShotArgs args) {
  const P2PGroup& p2p = args.p2p;
  const int round = *const_cast<volatile uint32_t*>(&p2p.counter->round) % 2;
  const int first = blockIdx.x * kP2PThreads + threadIdx.x, step = gridDim.x * kP2PThreads;
  for (int i = first; i < args.num_pairs; i += step)
    send(p2p, round, 8 * static_cast<size_t>(i), not_empty(args.in[i]));
  for (int i = first; i < args.num_pairs; i += step) {
    uint2 v[kMaxRanks];
    receive(p2p, round, 8 * static_cast<size_t>(i), v);
    if constexpr (kIsSum) {
      const float4 sum = add_up(p2p, v);
      args.out[i] = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    } else {
#pragma unroll
      for (int r = 0; r < kMaxRanks; ++r) {
        if (r < p2p.num) args.out[r * args.num_pairs + i] = v[r];
      }
    }
  }
  end_call(p2p);
}

// ---- between the kernels of a layer ------------------------------------------------------------------------------
// The projection before this kernel sends this GPU's summand. The kernel computes out = residual + the sum of all
// summands, and the inputs of the next norm, as finish_residual does. A warp processes 128 columns of a token.
//
// It waits for the projection's words rather than for the projection to end. Once this GPU's own summand has arrived,
// the projection has waited for all kernels before it: what they wrote can be read (past the L1, which may hold older
// data), and what they read can be overwritten. The kernel waits for the projection at its end, so that a kernel that
// waits for it knows that all earlier kernels have ended.
//
// The words it finds always belong to its own round. The two gathers of a layer may run at once, but the second gather
// of a layer and later kernels may not, because the QKV projection lets no kernel start before that gather has ended.
// Otherwise, with small kernels and a late GPU, the next layer's gather would start as well and take words that this
// gather has not yet reset.
constexpr bool kWaitsForWords = true;

struct GatherArgs {
  P2PGroup p2p;
  int round;
  const bf16* residual;  // may be `out`
  bf16* out;
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16* scaled_out;
  float* sums_out;
  int batch, columns;
};

// W: the format of the next projection's weights.
template <class W = Bf16Weights>
static __global__ void __launch_bounds__(kP2PThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  const int warp = blockIdx.x * (kP2PThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_warps = gridDim.x * (kP2PThreads / 32), tiles = args.columns / 128;
  if (threadIdx.x == 0) let_next_kernel_start();
  touch_parameters(args);
  if (!kWaitsForWords) wait_for_previous_kernel();
  for (int i = warp; i < args.batch * tiles; i += num_warps) {
    const int tile = i % tiles;
    const size_t at = static_cast<size_t>(i) * 128 + 4 * lane;
    uint2 gain = make_uint2(0, 0);
    if (args.next_gain != nullptr) gain = *reinterpret_cast<const uint2*>(args.next_gain + tile * 128 + 4 * lane);
    const uint8_t* slot = args.p2p.slot(0, args.round, args.p2p.rank);
    const uint2* own = reinterpret_cast<const uint2*>(slot + at * sizeof(bf16));
    if (is_empty(load_p2p<uint2>(own))) wait_for_rank(args.p2p, own, args.p2p.rank);
    const uint2 residual = load_past_l1(args.residual + at);
    uint2 v[kMaxRanks];
    receive(args.p2p, args.round, at * sizeof(bf16), v);
    const float4 sum = add_up(args.p2p, v);
    float4 x = unpack_bf16(residual);
    const uint2 rounded = make_uint2(pack_bf16(x.x + sum.x, x.y + sum.y), pack_bf16(x.z + sum.z, x.w + sum.w));
    *reinterpret_cast<uint2*>(args.out + at) = rounded;
    if (args.next_gain == nullptr) continue;
    x = unpack_bf16(rounded);
    const float4 g = unpack_bf16(gain);
    uint8_t* exponents = exponents_of(args.scaled_out, args.batch, args.columns) + i * (128 / kExponentColumns);
    store_activations<W>(args.scaled_out + static_cast<size_t>(i) * 128, exponents, 4 * lane,
                         make_float4(x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w));
    const float squares = sum_over_lanes(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, 32);
    if (lane == 0) args.sums_out[i] = squares;
  }
  if (kWaitsForWords) wait_for_previous_kernel();
}

}  // namespace meshserve
