// What the GPUs of a mesh tell each other without leaving their kernels, by plain stores over NVLink. No multicast.
//
// Every GPU has an inbox: for each of two rounds, a slot for each rank. To add up, a GPU writes its share into its slot
// of every inbox, and every GPU adds the slots of its own inbox in the order of the ranks: one trip over the wire, and
// the same bits everywhere. Nothing else is sent: a word that has not come holds kEmpty, which no rounding to bfloat16
// gives, and who has read a word empties it again.
//
// Rounds alternate. A GPU begins round n + 1 when it has all shares of round n; whoever sent one of those had ended
// round n - 1 before, so the slots of round n + 1, which are those of round n - 1, are empty everywhere.
#pragma once
#include "ptx.cuh"

namespace meshserve {

constexpr int kMaxPeers = 8;
constexpr size_t kSlotBytes = 2 << 20;
constexpr uint32_t kEmpty = 0xFFFFFFFFu;  // two bfloat16 NaNs; the NaN that rounding gives is 0x7FFF
constexpr uint32_t kInsteadOfEmpty = 0x7FFF7FFFu;

// The layers, sums and exchanges in one shot, and sums in two (two_shot.cuh) count their rounds apart: each has an
// inbox of its own.
enum class Channel : int { kLayers, kSingle, kTwoShot };
constexpr int kChannels = 3;

// In a GPU's memory, of a channel whose rounds are one kernel each: rounds so far, and this one's blocks that have
// ended.
struct RoundCounter {
  uint32_t round, blocks;
};

// One channel as one GPU sees it.
struct Peers {
  // Of this rank, then of the next ones: [2 rounds, num slots, kSlotBytes]; in two shots otherwise.
  uint8_t* inboxes[kMaxPeers];
  int num, rank;
  RoundCounter* counter;
  int* stalled;  // in the host's memory, of each rank: 1 + the rank that it waited for in vain
  unsigned long long patience_nanoseconds;

  // Rank `from`'s slot in the inbox of the GPU `distance` ranks on.
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
__device__ __forceinline__ void make_empty(uint2* at) { store_for_peers(at, make_uint2(kEmpty, kEmpty)); }
__device__ __forceinline__ void make_empty(uint4* at) {
  store_for_peers(at, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
}

// Waits for the words of a uint2 or uint4 of this GPU's inbox. Stops the program when the peer stays away.
template <class Words>
static __device__ __noinline__ Words wait_for_peer(const Peers& peers, const Words* at, int from) {
  const unsigned long long start = nanoseconds();
  Words v;
  for (int i = 1; is_empty(v = load_from_peers<Words>(at)); ++i) {
    if (i % 1024 == 0 && nanoseconds() - start > peers.patience_nanoseconds) {
      peers.stalled[peers.rank] = from + 1;
      __threadfence_system();
      __trap();
    }
  }
  return v;
}

// Words of this GPU's inbox that were `v` when last looked at, as they come; empties their place.
template <class Words>
__device__ __forceinline__ Words take(const Peers& peers, Words* at, Words v, int from) {
  if (is_empty(v)) v = wait_for_peer(peers, at, from);
  make_empty(at);
  return v;
}

// Writes 8 bytes at `offset` of this GPU's slot in every inbox, its own last. Each begins with another neighbour.
__device__ __forceinline__ void send(const Peers& peers, int round, size_t offset, uint2 v) {
#pragma unroll
  for (int i = 1; i < kMaxPeers; ++i) {
    if (i < peers.num) store_for_peers(peers.slot(i, round, peers.rank) + offset, v);
  }
  store_for_peers(peers.slot(0, round, peers.rank) + offset, v);
}

// Reads 8 bytes at `offset` of every slot of this GPU's inbox as they come, and empties them.
__device__ __forceinline__ void receive(const Peers& peers, int round, size_t offset, uint2 (&v)[kMaxPeers]) {
  auto place = [&](int from) { return reinterpret_cast<uint2*>(peers.slot(0, round, from) + offset); };
#pragma unroll
  for (int r = 0; r < kMaxPeers; ++r) {
    if (r < peers.num) v[r] = load_from_peers<uint2>(place(r));
  }
#pragma unroll
  for (int r = 0; r < kMaxPeers; ++r) {
    if (r < peers.num) v[r] = take(peers, place(r), v[r], r);
  }
}

// The sum of four bfloat16 of every slot, in float32, in the order of the ranks.
__device__ __forceinline__ float4 add_up(const Peers& peers, const uint2 (&v)[kMaxPeers]) {
  float4 sum = unpack_bf16(v[0]);
#pragma unroll
  for (int r = 1; r < kMaxPeers; ++r) {
    if (r < peers.num) {
      float4 share = unpack_bf16(v[r]);
      sum = make_float4(sum.x + share.x, sum.y + share.y, sum.z + share.z, sum.w + share.w);
    }
  }
  return sum;
}

constexpr int kPeerThreads = 128;
constexpr int kMaxPeerBlocks = 264;  // all of them run at once, so that none waits for one that cannot start

// ---- one sum or one exchange, as a call of its own ---------------------------------------------------------------
struct SingleArgs {
  Peers peers;
  const uint2* in;  // [num_pairs]
  uint2* out;       // the sum [num_pairs], or what every rank sent [num, num_pairs]
  int num_pairs;    // of 32-bit words
};

// The round of a call is read by every block; the block that ends last begins the next one.
__device__ __forceinline__ void end_call(const Peers& peers) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&peers.counter->blocks, 1) == gridDim.x - 1) {
    peers.counter->blocks = 0;
    peers.counter->round += 1;
  }
}

