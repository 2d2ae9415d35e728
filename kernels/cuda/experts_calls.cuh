// What the XLA FFI calls of experts with weights of every format share.
#pragma once
#include "experts_launch.cuh"
#include "ffi_arguments.cuh"

namespace meshserve {
namespace {

// What a call for several layers gets, besides what the step has.
template <class W>
struct ExpertLayers {
  experts::ExpertStacks<W> stacks;
  int layers, num_experts, mlp;  // of the stacks
  int first_layer, num_layers, num_chosen, most_few_tokens;
  bool is_normalized;
};

template <class W>
ffi::Error run_experts(cudaStream_t stream, const In& x, experts::ExpertCall<W> call, const In& down, const In& chosen,
                       const In& shares, Out& out, Out& scratch, int layer, int most_few_tokens) {
  experts::ExpertShapes shapes;
  shapes.tokens = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.chosen = size(chosen, 1);
  shapes.experts = size(down, 1);
  shapes.mlp = size(down, 3);
  shapes.most_few_tokens = most_few_tokens;
  experts::ExpertScratch parts;
  const size_t needed = parts.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);
  StepOf<W> step(Shapes(), Tuning(), stream);
  call.x = data<bf16>(x);
  call.experts = data<int>(chosen);
  call.shares = data<float>(shares);
  call.out = data<bf16>(out);
  experts::Launcher<W>(step, shapes, parts).experts(layer, size(down, 0), call);
  return result(step);
}

// Runs layers of a step whose weights, epsilon and scales are set.
template <class W>
ffi::Error run_expert_layers(StepOf<W>& step, Shapes shapes, const ExpertLayers<W>& run, const In& x,
                             const In& positions, Out& x_out, Out& scratch, Out& expert_scratch, Out& chosen) {
  experts::ExpertShapes expert_shapes;
  expert_shapes.tokens = shapes.batch;
  expert_shapes.embed = shapes.embed;
  expert_shapes.chosen = run.num_chosen;
  expert_shapes.experts = run.num_experts;
  expert_shapes.mlp = run.mlp;
  expert_shapes.most_few_tokens = run.most_few_tokens;
  size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);
  experts::ExpertScratch parts;
  needed = parts.carve(expert_shapes, data<uint8_t>(expert_scratch));
  if (needed > expert_scratch->element_count()) return too_small(needed);
  parts.experts = data<int>(chosen);
  experts::run_layers<W>(step, expert_shapes, parts, run.stacks, data<int>(positions), run.is_normalized, run.layers,
                         data<bf16>(x), data<bf16>(x_out), run.first_layer, run.num_layers);
  return result(step);
}

}  // namespace
}  // namespace meshserve
