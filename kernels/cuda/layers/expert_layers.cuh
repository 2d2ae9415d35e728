// The host side of decode layers with a router and experts in place of the MLP, on one GPU.
#pragma once
#include "experts/sm90/launch.cuh"
#include "layers/step.cuh"

namespace meshserve {

// W: the format of the weights.
template <class W>
struct ExpertLayers {
  Shapes shapes;
  experts::ExpertShapes expert_shapes;
  Tuning tuning;
  Weights<W> weights;
  const bf16* router;
  typename W::Matrix expert_gate_up, expert_down;
  int num_layers;  // in the stacks of experts
  Cache cache;
  const float* inverse_frequencies;
  float epsilon, scale, rotary_scale;
  bool is_normalized;  // whether the shares of a token's experts add up to 1
  // Memory between the kernels. Each layer's choices are left in `expert_scratch.experts`, [layers, T, k].
  experts::ExpertScratch expert_scratch;
  uint8_t* scratch;
  size_t scratch_bytes;
};

// Runs `num_layers` layers from `first` on. Returns an empty string or an error; `needed` is the bytes of scratch
// memory that the step needs, without which nothing is launched.
template <class W>
std::string run_expert_layers(const ExpertLayers<W>& call, const bf16* x, bf16* out, int first, int num_layers,
                              cudaStream_t stream, size_t* needed);

}  // namespace meshserve
