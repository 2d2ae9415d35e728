// Which tokens chose which experts, as every block of the expert kernels derives it from the choices [T, k].
//
// A choice's slot is its index in order of experts, then tokens. An expert's tokens thus have consecutive slots. The
// order does not depend on timing, so neither do the results.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {
namespace experts {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxExperts = kThreads;  // for a block: each thread counts the tokens of one
constexpr int kMaxTokens = 256;        // in a chunk of a step
constexpr int kWords = kMaxTokens / 32;

struct Choices {
  uint32_t tokens[kMaxExperts][kWords];  // bit t: token t chose the expert
  int first[kMaxExperts];                // slot of its first choice
  int active[kMaxExperts];               // the experts that a token chose
  int num_active;
  int totals[kWarps];
};

__device__ __forceinline__ int count_tokens(const Choices& choices, int expert) {
  int count = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) count += __popc(choices.tokens[expert][word]);
  return count;
}

// Returns how many earlier tokens chose the expert, or -1 if this one did not.
__device__ __forceinline__ int rank_of(const Choices& choices, int expert, int token) {
  const uint32_t bits = choices.tokens[expert][token / 32], bit = 1u << token % 32;
  if ((bits & bit) == 0) return -1;
  int rank = __popc(bits & (bit - 1));
  for (int word = 0; word < token / 32; ++word) rank += __popc(choices.tokens[expert][word]);
  return rank;
}

struct SyncBlock {
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// Returns the sum of `value` over the lower threads of the block, of which the first `kThreads` take part. All threads
// that `sync` waits for call it.
template <class Sync = SyncBlock>
__device__ __forceinline__ int sum_of_lower(int value, int (&totals)[kWarps], Sync sync = {}) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += lower;
  }
  if (lane == 31 && warp < kWarps) totals[warp] = sum;
  sync();
  int before = sum - value;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) before += i < warp ? totals[i] : 0;
  return before;
}

__device__ __forceinline__ void clear(Choices& choices) {
  for (int i = threadIdx.x; i < kMaxExperts * kWords; i += kThreads) choices.tokens[i / kWords][i % kWords] = 0;
}

// Sets `tokens` of cleared choices from [num_tokens, num_chosen] experts.
template <class Sync = SyncBlock>
__device__ __forceinline__ void mark(Choices& choices, const int* experts, int num_tokens, int num_chosen,
                                     int num_experts, Sync sync = {}) {
  constexpr int kTogether = 4;  // loads in flight
  const int total = num_tokens * num_chosen;
  const int step = kThreads / num_chosen, more = kThreads - step * num_chosen;  // from a thread's choice to its next
  int token = threadIdx.x / num_chosen, index = threadIdx.x - token * num_chosen;
  sync();
#pragma unroll 1
  for (int first = threadIdx.x; first < total; first += kTogether * kThreads) {
    int found[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * kThreads;
      found[u] = i < total ? __ldcg(experts + i) : -1;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int expert = found[u];
      if (expert >= 0 && expert < num_experts) atomicOr(&choices.tokens[expert][token / 32], 1u << token % 32);
      token += step, index += more;
      if (index >= num_chosen) ++token, index -= num_chosen;
    }
  }
  sync();
}

// Marks the choices and computes the rest.
__device__ __forceinline__ void arrange(Choices& choices, const int* experts, int num_tokens, int num_chosen,
                                        int num_experts) {
  constexpr int kActive = 1 << 20;  // counted in the upper bits of the same sum
  mark(choices, experts, num_tokens, num_chosen, num_experts);
  const int expert = threadIdx.x, count = count_tokens(choices, expert);
  const int before = sum_of_lower(count == 0 ? 0 : count + kActive, choices.totals);
  choices.first[expert] = before % kActive;
  if (count > 0) choices.active[before / kActive] = expert;
  if (expert == kThreads - 1) choices.num_active = before / kActive + (count > 0);
  __syncthreads();
}

