// How blocks take the tiles of a step of many tokens, in pairs or alone.
//
// Two blocks of a cluster compute two tiles of one expert at a time, an item, and fetch what both need once: each block
// fetches a half of it, and the copy engine writes it to both. If 256 tokens of the expert are left, the tiles have the
// same rows of weights; its last tokens, 128 and then 64 of them, are multiplied by two tiles of rows. So no block
// waits for one with more tokens. But an expert of 129 to 192 tokens is a pair of 128 and the others, as reading its
// weights takes the time, also from the L2. Of what a block alone would fetch, this is 5/6, and for most tokens 2/3;
// without it, what the L2 delivers limits the products. Pairs take items as they get ready for them, by a counter in
// memory: the first block asks for the next item while it fetches the present one, and sends it to the other.
//
// An item of a block alone is a tile, and blocks take these in turn.
#pragma once
#include "common/sm90/ptx.cuh"
#include "experts/permutation.cuh"

namespace meshserve {
namespace experts {

constexpr int kPair = 2;                      // blocks of a cluster
constexpr int kItemTokens = 128;              // the most of a tile
constexpr int kHalfTokens = kItemTokens / 2;  // the tokens of the smallest tile of a pair
constexpr int kMails = 8;  // messages; more than a pipeline has stages, so that one is read before it is overwritten

struct ItemsMemory {
  int first_item[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
  alignas(16) float4 mail[kMails];  // an item, as bits
  uint64_t mailed[kMails];
};

// How many items of an expert's tokens have the same rows of weights for both blocks. `halves`: its 64 tokens.
__device__ __forceinline__ int pairs_of(int halves) { return halves == 3 ? 1 : halves / 4; }

// A block's tile of an item.
struct ItemTile {
  int expert = 0, token, num_tokens;
  int row;              // first of the output's columns
  bool shares_weights;  // whether each block of a pair has tokens of its own; else they share the tokens
  bool is_void;         // the other block has the last tile of rows
};

// Computes the first item of each expert, and returns the number of items. All threads of the block call it.
template <int kBlocks>
__device__ __forceinline__ int count_items(ItemsMemory& memory, const int* first_tokens, int row_tiles) {
  const int expert = threadIdx.x;
  int num_items = 0;
  if (expert < kMaxExperts) {
    const int first = __ldcg(first_tokens + expert), num_tokens = __ldcg(first_tokens + expert + 1) - first;
    memory.first_token[expert] = first;
    if (expert == kMaxExperts - 1) memory.first_token[kMaxExperts] = first + num_tokens;
    const int halves = (num_tokens + kHalfTokens - 1) / kHalfTokens;
    const int pairs = pairs_of(halves), rest = max(halves - 4 * pairs, 0);
    num_items =
        kBlocks == 1 ? (halves + 1) / 2 * row_tiles : pairs * row_tiles + (rest / 2 + rest % 2) * ((row_tiles + 1) / 2);
  }
  const int before = sum_of_lower(num_items, memory.totals);
  if (expert < kMaxExperts) memory.first_item[expert] = before;
  if (expert == kMaxExperts - 1) memory.first_item[kMaxExperts] = before + num_items;
  __syncthreads();
  return memory.first_item[kMaxExperts];
}

// Finds this block's tile of an item, given that of an earlier item.
template <int kBlocks>
__device__ __forceinline__ void find_item(const ItemsMemory& memory, int item, int row_tiles, int rows_each,
                                          ItemTile* found) {
  while (item >= memory.first_item[found->expert + 1]) ++found->expert;
  const int first = memory.first_token[found->expert], last = memory.first_token[found->expert + 1];
  const int halves = (last - first + kHalfTokens - 1) / kHalfTokens;
  int index = item - memory.first_item[found->expert];
  if constexpr (kBlocks == 1) {
    const int token_tiles = (halves + 1) / 2;
    found->token = first + index % token_tiles * kItemTokens;
    found->num_tokens = min(kItemTokens, last - found->token);
    found->row = index / token_tiles * rows_each;
    found->shares_weights = found->is_void = false;
    return;
  }
  const int rank = blockIdx.x % kPair, pairs = pairs_of(halves), rest = max(halves - 4 * pairs, 0);
  found->shares_weights = index < pairs * row_tiles;
  if (found->shares_weights) {
    found->token = first + (2 * (index % pairs) + rank) * kItemTokens;
    found->num_tokens = min(kItemTokens, last - found->token);
    found->row = index / pairs * rows_each;
    found->is_void = false;
    return;
  }
  index -= pairs * row_tiles;
  const int row_pairs = (row_tiles + 1) / 2, is_last = rest == 3 && index >= row_pairs ? 1 : 0;  // 64 tokens after 128
  const int row_tile = 2 * (index - is_last * row_pairs) + rank;
  found->token = first + (2 * pairs + is_last) * kItemTokens;
  found->num_tokens = min(rest == 1 || is_last ? kHalfTokens : kItemTokens, last - found->token);
  found->is_void = row_tile >= row_tiles;
  found->row = min(row_tile, row_tiles - 1) * rows_each;
}

// Copies a box to this block, or to both.
__device__ __forceinline__ void fetch_box(bool is_shared, uint32_t to, const CUtensorMap* map, int column, int row,
                                          int matrix, uint32_t barrier) {
  if (is_shared) {
    copy_box_to_pair(to, map, column, row, matrix, barrier);
  } else {
    copy_box(to, map, column, row, matrix, barrier);
  }
}

// Where items come from. One thread of each block has it.
template <int kBlocks>
class Items {
 public:
  // A thread of each block calls it before the blocks of the cluster meet for the first time.
  static __device__ __forceinline__ void init(ItemsMemory& memory) {
    for (int i = 0; i < (kBlocks == 1 ? 0 : kMails); ++i) barrier_init(shared_address(memory.mailed) + 8 * i, 1);
  }
  __device__ __forceinline__ Items(ItemsMemory& memory, int* num_taken)
      : memory_(memory), num_taken_(num_taken), next_(blockIdx.x / kBlocks) {}
  __device__ __forceinline__ int first() const { return next_; }
  // Asks for the next item, which is on its way when this returns.
  __device__ __forceinline__ void ask() {
    if (kBlocks == 1) {
      next_ += gridDim.x;
    } else if (is_first()) {
      next_ = gridDim.x / kBlocks + atomicAdd(num_taken_, 1);
    }
  }
  // Tells the other block.
  __device__ __forceinline__ void send() {
    if (kBlocks == 1 || !is_first()) return;
    const uint32_t to = shared_address(memory_.mail + mail_), barrier = shared_address(memory_.mailed + mail_);
    send_float4(address_in_cluster(to, 1), make_float4(__uint_as_float(next_), 0.0f, 0.0f, 0.0f),
                address_in_cluster(barrier, 1));
    mail_ = (mail_ + 1) % kMails;
  }
  __device__ __forceinline__ int next() {
    if (is_first()) return next_;
    const uint32_t barrier = shared_address(memory_.mailed + mail_);
    barrier_expect_bytes(barrier, sizeof(float4));
    barrier_wait(barrier, parity_);
    const int item = __float_as_uint(load_shared_float4(shared_address(memory_.mail + mail_)).x);
    if (++mail_ == kMails) mail_ = 0, parity_ ^= 1;
    return item;
  }

 private:
  __device__ __forceinline__ bool is_first() const { return kBlocks == 1 || blockIdx.x % kBlocks == 0; }
  ItemsMemory& memory_;
  int* num_taken_;
  int next_, mail_ = 0;
  uint32_t parity_ = 0;
};

// Frees a stage of the pipeline, which the other block's copies fill, too, with a warp that has read it.
template <int kBlocks>
__device__ __forceinline__ void free_stage(uint32_t empty) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (kBlocks == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < kBlocks) {
    barrier_arrive_in_cluster(address_in_cluster(empty, lane));
  }
}

}  // namespace experts
}  // namespace meshserve
