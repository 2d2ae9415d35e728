// The XLA FFI calls of experts, for weights in bf16 and FP8. `experts` computes one layer's for any number of tokens.
// `decode_expert_layers` runs a range of layers of a decode step in one call, as `decode_layers` does for layers with
// an MLP.
#include "layers/expert_layers.cuh"

#include "ffi/arguments.cuh"

namespace meshserve {
namespace {

// Operands: x, gate_up and down (matrices), experts, shares.
template <class W>
ffi::Error experts_of_layer(cudaStream_t stream, ffi::RemainingArgs all, Out out, Out scratch, int32_t layer,
                            int32_t most_few_tokens) {
  Operands<W> operands(all);
  ffi::Error error = operands.check(3, 2);
  if (error.failure()) return error;
  const In x = operands.next();
  const auto gate_up = operands.matrix(), down = operands.matrix();
  const In chosen = operands.next(), shares = operands.next();
  experts::ExpertShapes shapes;
  shapes.tokens = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.chosen = size(chosen, 1);
  shapes.experts = size(down.data, 1);
  shapes.mlp = size(down.data, 3);
  shapes.most_few_tokens = most_few_tokens;
  experts::ExpertScratch parts;
  const size_t needed = parts.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);
  experts::ExpertCall<W> call = {};
  call.x = data<bf16>(x);
  call.gate_up = gate_up.matrix;
  call.down = down.matrix;
  call.experts = data<int>(chosen);
  call.shares = data<float>(shares);
  call.out = data<bf16>(out);
  LaunchSequence sequence(stream);
  experts::launch_experts<W>(sequence, shapes, parts, layer, size(down.data, 0), call);
  return result(sequence.error());
}

// Operands: x, input_norm, qkv (a matrix), q_norm, k_norm, o (a matrix), post_norm, router, gate_up and down
// (matrices), cache (aliased with the second result), page_table, positions, inverse_frequencies.
template <class W>
ffi::Error decode_expert_layers(cudaStream_t stream, ffi::RemainingArgs all, Out x_out, Out cache_out, Out scratch,
                                Out expert_scratch, Out chosen, int32_t first_layer, int32_t num_layers,
                                int32_t num_chosen, int32_t most_few_tokens, int32_t is_normalized, float epsilon,
                                float scale, float rotary_scale, Ints tuning) {
  Operands<W> operands(all);
  ffi::Error error = operands.check(10, 4);
  if (error.failure()) return error;
  const In x = operands.next(), input_norm = operands.next();
  const auto qkv = operands.matrix();
  const In q_norm = operands.next(), k_norm = operands.next();
  const auto o = operands.matrix();
  const In post_norm = operands.next(), router = operands.next();
  const auto gate_up = operands.matrix(), down = operands.matrix();
  const In cache = operands.next(), page_table = operands.next(), positions = operands.next();
  const In inverse_frequencies = operands.next();

  ExpertLayers<W> call = {};
  Shapes& shapes = call.shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv.data, 2) / shapes.head_dim - 2;
  call.expert_shapes.tokens = shapes.batch;
  call.expert_shapes.embed = shapes.embed;
  call.expert_shapes.chosen = num_chosen;
  call.expert_shapes.experts = size(down.data, 1);
  call.expert_shapes.mlp = size(down.data, 3);
  call.expert_shapes.most_few_tokens = most_few_tokens;
  const size_t expert_bytes = call.expert_scratch.carve(call.expert_shapes, data<uint8_t>(expert_scratch));
  if (expert_bytes > expert_scratch->element_count()) return too_small(expert_bytes);
  call.expert_scratch.experts = data<int>(chosen);
  call.tuning = tuning_of(tuning);
  call.weights = {data<bf16>(input_norm),
                  qkv.matrix,
                  data<bf16>(q_norm),
                  data<bf16>(k_norm),
                  o.matrix,
                  data<bf16>(post_norm),
                  {},
                  {}};
  call.router = data<bf16>(router);
  call.expert_gate_up = gate_up.matrix;
  call.expert_down = down.matrix;
  call.num_layers = size(down.data, 0);
  call.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  call.inverse_frequencies = data<float>(inverse_frequencies);
  call.epsilon = epsilon;
  call.scale = scale;
  call.rotary_scale = rotary_scale;
  call.is_normalized = is_normalized != 0;
  call.scratch = data<uint8_t>(scratch);
  call.scratch_bytes = scratch->element_count();
  size_t needed = 0;
  const std::string problem =
      run_expert_layers(call, data<bf16>(x), data<bf16>(x_out), first_layer, num_layers, stream, &needed);
  return needed > call.scratch_bytes ? too_small(needed) : result(problem);
}

inline auto experts_binding() { return bind(results<2>).Attr<int32_t>("layer").Attr<int32_t>("most_few_tokens"); }

inline auto expert_layers_binding() {
  return bind(results<5>)
      .Attr<int32_t>("first_layer")
      .Attr<int32_t>("num_layers")
      .Attr<int32_t>("num_chosen")
      .Attr<int32_t>("most_few_tokens")
      .Attr<int32_t>("is_normalized")
      .Attr<float>("epsilon")
      .Attr<float>("scale")
      .Attr<float>("rotary_scale")
      .Attr<Ints>("tuning");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts, experts_of_layer<Bf16Weights>, experts_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers, decode_expert_layers<Bf16Weights>,
                              expert_layers_binding(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts_fp8, experts_of_layer<Fp8Weights>, experts_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers_fp8, decode_expert_layers<Fp8Weights>,
                              expert_layers_binding(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