// ---- the choice --------------------------------------------------------------------------------------------------
constexpr int kMostRouted = 128;  // experts of a router

// An unsigned integer that orders as the float does.
__device__ __forceinline__ uint32_t order_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}

// A number other than 0 that orders experts by their scores, and if these are equal, the lower expert first. Scores
// keep 16 bits behind the first, so that one comparison suffices.
__device__ __forceinline__ uint32_t key_of(float score, int expert) {
  constexpr uint32_t kLast = kMostRouted - 1;
  return max((order_of(score) & ~kLast) | (kLast - static_cast<uint32_t>(expert)), 1u);
}

constexpr int kScoresEach = kMostRouted / 32;  // for a lane: those of experts kScoresEach * lane + i

// Chooses a token's experts [k] by its scores, with one warp. Among equal scores, the lower expert comes first. Padding
// chooses -1. Lane j returns the score of choice j.
__device__ __forceinline__ float choose(const float (&scores)[kScoresEach], int num_experts, int num_chosen,
                                        bool is_padding, int* experts) {
  constexpr int kEach = kScoresEach;
  static_assert(kEach == 4);
  const int lane = threadIdx.x % 32;
  uint32_t keys[kEach], ids[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    ids[i] = kEach * lane + i;
    keys[i] = static_cast<int>(ids[i]) < num_experts ? order_of(scores[i]) : 0;
  }
  // Sorts the lane's experts, so that one comparison a choice suffices.
  auto sort = [&](int i, int j) {
    const bool is_later = keys[i] < keys[j] || (keys[i] == keys[j] && ids[i] > ids[j]);
    const uint32_t key = keys[i], id = ids[i];
    keys[i] = is_later ? keys[j] : key, ids[i] = is_later ? ids[j] : id;
    keys[j] = is_later ? key : keys[j], ids[j] = is_later ? id : ids[j];
  };
  sort(0, 1), sort(2, 3), sort(0, 2), sort(1, 3), sort(1, 2);
  float chosen = 0.0f;
#pragma unroll 1
  for (int j = 0; j < num_chosen; ++j) {
    const uint32_t best = __reduce_max_sync(0xffffffffu, keys[0]);
    const bool is_mine = lane == __ffs(__ballot_sync(0xffffffffu, keys[0] == best)) - 1;
    if (is_mine) experts[j] = is_padding ? -1 : static_cast<int>(ids[0]);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      keys[i] = !is_mine ? keys[i] : i + 1 < kEach ? keys[i + 1] : 0;
      if (i + 1 < kEach) ids[i] = is_mine ? ids[i + 1] : ids[i];
    }
    if (lane == j) chosen = value_of(best);
  }
  return chosen;
}

// Returns the rank of the thread's key, which is keys[threadIdx.x]. Among equal keys, the lower thread's comes first.
// The first kMostRouted threads call it.
__device__ __forceinline__ int rank_of_key(const uint32_t (&keys)[kMostRouted]) {
  const uint32_t key = keys[threadIdx.x], lower_lanes = (1u << threadIdx.x % 32) - 1;
  const uint4* fours = reinterpret_cast<const uint4*>(keys);
  int rank = __popc(__match_any_sync(0xffffffffu, key) & lower_lanes);
#pragma unroll 1
  for (int group = 0; group < kMostRouted / 32; ++group) {
    const uint32_t bound =
        key - (group < static_cast<int>(threadIdx.x) / 32);  // an equal key of a lower warp is before
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 found = fours[8 * group + i];
      rank += (found.x > bound) + (found.y > bound) + (found.z > bound) + (found.w > bound);
    }
  }
  return rank;
}