template <bool kIsSum>
__global__ void __launch_bounds__(kPeerThreads) single_kernel(const __grid_constant__ SingleArgs args) {
  const Peers& peers = args.peers;
  const int round = *const_cast<volatile uint32_t*>(&peers.counter->round) % 2;
  const int first = blockIdx.x * kPeerThreads + threadIdx.x, step = gridDim.x * kPeerThreads;
  for (int i = first; i < args.num_pairs; i += step)
    send(peers, round, 8 * static_cast<size_t>(i), not_empty(args.in[i]));
  for (int i = first; i < args.num_pairs; i += step) {
    uint2 v[kMaxPeers];
    receive(peers, round, 8 * static_cast<size_t>(i), v);
    if constexpr (kIsSum) {
      const float4 sum = add_up(peers, v);
      args.out[i] = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    } else {
#pragma unroll
      for (int r = 0; r < kMaxPeers; ++r) {
        if (r < peers.num) args.out[r * args.num_pairs + i] = v[r];
      }
    }
  }
  end_call(peers);
}

// ---- between the kernels of a layer ------------------------------------------------------------------------------
// The projection before this kernel has sent this GPU's share. out = residual + the sum of all shares, and what the
// next norm needs, as finish_residual leaves it. A warp takes 128 columns of a token.
//
// It does not wait for that projection to end, but for its words. Where this GPU's own share is there, the projection
// had waited for all kernels before it: what they wrote can be read (past the L1, which may hold what was there before)
// and what they read can be overwritten. It waits in the end, so that whoever waits for it knows that all before ended.
//
// Words that it finds are of its own round: two gathers in a row may run at once, the second gather of a layer and what
// follows it may not, as the projection to query, key and value lets no kernel start before that gather has ended.
// Else, where kernels are small and a peer is late, the gather of the next layer would start, too, and take what this
// one has yet to empty.
constexpr bool kWaitsForWords = true;

struct GatherArgs {
  Peers peers;
  int round;
  const bf16* residual;  // may be `out`
  bf16* out;
  const bf16* next_gain;  // null: neither scaled_out nor sums_out is written
  bf16* scaled_out;
  float* sums_out;
  int batch, columns;
};

static __global__ void __launch_bounds__(kPeerThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  const int warp = blockIdx.x * (kPeerThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_warps = gridDim.x * (kPeerThreads / 32), tiles = args.columns / 128;
  if (threadIdx.x == 0) let_next_kernel_start();
  touch_parameters(args);
  if (!kWaitsForWords) wait_for_previous_kernel();
  for (int i = warp; i < args.batch * tiles; i += num_warps) {
    const int tile = i % tiles;
    const size_t at = static_cast<size_t>(i) * 128 + 4 * lane;
    uint2 gain = make_uint2(0, 0);
    if (args.next_gain != nullptr) gain = *reinterpret_cast<const uint2*>(args.next_gain + tile * 128 + 4 * lane);
    const uint8_t* slot = args.peers.slot(0, args.round, args.peers.rank);
    const uint2* own = reinterpret_cast<const uint2*>(slot + at * sizeof(bf16));
    if (is_empty(load_from_peers<uint2>(own))) wait_for_peer(args.peers, own, args.peers.rank);
    const uint2 residual = load_past_l1(args.residual + at);
    uint2 v[kMaxPeers];
    receive(args.peers, args.round, at * sizeof(bf16), v);
    const float4 sum = add_up(args.peers, v);
    float4 x = unpack_bf16(residual);
    const uint2 rounded = make_uint2(pack_bf16(x.x + sum.x, x.y + sum.y), pack_bf16(x.z + sum.z, x.w + sum.w));
    *reinterpret_cast<uint2*>(args.out + at) = rounded;
    if (args.next_gain == nullptr) continue;
    x = unpack_bf16(rounded);
    const float4 g = unpack_bf16(gain);
    *reinterpret_cast<uint2*>(args.scaled_out + at) =
        make_uint2(pack_bf16(x.x * g.x, x.y * g.y), pack_bf16(x.z * g.z, x.w * g.w));
    const float squares = sum_over_lanes(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, 32);
    if (lane == 0) args.sums_out[i] = squares;
  }
  if (kWaitsForWords) wait_for_previous_kernel();
}

}  // namespace meshserve
