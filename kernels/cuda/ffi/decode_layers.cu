// The XLA FFI calls of decode layers with an MLP. decode_layers runs a range of layers in one call, on one GPU or on
// each GPU of a mesh with an open P2P group. decode_qkv, project_residual and decode_gate_up are parts of it, for
// meshes where XLA sums after the o and down projections. Those named `quantized` take weights of every other format
// than bf16: each matrix is given as its numbers, its scales and its zero points (without zero points: the scales
// again). W below is that of the operands: bf16, or any quantized one.
//
// Every call only launches kernels on XLA's stream, always the same ones for the same shapes, so it can be captured in
// a command buffer. Weights are stacked over layers, with the layer as an attribute, because a slice would be a copy.
#include "common/tuning.cuh"
#include "ffi/arguments.cuh"
#include "layers/side_stream.cuh"
#include "layers/step.cuh"

namespace meshserve {
namespace {

// Returns whether FP8 weights are multiplied by activations of one e4m3 number each, if those may be rounded.
inline bool has_single_numbers(const Shapes& shapes) {
  const bool is_between = tuned::kFewestSingleTokens <= shapes.batch && shapes.batch <= tuned::kMostSingleTokens;
  return is_between && shapes.head_dim == 128 && shapes.mlp % 128 == 0;
}

// Calls `run` with a step that multiplies weights like `data`. Activations take the form that is fastest for its batch.
template <class W, class Run>
auto with_step(const In& data, const Shapes& shapes, const Tuning& tuning, cudaStream_t stream, Run run,
               bool may_round = false) {
  if constexpr (!W::kIsQuantized) {
    return run(Step<W>(shapes, tuning, stream));
  } else {
    if (format_of(data) == Format::kInt4) {
      if (shapes.batch <= tuned::kMostIntegerTokens) return run(Step<IntegerInt4Weights>(shapes, tuning, stream));
      return run(Step<Int4Weights>(shapes, tuning, stream));
    }
    if (may_round && has_single_numbers(shapes)) return run(Step<SingleFp8Weights>(shapes, tuning, stream));
    if (shapes.batch <= tuned::kMostSplitTokens) return run(Step<SplitFp8Weights>(shapes, tuning, stream));
    return run(Step<Fp8Weights>(shapes, tuning, stream));
  }
}

// Operands: x, input_norm, qkv (a matrix), q_norm, k_norm, o (a matrix), post_norm, gate_up and down (matrices), cache
// (aliased with the second result), page_table, positions, inverse_frequencies.
template <class W>
ffi::Error decode_layers(cudaStream_t stream, ffi::RemainingArgs all, Out x_out, Out cache_out, Out scratch,
                         int32_t first_layer, int32_t num_layers, float epsilon, float scale, float rotary_scale,
                         int32_t may_round, Ints ordinals, Ints tuning) {
  Operands<W> operands(all);
  ffi::Error error = operands.check(9, 4);
  if (error.failure()) return error;
  const In x = operands.next(), input_norm = operands.next();
  const auto qkv = operands.matrix();
  const In q_norm = operands.next(), k_norm = operands.next();
  const auto o = operands.matrix();
  const In post_norm = operands.next();
  const auto gate_up = operands.matrix(), down = operands.matrix();
  const In cache = operands.next(), page_table = operands.next(), positions = operands.next();
  const In inverse_frequencies = operands.next();

  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv.data, 2) / shapes.head_dim - 2;
  shapes.mlp = size(gate_up.data, 2);
  const bool is_mesh = ordinals.size() > 1;
  P2PGroup p2p = {};
  if (is_mesh) {
    error = p2p_group(ordinals, Channel::kLayers, x.size_bytes(), &p2p);
    if (error.failure()) return error;
  }
  // Two halves of the batch, side by side: one half's attention uses the memory while the other's projections, whose
  // weights are in the L2, wait for each other. A block of a projection gets the next free SM, before attention's.
  const Tuning tuned = tuning_of(tuning);
  const int num_parts = tuned.streams == 2 && !is_mesh && shapes.batch > 1 ? 2 : 1;
  const int part_tokens = (shapes.batch + num_parts - 1) / num_parts, num_tokens = shapes.batch;
  size_t needed = 0;
  std::string problem;
  // Launches the layers for the tokens of one part of the batch.
  const auto run_part = [&](int part, cudaStream_t on) {
    const int first = part * part_tokens;
    shapes.batch = std::min(part_tokens, num_tokens - first);
    const auto run = [&](auto step) {
      step.weights = {data<bf16>(input_norm), qkv.matrix,     data<bf16>(q_norm), data<bf16>(k_norm), o.matrix,
                      data<bf16>(post_norm),  gate_up.matrix, down.matrix};
      step.cache = {data<void>(cache_out), is_fp8(cache),
                    data<int>(page_table) + static_cast<size_t>(first) * shapes.max_pages,
                    data<int>(positions) + first};
      step.inverse_frequencies = data<float>(inverse_frequencies);
      step.epsilon = epsilon;
      step.scale = scale;
      step.rotary_scale = rotary_scale;
      if (num_parts > 1) step.product_priority = -1;  // over the kernels of the other half
      needed += step.scratch.carve(shapes, data<uint8_t>(scratch) + needed);
      if (needed > scratch->element_count()) return;
      const size_t row = static_cast<size_t>(first) * shapes.embed;
      step.layers(data<bf16>(x) + row, data<bf16>(x_out) + row, first_layer, num_layers, is_mesh ? &p2p : nullptr);
      if (problem.empty()) problem = step.error();
    };
    with_step<W>(qkv.data, shapes, tuned, on, run, may_round != 0);
  };
  cudaError_t status = cudaSuccess;
  if (num_parts == 1) {
    run_part(0, stream);
  } else {
    status =
        run_beside(stream, [&](cudaStream_t side) { run_part(1, side); }, [&](cudaStream_t own) { run_part(0, own); });
  }
  if (needed > scratch->element_count()) return too_small(needed);
  return problem.empty() ? result(status) : result(problem);
}

// Operands: x, norm, qkv (a matrix), q_norm, k_norm, cache (aliased with the second result), page_table, positions,
// inverse_frequencies.
template <class W>
ffi::Error decode_qkv(cudaStream_t stream, ffi::RemainingArgs all, Out q, Out cache_out, Out scratch, int32_t layer,
                      float epsilon, float rotary_scale, Ints tuning) {
  Operands<W> operands(all);
  const ffi::Error error = operands.check(8, 1);
  if (error.failure()) return error;
  const In x = operands.next(), norm = operands.next();
  const auto qkv = operands.matrix();
  const In q_norm = operands.next(), k_norm = operands.next();
  const In cache = operands.next(), page_table = operands.next(), positions = operands.next();
  const In inverse_frequencies = operands.next();
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv.data, 2) / shapes.head_dim - 2;
  return with_step<W>(qkv.data, shapes, tuning_of(tuning), stream, [&](auto step) {
    step.weights.qkv = qkv.matrix;
    step.weights.q_norm = data<bf16>(q_norm);
    step.weights.k_norm = data<bf16>(k_norm);
    step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
    step.inverse_frequencies = data<float>(inverse_frequencies);
    step.epsilon = epsilon;
    step.rotary_scale = rotary_scale;
    const size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    step.prepare(data<bf16>(x), data<bf16>(norm) + static_cast<size_t>(layer) * shapes.embed, true);
    step.qkv(layer, data<bf16>(q));
    return result(step);
  });
}

