// The XLA FFI calls of experts with 8-bit weights. They are those of experts_ffi.cuh, but each matrix is given as its
// numbers, its scales and its zero points (8-bit weights have none: the scales again).
#include "experts_calls.cuh"

namespace meshserve {
namespace {

ffi::Error experts_of_layer(cudaStream_t stream, In x, In gate_up, In gate_up_scale, In gate_up_zero, In down,
                            In down_scale, In down_zero, In chosen, In shares, Out out, Out scratch, int32_t layer,
                            int32_t most_few_tokens) {
  experts::ExpertCall<Fp8Weights> call = {};
  call.gate_up = matrix_of(gate_up, gate_up_scale, gate_up_zero);
  call.down = matrix_of(down, down_scale, down_zero);
  return run_experts(stream, x, call, down, chosen, shares, out, scratch, layer, most_few_tokens);
}

ffi::Error decode_expert_layers(cudaStream_t stream, In x, In input_norm, In qkv, In qkv_scale, In qkv_zero, In q_norm,
                                In k_norm, In o, In o_scale, In o_zero, In post_norm, In router, In gate_up,
                                In gate_up_scale, In gate_up_zero, In down, In down_scale, In down_zero, In cache,
                                In page_table, In positions, In inverse_frequencies, Out x_out, Out cache_out,
                                Out scratch, Out expert_scratch, Out chosen, int32_t first_layer, int32_t num_layers,
                                int32_t num_chosen, int32_t most_few_tokens, int32_t is_normalized, float epsilon,
                                float scale, float rotary_scale, Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  StepOf<Fp8Weights> step(shapes, tuning_of(tuning), stream);
  step.weights = {data<bf16>(input_norm),
                  matrix_of(qkv, qkv_scale, qkv_zero),
                  data<bf16>(q_norm),
                  data<bf16>(k_norm),
                  matrix_of(o, o_scale, o_zero),
                  data<bf16>(post_norm),
                  {},
                  {}};
  step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  step.inverse_frequencies = data<float>(inverse_frequencies);
  step.epsilon = epsilon;
  step.scale = scale;
  step.rotary_scale = rotary_scale;
  const ExpertLayers<Fp8Weights> run = {
      {data<bf16>(router), matrix_of(gate_up, gate_up_scale, gate_up_zero), matrix_of(down, down_scale, down_zero)},
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

std::vector<const void*> fp8_expert_kernels() { return experts::kernels_of<Fp8Weights>(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts_fp8, experts_of_layer,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // down
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // experts
                                  .Arg<In>()  // shares
                                  .Ret<In>()
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("most_few_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers_fp8, decode_expert_layers,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // input_norm
                                  .Arg<In>()  // qkv
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // q_norm
                                  .Arg<In>()  // k_norm
                                  .Arg<In>()  // o
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // post_norm
                                  .Arg<In>()  // router
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // down
                                  .Arg<In>()
                                  .Arg<In>()
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

}  // namespace meshserve
