// The kernels outside of the sm90 folders, which run on GPUs of compute capability 8.9 and later.
#include "attention/prefill_parts.cuh"
#include "attention/qk_norm_rope.cuh"
#include "collectives/two_shot.cuh"
#include "common/kernels.cuh"
#include "experts/router_parts.cuh"
#include "layers/prepare.cuh"
#include "projection/quantize.cuh"
#include "sampling/readback.cuh"
#include "sampling/threshold.cuh"

namespace meshserve {

void list_portable_kernels() {
  kernel_of<rope::qk_norm_rope_kernel<128, Bf16Cache>>();
  kernel_of<rope::qk_norm_rope_kernel<128, Fp8Cache>>();
  kernel_of<prepare_kernel<Bf16Weights>>();
  kernel_of<prepare_kernel<SplitFp8Weights>>();
  kernel_of<convert_kernel<IntegerInt4Weights>>();
  kernel_of<gather_kernel<Fp8Weights>>();
  kernel_of<one_shot_kernel<true>>();
  kernel_of<two_shot_kernel<4>>();
  kernel_of<experts::count_kernel<Fp8Weights>>();
  kernel_of<experts::assign_slots_kernel<Fp8Weights>>();
  kernel_of<fp8::quantize_row_kernel<fp8::Before::kRmsNorm, false, 4>>();
  kernel_of<fp8::quantize_chunk_kernel<fp8::Before::kSiluProduct>>();
  kernel_of<readback::write_tokens_kernel>();
  kernel_of<sampling::threshold_kernel>();
}

}  // namespace meshserve
