// Finds the threshold of min-p, top-k and top-p for each row of logits: the smallest key that is kept (../sampling
// defines keys).
//
// A thread block processes one row. It finds the row's largest and smallest logit. Then, for each active filter, it
// sums the tokens' weights in 256 bins of equal width between these, picks the bin in which the filter's sum is
// reached, copies the few keys of that bin to shared memory, and narrows the range of keys by 8 bits at a time until
// one is left. Weights are integers, so their sums are exact and independent of the order: 1 for top-k, 2^42 times
// the probability for top-p. For top-p, all weights are first summed without bins. Most tokens are so unlikely that all
// of them together could be dropped, and these are then left out of the bins.
#pragma once
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <stdint.h>

namespace meshserve {
namespace sampling {

constexpr int kThreads = 1024;
constexpr int kBins = 256;
constexpr int kBinBits = 8;
constexpr int kWords = 3;                   // words of a bin's sum; 64-bit atomics in shared memory are slow
constexpr int kWordBits = 14;               // bits of a weight in each word; the other 18 are for the number of tokens
constexpr float kScale = 4398046511104.0f;  // 2^42, the scale of weights
constexpr float kFaintest = 30.0f;          // exp(-30) * kScale rounds to 0
constexpr int kMaxListed = 40 * 1024;       // keys in shared memory, where a block can have as much

// Operands: logits [B, vocab], the others [B].
struct Args {
  const float *logits, *temperature, *top_p, *min_p;
  const int* top_k;
  uint32_t* threshold;
  int vocab;
  int max_listed;  // keys that fit into shared memory; more of a bin are read from the row again
};

struct Shared {
  uint32_t words[kWords][kBins];
  unsigned long long sum;    // over all bins
  unsigned long long above;  // over the bins before the picked one
  int bin;
  int num_listed;
  uint32_t least, most;  // range of keys
};

// Returns the number of keys that a block lists whose shared memory has so many bytes.
constexpr int listed_keys(int block_bytes) {
  const int fitting = (block_bytes - static_cast<int>(sizeof(Shared))) / static_cast<int>(sizeof(uint32_t));
  return fitting < kMaxListed ? fitting : kMaxListed;
}

__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The weights of a search, and the tokens that count.
template <bool kIsTopP>
struct Search {
  float highest;
  float per_logit;     // powers of two of weight per unit of logit
  float per_unit;      // bins per unit of logit
  uint32_t threshold;  // smaller keys do not count

  // Tokens with logits below `lowest` do not count either.
  __device__ Search(float highest, float lowest, float temperature, uint32_t threshold)
      : highest(highest),
        per_logit(static_cast<float>(M_LOG2E) / temperature),
        threshold(max(threshold, key_of(lowest))) {
    const float range = fminf(highest - logit_of(this->threshold), FLT_MAX);
    per_unit = range > 0.0f ? kBins / range : 0.0f;
  }