// out = [residual +] input weights^T. Operands: input, weights (a matrix), residual, which is not read unless
// `has_residual`. `converted` is scratch memory for the input of quantized weights.
template <class W>
ffi::Error project(cudaStream_t stream, const ffi::RemainingArgs& all, Out out, Out* converted, int32_t layer,
                   bool has_residual, bool is_down, Ints tuning) {
  Operands<W> operands(all);
  const ffi::Error error = operands.check(2, 1);
  if (error.failure()) return error;
  const In input = operands.next();
  const auto weights = operands.matrix();
  const In residual = operands.next();
  const int columns = size(input, 1);
  Shapes shapes;
  shapes.layers = size(weights.data, 0);
  shapes.embed = size(weights.data, 1);
  shapes.batch = size(input, 0);
  if (is_down) {
    shapes.mlp = columns;
  } else {
    shapes.kv_heads = shapes.group = 1;
    shapes.head_dim = columns;
  }
  const bf16* added = has_residual ? data<bf16>(residual) : nullptr;
  return with_step<W>(weights.data, shapes, tuning_of(tuning), stream, [&](auto step) {
    const bf16* from = data<bf16>(input);
    if constexpr (W::kIsQuantized) {
      const size_t needed = activation_bytes(shapes.batch, columns);
      if ((*converted)->element_count() < needed) return too_small(needed);
      step.convert(from, data<bf16>(*converted), columns);
      from = data<bf16>(*converted);
    }
    if (is_down) {
      step.weights.down = weights.matrix;
      step.down(layer, from, added, data<bf16>(out), nullptr);
    } else {
      step.weights.o = weights.matrix;
      step.output(layer, from, added, data<bf16>(out), nullptr);
    }
    return result(step);
  });
}

