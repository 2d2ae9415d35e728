// The XLA FFI calls of the decode layers with quantised weights. They are those of ffi.cu, but each matrix is given as
// its numbers, its scales and its zero points (without zero points: the scales again).
#include "ffi_arguments.cuh"

namespace meshserve {
namespace {

// Calls `run` with a step whose weights have the format of `data`.
template <class Run>
ffi::Error with_step(const In& data, const Shapes& shapes, Ints tuning, cudaStream_t stream, Run run) {
  const Tuning tuned = tuning_of(tuning);
  const int width = width_of(shapes.batch);
  if (is_int4(data)) {
    if (width <= IntegerInt4Weights::kMost) return run(StepOf<IntegerInt4Weights>(shapes, tuned, stream));
    return run(StepOf<Int4Weights>(shapes, tuned, stream));
  }
  if (width <= SplitFp8Weights::kMost) return run(StepOf<SplitFp8Weights>(shapes, tuned, stream));
  return run(StepOf<Fp8Weights>(shapes, tuned, stream));
}

ffi::Error decode_layers(cudaStream_t stream, In x, In input_norm, In qkv, In qkv_scale, In qkv_zero, In q_norm,
                         In k_norm, In o, In o_scale, In o_zero, In post_norm, In gate_up, In gate_up_scale,
                         In gate_up_zero, In down, In down_scale, In down_zero, In cache, In page_table, In positions,
                         In inverse_frequencies, Out x_out, Out cache_out, Out scratch, int32_t first_layer,
                         int32_t num_layers, float epsilon, float scale, float rotary_scale, Ints ordinals,
                         Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  shapes.mlp = size(gate_up, 2);
  const bool is_mesh = ordinals.size() > 1;
  P2PGroup p2p = {};
  if (is_mesh) {
    ffi::Error error = find_p2p_group(ordinals, Channel::kLayers, x.size_bytes(), &p2p);
    if (error.failure()) return error;
  }
  return with_step(qkv, shapes, tuning, stream, [&](auto step) {
    step.weights = {data<bf16>(input_norm),
                    matrix_of(qkv, qkv_scale, qkv_zero),
                    data<bf16>(q_norm),
                    data<bf16>(k_norm),
                    matrix_of(o, o_scale, o_zero),
                    data<bf16>(post_norm),
                    matrix_of(gate_up, gate_up_scale, gate_up_zero),
                    matrix_of(down, down_scale, down_zero)};
    step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
    step.inverse_frequencies = data<float>(inverse_frequencies);
    step.epsilon = epsilon;
    step.scale = scale;
    step.rotary_scale = rotary_scale;
    size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    step.layers(data<bf16>(x), data<bf16>(x_out), first_layer, num_layers, is_mesh ? &p2p : nullptr);
    return result(step);
  });
}

ffi::Error decode_qkv(cudaStream_t stream, In x, In norm, In qkv, In qkv_scale, In qkv_zero, In q_norm, In k_norm,
                      In cache, In page_table, In positions, In inverse_frequencies, Out q, Out cache_out, Out scratch,
                      int32_t layer, float epsilon, float rotary_scale, Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  return with_step(qkv, shapes, tuning, stream, [&](auto step) {
    step.weights.qkv = matrix_of(qkv, qkv_scale, qkv_zero);
    step.weights.q_norm = data<bf16>(q_norm);
    step.weights.k_norm = data<bf16>(k_norm);
    step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
    step.inverse_frequencies = data<float>(inverse_frequencies);
    step.epsilon = epsilon;
    step.rotary_scale = rotary_scale;
    size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    step.prepare(data<bf16>(x), data<bf16>(norm) + static_cast<size_t>(layer) * shapes.embed, true);
    step.qkv(layer, data<bf16>(q));
    return result(step);
  });
}

// out = [residual +] input weights^T. `converted` is scratch memory for the input.
ffi::Error project_residual(cudaStream_t stream, In input, In weights, In scales, In zero, In residual, Out out,
                            Out converted, int32_t layer, int32_t has_residual, int32_t is_down, Ints tuning) {
  Shapes shapes;
  shapes.layers = size(weights, 0);
  shapes.embed = size(weights, 1);
  shapes.batch = size(input, 0);
  const int columns = size(input, 1);
  const bf16* added = has_residual ? data<bf16>(residual) : nullptr;
  if (is_down) {
    shapes.mlp = columns;
  } else {
    shapes.kv_heads = shapes.group = 1;
    shapes.head_dim = columns;
  }
  return with_step(weights, shapes, tuning, stream, [&](auto step) {
    if (converted->element_count() < activation_bytes(shapes.batch, columns)) {
      return too_small(activation_bytes(shapes.batch, columns));
    }
    step.convert(data<bf16>(input), data<bf16>(converted), columns);
    const ScaledMatrix matrix = matrix_of(weights, scales, zero);
    if (is_down) {
      step.weights.down = matrix;
      step.down(layer, data<bf16>(converted), added, data<bf16>(out), nullptr);
    } else {
      step.weights.o = matrix;
      step.output(layer, data<bf16>(converted), added, data<bf16>(out), nullptr);
    }
    return result(step);
  });
}

ffi::Error decode_gate_up(cudaStream_t stream, In x, In norm, In gate_up, In scales, In zero, Out out, Out scratch,
                          int32_t layer, float epsilon, Ints tuning) {
  Shapes shapes;
  shapes.layers = size(gate_up, 0);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.mlp = size(gate_up, 2);
  return with_step(gate_up, shapes, tuning, stream, [&](auto step) {
    step.weights.gate_up = matrix_of(gate_up, scales, zero);
    step.epsilon = epsilon;
    step.has_plain_output = true;
    size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
    if (needed > scratch->element_count()) return too_small(needed);
    step.prepare(data<bf16>(x), data<bf16>(norm) + static_cast<size_t>(layer) * shapes.embed, false);
    step.gate_up(layer, data<bf16>(out));
    return result(step);
  });
}

// logits = input weights^T, in float32. `converted` is scratch memory for the input.
ffi::Error output_head(cudaStream_t stream, In input, In weights, In scales, Out logits, Out converted) {
  Shapes shapes;
  shapes.layers = 1;
  shapes.batch = size(input, 0);
  const int columns = size(input, 1);
  const size_t needed = activation_bytes(shapes.batch, columns);
  if (converted->element_count() < needed) return too_small(needed);
  StepOf<SplitFp8Weights> step(shapes, {}, stream);
  step.convert(data<bf16>(input), data<bf16>(converted), columns);
  step.logits(matrix_of(weights, scales, scales), size(weights, 0), columns, data<bf16>(converted),
              data<float>(logits));
  return result(step);
}

template <class W>
void add_kernels(std::vector<const void*>& kernels) {
  add_projections<W>(kernels);
  auto add = [&](auto* kernel) { kernels.push_back(reinterpret_cast<const void*>(kernel)); };
  add(attention_kernel<64, W>);
  add(attention_kernel<128, W>);
  add(attention_kernel<64, W, Fp8Cache>);
  add(attention_kernel<128, W, Fp8Cache>);
  add(prepare_kernel<W>);
  add(convert_kernel<W>);
  add(gather_kernel<W>);
}

}  // namespace

std::vector<const void*> quantised_kernels() {
  std::vector<const void*> kernels;
  add_kernels<Fp8Weights>(kernels);
  add_kernels<SplitFp8Weights>(kernels);
  add_projections_of<Epilogue::kLogits, SplitFp8Weights>(kernels);
  add_kernels<Int4Weights>(kernels);
  add_kernels<IntegerInt4Weights>(kernels);
  return kernels;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers_quantised, decode_layers,
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
                                  .Attr<int32_t>("first_layer")
                                  .Attr<int32_t>("num_layers")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<float>("rotary_scale")
                                  .Attr<Ints>("ordinals")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_qkv_quantised, decode_qkv,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // input_norm
                                  .Arg<In>()  // qkv
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // q_norm
                                  .Arg<In>()  // k_norm
                                  .Arg<In>()  // cache, aliased with the second result
                                  .Arg<In>()  // page_table
                                  .Arg<In>()  // positions
                                  .Arg<In>()  // inverse_frequencies
                                  .Ret<In>()  // q
                                  .Ret<In>()  // cache
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("rotary_scale")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_project_residual_quantised, project_residual,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // input
                                  .Arg<In>()  // weights
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Arg<In>()  // residual
                                  .Ret<In>()
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("is_down")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_gate_up_quantised, decode_gate_up,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // post_norm
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()
                                  .Arg<In>()
                                  .Ret<In>()  // activated
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("epsilon")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_output_head, output_head,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()   // input
                                  .Arg<In>()   // weights
                                  .Arg<In>()   // scales
                                  .Ret<In>()   // logits
                                  .Ret<In>(),  // scratch
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