  __device__ unsigned long long weight(float logit) const {
    if (!kIsTopP) return isfinite(logit);
    return __float2ull_rn(exp2f((logit - highest) * per_logit) * kScale);
  }
  // Bin 0 has the highest logits. Conversions saturate and turn NaN into 0.
  __device__ int bin(float logit) const { return min(max(__float2int_rz((highest - logit) * per_unit), 0), kBins - 1); }
};

template <class F>
__device__ void for_each_logit(const float* logits, int vocab, F function) {
  if (vocab % 4 == 0) {
    const float4* fours = reinterpret_cast<const float4*>(logits);
#pragma unroll 4
    for (int i = threadIdx.x; i < vocab / 4; i += kThreads) {
      const float4 four = fours[i];
      function(four.x);
      function(four.y);
      function(four.z);
      function(four.w);
    }
  } else {
    for (int i = threadIdx.x; i < vocab; i += kThreads) function(logits[i]);
  }
}

__device__ inline void clear_bins(Shared& shared) {
  uint32_t* words = &shared.words[0][0];
  for (int i = threadIdx.x; i < kWords * kBins; i += kThreads) words[i] = 0;
  __syncthreads();
}

__device__ inline void add_to_bin(Shared& shared, int bin, unsigned long long weight) {
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    // The last word takes the remaining bits: a probability of 1 needs one bit more.
    const uint32_t part = word + 1 < kWords ? (weight >> (word * kWordBits)) & ((1 << kWordBits) - 1)
                                            : static_cast<uint32_t>(weight >> (word * kWordBits));
    if (part) atomicAdd(&shared.words[word][bin], part);
  }
}

// Returns `sum` plus the sum of a bin.
__device__ inline unsigned long long with_bin(unsigned long long sum, const Shared& shared, int bin) {
  for (int word = 0; word < kWords; ++word) {
    sum += static_cast<unsigned long long>(shared.words[word][bin]) << (word * kWordBits);
  }
  return sum;
}

// Returns the sum of all bins to every thread. `of_lane` receives the sum up to the last bin of this lane.
__device__ inline unsigned long long sum_bins(Shared& shared, unsigned long long* of_lane) {
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kBinsOfLane = kBins / 32;
    unsigned long long sum = 0;
    for (int i = 0; i < kBinsOfLane; ++i) sum = with_bin(sum, shared, threadIdx.x * kBinsOfLane + i);
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned long long other = __shfl_up_sync(~0u, sum, distance);
      if (static_cast<int>(threadIdx.x) >= distance) sum += other;
    }
    *of_lane = sum;  // up to the last bin of this lane
    if (threadIdx.x == 31) shared.sum = sum;
  }
  __syncthreads();
  return shared.sum;
}

// Picks the first bin at which the sum of the bins so far reaches the target, which is at most the sum of all bins.
__device__ inline void pick_bin(Shared& shared, unsigned long long of_lane, unsigned long long target) {
  if (threadIdx.x < 32) {
    constexpr int kBinsOfLane = kBins / 32;
    const unsigned long long before = __shfl_up_sync(~0u, of_lane, 1);
    unsigned long long sum = threadIdx.x ? before : 0;
    if (sum < target && of_lane >= target) {
      for (int i = 0; i < kBinsOfLane; ++i) {
        const int bin = threadIdx.x * kBinsOfLane + i;
        const unsigned long long in_bin = with_bin(0, shared, bin);
        if (sum + in_bin >= target) {
          shared.bin = bin;
          shared.above = sum;
          break;
        }
        sum += in_bin;
      }
    }
  }
  __syncthreads();
}

// Returns the sum of the weights of all tokens that count.
__device__ inline unsigned long long sum_weights(const float* logits, int vocab, const Search<true>& search,
                                                 Shared& shared) {
  unsigned long long sum = 0;
  if (threadIdx.x == 0) shared.sum = 0;
  __syncthreads();
  for_each_logit(logits, vocab, [&](float logit) {
    if (key_of(logit) >= search.threshold) sum += search.weight(logit);
  });
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(&shared.sum, sum);
  __syncthreads();
  sum = shared.sum;
  __syncthreads();
  return sum;
}