// Operands: x, norm, gate_up (a matrix).
template <class W>
ffi::Error decode_gate_up(cudaStream_t stream, ffi::RemainingArgs all, Out out, Out scratch, int32_t layer,
                          float epsilon, Ints tuning) {
  Operands<W> operands(all);
  const ffi::Error error = operands.check(2, 1);
  if (error.failure()) return error;
  const In x = operands.next(), norm = operands.next();
  const auto gate_up = operands.matrix();
  Shapes shapes;
  shapes.layers = size(gate_up.data, 0);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.mlp = size(gate_up.data, 2);
  return with_step<W>(gate_up.data, shapes, tuning_of(tuning), stream, [&](auto step) {
    step.weights.gate_up = gate_up.matrix;
    step.epsilon = epsilon;
    step.has_plain_output = true;
    const size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    step.prepare(data<bf16>(x), data<bf16>(norm) + static_cast<size_t>(layer) * shapes.embed, false);
    step.gate_up(layer, data<bf16>(out));
    return result(step);
  });
}

inline auto decode_layers_binding() {
  return bind(results<3>)
      .Attr<int32_t>("first_layer")
      .Attr<int32_t>("num_layers")
      .Attr<float>("epsilon")
      .Attr<float>("scale")
      .Attr<float>("rotary_scale")
      .Attr<int32_t>("may_round")  // activations to 8 bits, for FP8 weights
      .Attr<Ints>("ordinals")      // CUDA devices of the mesh by rank; one: no mesh
      .Attr<Ints>("tuning");
}

inline auto decode_qkv_binding() {
  return bind(results<3>)
      .Attr<int32_t>("layer")
      .Attr<float>("epsilon")
      .Attr<float>("rotary_scale")
      .Attr<Ints>("tuning");
}

inline auto decode_gate_up_binding() {
  return bind(results<2>).Attr<int32_t>("layer").Attr<float>("epsilon").Attr<Ints>("tuning");
}

// Its operands are those of `project`.
ffi::Error project_residual(cudaStream_t stream, ffi::RemainingArgs all, Out out, int32_t layer, int32_t has_residual,
                            int32_t is_down, Ints tuning) {
  return project<Bf16Weights>(stream, all, out, nullptr, layer, has_residual != 0, is_down != 0, tuning);
}

// Its operands are those of `project`.
ffi::Error project_residual_quantized(cudaStream_t stream, ffi::RemainingArgs all, Out out, Out converted,
                                      int32_t layer, int32_t has_residual, int32_t is_down, Ints tuning) {
  return project<Fp8Weights>(stream, all, out, &converted, layer, has_residual != 0, is_down != 0, tuning);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers, decode_layers<Bf16Weights>, decode_layers_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_qkv, decode_qkv<Bf16Weights>, decode_qkv_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    meshserve_project_residual, project_residual,
    bind(results<1>).Attr<int32_t>("layer").Attr<int32_t>("has_residual").Attr<int32_t>("is_down").Attr<Ints>("tuning"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_gate_up, decode_gate_up<Bf16Weights>, decode_gate_up_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers_quantized, decode_layers<Fp8Weights>, decode_layers_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_qkv_quantized, decode_qkv<Fp8Weights>, decode_qkv_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    meshserve_project_residual_quantized, project_residual_quantized,
    bind(results<2>).Attr<int32_t>("layer").Attr<int32_t>("has_residual").Attr<int32_t>("is_down").Attr<Ints>("tuning"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_gate_up_quantized, decode_gate_up<Fp8Weights>, decode_gate_up_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
