// What surrounds the tiles of many tokens: their order, activations in the order of quantized weights, and the sums of
// each token's experts.
#pragma once
#include "experts/permutation.cuh"
#include "experts/sm80/formats.cuh"

namespace meshserve::experts::sm80 {

// The tokens of one expert, or some of them: slots `first` to `first` + `count` - 1.
struct SlotTile {
  int expert, first, count;
};

struct PlaceArgs {
  ArrangeArgs arrange;  // but for `first`, `share_of` and `num_taken`
  int* order;           // the choice of each slot
  SlotTile* tiles;      // in order of their slots
  int* num_tiles;
  int tile_tokens;
};

// Returns how many tiles there are, at most.
inline int most_tiles(int num_choices, int num_experts, int tile_tokens) {
  const int most = num_choices / tile_tokens + (num_experts < num_choices ? num_experts : num_choices);
  return most < num_choices ? most : num_choices;
}

// Counts the tokens of each expert in a chunk of kMaxTokens tokens.
template <class W>  // each format's file has its own
__global__ void __launch_bounds__(kThreads) count_choices_kernel(const __grid_constant__ ArrangeArgs args) {
  extern __shared__ __align__(16) uint8_t shared_weights[];
  auto& choices = *reinterpret_cast<Choices*>(shared_weights);
  mark_chunk(choices, args);
  args.counts[blockIdx.x * kMaxExperts + threadIdx.x] = count_tokens(choices, threadIdx.x);
}

// Assigns slots to the choices of each chunk, given the counts of all unless there is only one. The first block lists
// the tiles.
template <class W>
__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ PlaceArgs place) {
  extern __shared__ __align__(16) uint8_t shared_weights[];
  auto& choices = *reinterpret_cast<Choices*>(shared_weights);
  const ArrangeArgs& args = place.arrange;
  const int num_tokens = mark_chunk(choices, args), expert = threadIdx.x;
  int earlier = 0, all = 0;
  if (gridDim.x == 1) all = count_tokens(choices, expert);
  for (int chunk = 0; gridDim.x > 1 && chunk < static_cast<int>(gridDim.x); ++chunk) {
    const int count = args.counts[chunk * kMaxExperts + expert];
    earlier += chunk < static_cast<int>(blockIdx.x) ? count : 0;
    all += count;
  }
  const int before = sum_of_lower(all, choices.totals);
  choices.first[expert] = before + earlier;
  __syncthreads();
  if (blockIdx.x == 0) {
    const int num_tiles = (all + place.tile_tokens - 1) / place.tile_tokens;
    const int first = sum_of_lower(num_tiles, choices.totals);
    for (int i = 0; i < num_tiles; ++i) {
      const int done = i * place.tile_tokens;
      place.tiles[first + i] = {expert, before + done, min(place.tile_tokens, all - done)};
    }
    if (expert == kThreads - 1) *place.num_tiles = first + num_tiles;
  }
  const int first_choice = blockIdx.x * kMaxTokens * args.num_chosen, num_choices = num_tokens * args.num_chosen;
  for (int i = threadIdx.x; i < num_choices; i += kThreads) {
    const int chosen = __ldg(args.experts + first_choice + i);
    int slot = -1;
    if (chosen >= 0 && chosen < args.num_experts) {
      slot = choices.first[chosen] + rank_of(choices, chosen, i / args.num_chosen);
      place.order[slot] = first_choice + i;
    }
    args.slots[first_choice + i] = slot;
  }
}

// Puts the columns of activations in the order of a format's weights, 4 in each thread.
template <class W>
__global__ void __launch_bounds__(kThreads) order_columns_kernel(const bf16* x, bf16* out, int columns, size_t total) {
  const size_t at = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (at >= total) return;
  const uint2 v = *reinterpret_cast<const uint2*>(x + at);
  const int column = static_cast<int>(at % columns);
  uint32_t* to = reinterpret_cast<uint32_t*>(out + (at - column)) + ordered_pair<typename W::Order>(column);
  to[0] = __byte_perm(v.x, v.y, 0x5410);
  to[4] = __byte_perm(v.x, v.y, 0x7632);
}

struct CombineArgs {
  const bf16* rows;     // [slots, D]
  const int* slots;     // [T, k]
  const float* shares;  // [T, k]
  bf16* out;            // [T, D]
  int num_chosen, columns;
};

// Adds up the experts of a token. Grid: a block for each token.
template <class W>
__global__ void __launch_bounds__(kThreads) combine_slots_kernel(const __grid_constant__ CombineArgs args) {
  const int* slots = args.slots + static_cast<size_t>(blockIdx.x) * args.num_chosen;
  const float* shares = args.shares + static_cast<size_t>(blockIdx.x) * args.num_chosen;
  for (int column = threadIdx.x * 8; column < args.columns; column += kThreads * 8) {
    float4 low = make_float4(0, 0, 0, 0), high = low;
#pragma unroll 4
    for (int j = 0; j < args.num_chosen; ++j) {
      const int slot = __ldg(slots + j);
      if (slot < 0) continue;
      const float share = __ldg(shares + j);
      const uint4 v = *reinterpret_cast<const uint4*>(args.rows + static_cast<size_t>(slot) * args.columns + column);
      const float4 first = unpack_bf16(make_uint2(v.x, v.y)), second = unpack_bf16(make_uint2(v.z, v.w));
      low.x += share * first.x, low.y += share * first.y, low.z += share * first.z, low.w += share * first.w;
      high.x += share * second.x, high.y += share * second.y, high.z += share * second.z, high.w += share * second.w;
    }
    *reinterpret_cast<uint4*>(args.out + static_cast<size_t>(blockIdx.x) * args.columns + column) = make_uint4(
        pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
  }
}

}  // namespace meshserve::experts::sm80
