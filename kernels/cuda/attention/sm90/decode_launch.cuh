// The host side of decode attention: which kernel attends, with how many blocks, in which parts.
#pragma once
#include "attention/context_parts.cuh"
#include "common/launch.cuh"
#include "common/step_shapes.cuh"

namespace meshserve {

// Returns the minimum number of shares of a step's contexts for which clusters of `splits` blocks fill the GPU, with
// two blocks per SM.
int fewest_shares(int multiprocessors, int kv_heads, int splits);

// Maps the whole cache as rows of one token each, split into halves of 128 bytes: tiles [H / 64, tokens, 64]; in 8 bits
// [1, tokens, H]. Returns whether there has been no error.
bool map_pages(LaunchSequence& sequence, CUtensorMap* map, const Shapes& shapes, const Cache& cache, int tokens);

// Attention of a step. Output: the form in which its results are left for the output projection.
template <class Output>
struct DecodeAttention {
  Shapes shapes;
  Cache cache;
  Unmerged unmerged;
  PlannedPart* plan;  // scratch memory of persistent blocks, and their two counters
  int* claims;
  float scale = 0.0f;
  float* rounded_scales = nullptr;  // the results' scales, with RoundedFp8Weights
  int splits = 0;                   // blocks per cluster; 0: chosen
  bool is_beside = false;           // whether another half of the batch runs at the same time

  // Returns whether blocks are persistent, because there is enough work for each SM.
  bool is_persistent() const;
  // Returns how the contexts are cut for clusters of `splits` blocks.
  ContextCuts cuts(int splits) const;
  void launch(LaunchSequence& sequence, int layer, const bf16* q, bf16* out) const;

 private:
  template <class Arguments>
  Arguments arguments(int layer, const bf16* q, bf16* out, int splits) const;
  template <int kWarps>
  void launch_persistent(LaunchSequence& sequence, int layer, const bf16* q, bf16* out, int stages) const;
  int choose_splits() const;
  bool has_long_tiles() const;
  int warp_pipeline_bytes() const;
};

}  // namespace meshserve