// Returns the largest key for which the weights of this key and all larger keys reach the target, or 0 if even the sum
// of all weights does not.
template <bool kIsTopP>
__device__ uint32_t find_key(const float* logits, int vocab, const Search<kIsTopP>& search, unsigned long long target,
                             Shared& shared, uint32_t* list, int max_listed) {
  unsigned long long of_lane = 0;
  clear_bins(shared);
  for_each_logit(logits, vocab, [&](float logit) {
    if (key_of(logit) < search.threshold) return;
    if (const unsigned long long weight = search.weight(logit)) add_to_bin(shared, search.bin(logit), weight);
  });
  if (sum_bins(shared, &of_lane) < target) {
    __syncthreads();  // every thread has read the sum before the next search clears it
    return 0;
  }
  pick_bin(shared, of_lane, target);
  const int picked = shared.bin;
  if (threadIdx.x == 0) {
    shared.num_listed = 0;
    shared.least = ~0u;
    shared.most = 0;
  }
  __syncthreads();
  target -= shared.above;

  for_each_logit(logits, vocab, [&](float logit) {
    const uint32_t key = key_of(logit);
    if (key < search.threshold || search.bin(logit) != picked || !search.weight(logit)) return;
    const uint32_t here = __activemask();
    const int lane = threadIdx.x % 32, first = __ffs(here) - 1;
    int at = 0;
    if (lane == first) at = atomicAdd(&shared.num_listed, __popc(here));
    at = __shfl_sync(here, at, first) + __popc(here & ((1u << lane) - 1));
    if (at < max_listed) list[at] = key;
    atomicMin(&shared.least, key);
    atomicMax(&shared.most, key);
  });
  __syncthreads();
  uint32_t least = shared.least, most = shared.most;
  const int num_listed = shared.num_listed;

  while (least < most) {
    const int shift = max(0, 32 - __clz(most - least) - kBinBits);
    __syncthreads();
    clear_bins(shared);
    auto add = [&](uint32_t key) {
      if (least <= key && key <= most) add_to_bin(shared, (most - key) >> shift, search.weight(logit_of(key)));
    };
    if (num_listed <= max_listed) {
      for (int i = threadIdx.x; i < num_listed; i += kThreads) add(list[i]);
    } else {  // too many equal logits for the list: read the row again
      for_each_logit(logits, vocab, [&](float logit) { add(key_of(logit)); });
    }
    sum_bins(shared, &of_lane);
    pick_bin(shared, of_lane, target);
    target -= shared.above;
    most -= static_cast<uint32_t>(shared.bin) << shift;
    const uint32_t width = (1u << shift) - 1;
    least = most - least > width ? most - width : least;
  }
  __syncthreads();
  return most;
}

// Grid: one block per row of logits.
__global__ void __launch_bounds__(kThreads) threshold_kernel(Args args) {
  extern __shared__ uint32_t list[];
  __shared__ Shared shared;
  const float* logits = args.logits + static_cast<size_t>(blockIdx.x) * args.vocab;
  const float temperature = fmaxf(args.temperature[blockIdx.x], 1e-30f);
  const float top_p = args.top_p[blockIdx.x], min_p = args.min_p[blockIdx.x];
  const int top_k = args.top_k[blockIdx.x];
  uint32_t threshold = 0;
  if (args.temperature[blockIdx.x] > 0.0f && (top_k > 0 || top_p < 1.0f || min_p > 0.0f)) {
    if (threadIdx.x == 0) {
      shared.least = ~0u;
      shared.most = 0;
    }
    __syncthreads();
    uint32_t least = ~0u, most = 0;
    for_each_logit(logits, args.vocab, [&](float logit) {
      const uint32_t key = key_of(logit);
      most = max(most, key);
      if (isfinite(logit)) least = min(least, key);
    });
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&shared.least, least);
      atomicMax(&shared.most, most);
    }
    __syncthreads();
    const float highest = logit_of(shared.most), lowest = logit_of(shared.least);
    if (min_p > 0.0f) threshold = key_of(highest + temperature * logf(min_p));
    if (top_k > 0) {
      const Search<false> by_count(highest, lowest, temperature, threshold);
      threshold = max(threshold, find_key(logits, args.vocab, by_count, top_k, shared, list, args.max_listed));
    }
    if (top_p < 1.0f) {
      const float faintest = fmaxf(lowest, highest - kFaintest * temperature);
      const unsigned long long sum =
          sum_weights(logits, args.vocab, Search<true>(highest, faintest, temperature, threshold), shared);
      const double target = ceil(static_cast<double>(top_p) * static_cast<double>(sum));
      // All tokens below this probability together have less than half of the probability that may be dropped.
      const float droppable = 0.5f * (1.0f - top_p) * (static_cast<float>(sum) / kScale) / args.vocab;
      const float unlikely = fmaxf(faintest, highest + temperature * logf(fminf(droppable, 1.0f)));
      const Search<true> by_weight(highest, unlikely, temperature, threshold);
      threshold =
          max(threshold, find_key(logits, args.vocab, by_weight, max(1ull, static_cast<unsigned long long>(target)),
                                  shared, list, args.max_listed));
    }
  }
  if (threadIdx.x == 0) args.threshold[blockIdx.x] = threshold;
}

}  // namespace sampling
}  // namespace meshserve
