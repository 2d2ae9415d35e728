// The host side of the experts: which kernels compute a layer's, and the memory between them.
#pragma once
#include "common/launch.cuh"
#include "experts/sm90/router.cuh"

namespace meshserve {
namespace experts {

struct ExpertShapes {
  int tokens = 0, chosen = 0, experts = 0, embed = 0, mlp = 0;
  int choices() const { return tokens * chosen; }
  int stride() const { return (choices() + 3) / 4 * 4; }  // between rows of a scale for each choice
  int chunks() const { return (tokens + kMaxTokens - 1) / kMaxTokens; }
  int most_few_tokens = kFewTokens;  // the largest step that is computed by rows of weights
};

// Intermediate results, all in one buffer.
struct ExpertScratch {
  bf16 *activated, *rows;  // [choices, F], [choices, D]: tokens in order of their experts, then the experts' results
  int *slots, *counts, *first, *experts, *num_taken;
  float *share_of, *shares, *sums, *scores;
  int* published;                        // for two layers, in turn
  float *row_scales, *activated_scales;  // scales of e4m3 `rows` and `activated` [D / 128, stride], [F / 128, stride]

  static size_t bytes(const ExpertShapes& shapes) { return ExpertScratch().carve(shapes, nullptr); }
  // Divides a buffer. Returns the bytes that are needed.
  size_t carve(const ExpertShapes& shapes, uint8_t* buffer);
};

// One layer's operands. W: the format of the weights.
template <class W>
struct ExpertCall {
  const bf16* x;                     // [T, D]: normed, or times the gain of the norm if `sums` is given
  bool is_ordered = false;           // whether x and scaled_out have their columns in the order that the weights need
  typename W::Matrix gate_up, down;  // stacks of all layers
  const int* experts;
  const float* shares;
  const float* scores = nullptr;  // given in place of the choices: see RowsArgs
  const int* positions = nullptr;
  int* chosen = nullptr;
  bool is_normalized = false;
  int *published = nullptr, *unpublished = nullptr;
  const float* sums = nullptr;  // [T, D / 128]
  float epsilon = 0.0f;
  const bf16* residual = nullptr;
  const bf16* next_gain = nullptr;
  bf16* out;
  bf16* scaled_out = nullptr;
  float* sums_out = nullptr;  // [T, D / 16] if computed by rows, else [T, D / 128]
};

// The functions below are for the formats of weights that experts have kernels for: bf16 and FP8.

// Whether a step is computed by rows of weights, for which rows of gate and up must be blocks of 128 bytes, an equal
// number for each warp.
template <class W>
bool has_row_pipelines(const ExpertShapes& shapes);

// Scores at most 128 experts, and chooses.
template <class W>
void launch_router(LaunchSequence& sequence, const ExpertShapes& shapes, const ExpertScratch& scratch, RouterArgs args);

// Computes the experts of a layer, one of `layers`. The inputs of the next layer's projections are left in the form
// that projections with weights of format P take.
template <class W, class P = W>
void launch_experts(LaunchSequence& sequence, const ExpertShapes& shapes, const ExpertScratch& scratch, int layer,
                    int layers, const ExpertCall<W>& call);

}  // namespace experts
}  // namespace meshserve