// Returns, to lane j, the share of choice j: of a softmax over the scores times `factor`, or if `is_normalized`, over
// those of the choices. `chosen` is what `choose` returned.
__device__ __forceinline__ float share_of_choice(const float (&scores)[kScoresEach], float chosen, float factor,
                                                 int num_experts, int num_chosen, bool is_normalized) {
  const int lane = threadIdx.x % 32;
  const float top = __shfl_sync(0xffffffffu, chosen, 0);
  const float mine = lane < num_chosen ? __expf((chosen - top) * factor) : 0.0f;
  float sum = mine;
  if (!is_normalized) {
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoresEach; ++i) {
      if (kScoresEach * lane + i < num_experts) sum += __expf((scores[i] - top) * factor);
    }
  }
  return mine / sum_over_lanes(sum, 32);
}

// ---- steps of many tokens ----------------------------------------------------------------------------------------
// Two kernels, with a block for each chunk of kMaxTokens tokens: the first counts, the second assigns slots. Steps of
// a single chunk take neither: every block that copies tokens finds the slots itself (router.cuh).
struct ArrangeArgs {
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  int* counts;          // [chunks, kMaxExperts]
  int* first;           // [kMaxExperts + 1]: slot of each expert's first choice; the last entry is the number of slots
  int* slots;           // [T, k]: of each choice, -1 if it is not computed here
  float* share_of;      // for each slot
  int* num_taken;       // [2]: written zeros, for the kernels of gate_up and down
  int num_tokens, num_chosen, num_experts;
};

__device__ __forceinline__ int mark_chunk(Choices& choices, const ArrangeArgs& args) {
  const int token = blockIdx.x * kMaxTokens, num_tokens = min(kMaxTokens, args.num_tokens - token);
  clear(choices);
  mark(choices, args.experts + token * args.num_chosen, num_tokens, args.num_chosen, args.num_experts);
  return num_tokens;
}

template <class W>  // as the kernels around it, so that each format's file has its own
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ ArrangeArgs args) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& choices = *reinterpret_cast<Choices*>(shared_rows);
  let_next_kernel_start();
  wait_for_previous_kernel();
  mark_chunk(choices, args);
  args.counts[blockIdx.x * kMaxExperts + threadIdx.x] = count_tokens(choices, threadIdx.x);
}

template <class W>
__global__ void __launch_bounds__(kThreads) assign_slots_kernel(const __grid_constant__ ArrangeArgs args) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& choices = *reinterpret_cast<Choices*>(shared_rows);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int num_tokens = mark_chunk(choices, args), expert = threadIdx.x;
  int earlier = 0, all = 0;
  for (int chunk = 0; chunk < static_cast<int>(gridDim.x); ++chunk) {
    const int count = args.counts[chunk * kMaxExperts + expert];
    earlier += chunk < static_cast<int>(blockIdx.x) ? count : 0;
    all += count;
  }
  const int before = sum_of_lower(all, choices.totals);
  choices.first[expert] = before + earlier;
  if (blockIdx.x == 0) {
    args.first[expert] = before;
    if (expert < 2) args.num_taken[expert] = 0;
    if (expert == kMaxExperts - 1) args.first[kMaxExperts] = before + all;
  }
  __syncthreads();
  constexpr int kTogether = 8;  // loads in flight
  const int first_choice = blockIdx.x * kMaxTokens * args.num_chosen, num_choices = num_tokens * args.num_chosen;
#pragma unroll 1
  for (int first = threadIdx.x; first < num_choices; first += kTogether * kThreads) {
    int chosen[kTogether];
    float shares[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * kThreads, from = first_choice + (i < num_choices ? i : 0);
      chosen[u] = args.experts[from], shares[u] = args.shares[from];
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * kThreads;
      if (i >= num_choices) break;
      int slot = -1;
      if (chosen[u] >= 0 && chosen[u] < args.num_experts) {
        slot = choices.first[chosen[u]] + rank_of(choices, chosen[u], i / args.num_chosen);
        args.share_of[slot] = shares[u];
      }
      args.slots[first_choice + i] = slot;
    }
  }
}

}  // namespace experts
}  // namespace meshserve
