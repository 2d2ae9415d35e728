// The XLA FFI calls of experts, for weights of every format. `experts_of_layer` computes one layer's for any number of
// tokens. `decode_expert_layers` runs a range of layers of a decode step in one call, as `decode_layers` does for
// layers with an MLP.
#pragma once
#include "experts_launch.cuh"
#include "ffi_arguments.cuh"

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
  StepOf<W> step(Shapes(), Tuning(), stream);
  experts::Launcher<W>(step, shapes, parts).experts(layer, size(down.data, 0), call);
  return result(step);
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

  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv.data, 2) / shapes.head_dim - 2;
  experts::ExpertShapes expert_shapes;
  expert_shapes.tokens = shapes.batch;
  expert_shapes.embed = shapes.embed;
  expert_shapes.chosen = num_chosen;
  expert_shapes.experts = size(down.data, 1);
  expert_shapes.mlp = size(down.data, 3);
  expert_shapes.most_few_tokens = most_few_tokens;

  experts::ExpertScratch parts;
  const size_t expert_bytes = parts.carve(expert_shapes, data<uint8_t>(expert_scratch));
  if (expert_bytes > expert_scratch->element_count()) return too_small(expert_bytes);
  parts.experts = data<int>(chosen);
  const auto run = [&](auto step) {
    step.weights = {data<bf16>(input_norm),
                    qkv.matrix,
                    data<bf16>(q_norm),
                    data<bf16>(k_norm),
                    o.matrix,
                    data<bf16>(post_norm),
                    {},
                    {}};
    step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
    step.inverse_frequencies = data<float>(inverse_frequencies);
    step.epsilon = epsilon;
    step.scale = scale;
    step.rotary_scale = rotary_scale;
    const size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    experts::run_layers<W>(step, expert_shapes, parts, {data<bf16>(router), gate_up.matrix, down.matrix},
                           data<int>(positions), is_normalized != 0, size(down.data, 0), data<bf16>(x),
                           data<bf16>(x_out), first_layer, num_layers);
    return result(step);
  };
  if constexpr (W::kIsQuantised) {
    if (experts::splits_activations(expert_shapes)) {
      return run(StepOf<RoutedFp8Weights>(shapes, tuning_of(tuning), stream));
    }
    // Tokens are the rows of these products, and 16 rows of weights share a scale.
    const auto has_blocks = [](const Scales& s) { return s.rows_each % 16 == 0 && s.columns_log2 >= 7; };
    const bool has_row_blocks = has_blocks(qkv.matrix.scales) && has_blocks(o.matrix.scales);
    if (shapes.batch > SingleFp8Weights::kMost && shapes.head_dim == 128 && has_row_blocks) {
      return run(StepOf<RoutedSingleFp8Weights>(shapes, tuning_of(tuning), stream));
    }
    if (shapes.batch == 1) return run(StepOf<OneTokenFp8Weights>(shapes, tuning_of(tuning), stream));
  }
  return run(StepOf<W>(shapes, tuning_of(tuning), stream));
}

inline auto experts_binding() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .RemainingArgs()
      .Ret<In>()
      .Ret<In>()  // scratch
      .Attr<int32_t>("layer")
      .Attr<int32_t>("most_few_tokens");
}

inline auto expert_layers_binding() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .RemainingArgs()
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
      .Attr<Ints>("tuning");
}

}  // namespace
}  // namespace meshserve
