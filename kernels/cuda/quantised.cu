// The XLA FFI calls of the decode layers with quantised weights. They are those of ffi.cu, but each matrix is given as
// its numbers, its scales and its zero points (without zero points: the scales again).
#include "decode_ffi.cuh"

namespace meshserve {
namespace {

// Its operands are those of `project`.
ffi::Error project_residual(cudaStream_t stream, ffi::RemainingArgs all, Out out, Out converted, int32_t layer,
                            int32_t has_residual, int32_t is_down, Ints tuning) {
  return project<Fp8Weights>(stream, all, out, &converted, layer, has_residual != 0, is_down != 0, tuning);
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
  if constexpr (!kIsSingle<W>) {
    add(attention_kernel<64, W>);
    add(attention_kernel<64, W, Fp8Cache>);
  }
  add(attention_kernel<128, W>);
  add(attention_kernel<128, W, Fp8Cache>);
  add(attention_kernel<128, W, LongFp8Cache>);
  add(prepare_kernel<W>);
  add(gather_kernel<W>);
  if constexpr (!kIsSingle<W>) add(convert_kernel<W>);
}

}  // namespace

std::vector<const void*> quantised_kernels() {
  std::vector<const void*> kernels;
  add_kernels<Fp8Weights>(kernels);
  add_kernels<SplitFp8Weights>(kernels);
  add_kernels<SingleFp8Weights>(kernels);
  add_projections_of<Epilogue::kLogits, SplitFp8Weights>(kernels);
  add_kernels<Int4Weights>(kernels);
  add_kernels<IntegerInt4Weights>(kernels);
  return kernels;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers_quantised, decode_layers<Fp8Weights>, decode_layers_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_qkv_quantised, decode_qkv<Fp8Weights>, decode_qkv_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_project_residual_quantised, project_residual,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .RemainingArgs()
                                  .Ret<In>()
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("is_down")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_gate_up_quantised, decode_gate_up<Fp8Weights>, decode_gate_up_binding(),
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
