// The XLA FFI calls of experts with 8-bit weights.
#include "experts_ffi.cuh"

namespace meshserve {

std::vector<const void*> fp8_expert_kernels() { return experts::kernels_of<Fp8Weights>(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts_fp8, experts_of_layer<Fp8Weights>, experts_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers_fp8, decode_expert_layers<Fp8Weights>,
                              expert_layers_binding(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
