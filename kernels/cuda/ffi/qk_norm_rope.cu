// The XLA FFI call of what lies between the QKV projection and attention. It can be captured in a command buffer.
#include "attention/qk_norm_rope_launch.cuh"
#include "ffi/buffers.cuh"

namespace meshserve {
namespace {

ffi::Error qk_norm_rope(cudaStream_t stream, In rows, In q_norm, In k_norm, In cosines, In sines, In cache,
                        In page_table, In positions, In requests, Out q, Out cache_out, int32_t layer, float epsilon) {
  const int head_dim = size(cache, 5);
  const size_t norm = static_cast<size_t>(layer) * head_dim;
  rope::Args args = {};
  args.rows = data<bf16>(rows);
  args.q_gain = data<bf16>(q_norm) + norm;
  args.k_gain = data<bf16>(k_norm) + norm;
  args.cosines = data<float>(cosines);
  args.sines = data<float>(sines);
  args.positions = data<int>(positions);
  args.requests = data<int>(requests);
  args.page_table = data<int>(page_table);
  args.q = data<bf16>(q);
  args.pages = data<uint8_t>(cache_out) + layer * (cache.size_bytes() / size(cache, 0));
  args.num_tokens = size(rows, 0);
  args.kv_heads = size(cache, 2);
  args.group = size(rows, 1) / (args.kv_heads * head_dim) - 2;
  args.max_pages = size(page_table, 1);
  args.page_size = size(cache, 4);
  args.epsilon = epsilon;
  return result(rope::launch(args, head_dim, is_fp8(cache), stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_qk_norm_rope, qk_norm_rope,
                              bind(operands<9>, results<2>).Attr<int32_t>("layer").Attr<float>("epsilon"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
