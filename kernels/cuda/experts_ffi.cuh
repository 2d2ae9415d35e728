// The XLA FFI calls of the experts. `experts` computes one layer's for any number of tokens. `decode_expert_layers`
// runs a range of layers of a decode step in one call, as `decode_layers` does for layers with an MLP.
#pragma once
#include "experts_calls.cuh"

namespace meshserve {
namespace {

ffi::Error experts_of_layer(cudaStream_t stream, In x, In gate_up, In down, In chosen, In shares, Out out, Out scratch,
                            int32_t layer, int32_t most_few_tokens) {
  experts::ExpertCall<Bf16Weights> call = {};
  call.gate_up = data<bf16>(gate_up);
  call.down = data<bf16>(down);
  return run_experts(stream, x, call, down, chosen, shares, out, scratch, layer, most_few_tokens);
}

ffi::Error decode_expert_layers(cudaStream_t stream, In x, In input_norm, In qkv, In q_norm, In k_norm, In o,
                                In post_norm, In router, In gate_up, In down, In cache, In page_table, In positions,
                                In inverse_frequencies, Out x_out, Out cache_out, Out scratch, Out expert_scratch,
                                Out chosen, int32_t first_layer, int32_t num_layers, int32_t num_chosen,
                                int32_t most_few_tokens, int32_t is_normalized, float epsilon, float scale,
                                float rotary_scale, Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  Step step(shapes, tuning_of(tuning), stream);
  step.weights = {data<bf16>(input_norm),
                  data<bf16>(qkv),
                  data<bf16>(q_norm),
                  data<bf16>(k_norm),
                  data<bf16>(o),
                  data<bf16>(post_norm),
                  nullptr,
                  nullptr};
  step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  step.inverse_frequencies = data<float>(inverse_frequencies);
  step.epsilon = epsilon;
  step.scale = scale;
  step.rotary_scale = rotary_scale;
  const ExpertLayers<Bf16Weights> run = {{data<bf16>(router), data<bf16>(gate_up), data<bf16>(down)},
                                         size(down, 0),
                                         size(down, 1),
                                         size(down, 3),
                                         first_layer,
                                         num_layers,
                                         num_chosen,
                                         most_few_tokens,
                                         is_normalized != 0};
  return run_expert_layers(step, shapes, run, x, positions, x_out, scratch, expert_scratch, chosen);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts, experts_of_layer,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()  // down
                                  .Arg<In>()  // experts
                                  .Arg<In>()  // shares
                                  .Ret<In>()
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("most_few_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers, decode_expert_layers,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // input_norm
                                  .Arg<In>()  // qkv
                                  .Arg<In>()  // q_norm
                                  .Arg<In>()  // k_norm
                                  .Arg<In>()  // o
                                  .Arg<In>()  // post_norm
                                  .Arg<In>()  // router
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()  // down
                                  .Arg<In>()  // cache, aliased with the second result
                                  .Arg<In>()  // page_table
                                  .Arg<In>()  // positions
                                  .Arg<In>()  // inverse_frequencies
                                  .Ret<In>()  // x
                                  .Ret<In>()  // cache
                                  .Ret<In>()  // scratch
                                  .Ret<In>()  // expert_scratch
                                  .Ret<In>()  // chosen experts
                                  .Attr<int32_t>("first_layer")
                                  .Attr<int32_t>("num_layers")
                                  .Attr<int32_t>("num_chosen")
                                  .Attr<int32_t>("most_few_tokens")
                                  .Attr<int32_t>("is_normalized")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<float>("rotary_scale")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

// Returns the bytes of scratch memory that the experts of a layer need.
extern "C" size_t meshserve_expert_scratch_bytes(int tokens, int chosen, int embed, int mlp) {
  experts::ExpertShapes shapes;
  shapes.tokens = tokens;
  shapes.chosen = chosen;
  shapes.embed = embed;
  shapes.mlp = mlp;
  return experts::ExpertScratch::bytes(shapes);
}

}  // namespace meshserve
