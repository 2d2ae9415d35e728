// The XLA FFI calls that only the library for all GPUs since Ampere has, and what the host calls when it loads it. All
// can be captured in a command buffer.
#include "attention/sm80/tile_launch.cuh"
#include "experts/sm80/launch.cuh"
#include "ffi/buffers.cuh"
#include "ffi/loading.cuh"
#include "ffi/matrices.cuh"
#include "projection/sm80/few_tokens_launch.cuh"

namespace meshserve {
namespace {

// `parts` is a table for tiles of `tile_rows` rows.
ffi::Error tile_attention(cudaStream_t stream, In q, In cache, In parts, In page_table, In positions, Out out,
                          Out unmerged, Out counters, Out sums, int32_t layer, float scale, int32_t tile_rows,
                          int32_t tile_keys) {
  portable::Call call = {};
  call.q = data<bf16>(q);
  call.pages = data<uint8_t>(cache) + layer * (cache.size_bytes() / size(cache, 0));
  call.is_fp8 = is_fp8(cache);
  call.head_dim = size(cache, 5);
  call.tile_rows = tile_rows;
  call.tile_keys = tile_keys;
  call.num_slots = static_cast<int>(unmerged->dimensions()[0]);
  call.counters = data<int>(counters);
  prefill::Args& args = call.args;
  args.parts = data<int4>(parts);
  args.page_table = data<int>(page_table);
  args.positions = data<int>(positions);
  args.out = data<bf16>(out);
  args.unmerged = data<float>(unmerged);
  args.num_tokens = size(q, 0);
  args.num_parts = size(parts, 0);
  args.max_pages = size(page_table, 1);
  args.page_size = size(cache, 4);
  args.kv_heads = size(cache, 2);
  args.group = size(q, 2);
  args.slot_rows = static_cast<int>(unmerged->dimensions()[2]);
  if (sums->element_count() * call.head_dim == q.element_count()) args.sums = data<float>(sums);
  return result(portable::launch(call, scale, stream));
}

// Without zero points the scales are given again; without a residual, x.
ffi::Error few_token_product(cudaStream_t stream, In x, In weights, In scale, In zero, In residual, Out out,
                             int32_t has_residual) {
  const ScaledMatrix matrix = matrix_of(weights, scale, zero);
  portable::ProductArgs args = {};
  args.x = data<bf16>(x);
  args.weights = static_cast<const uint8_t*>(matrix.data);
  args.scales = matrix.scales;
  args.residual = has_residual ? residual.untyped_data() : nullptr;
  args.out = out->untyped_data();
  args.num_tokens = size(x, 0);
  args.rows = static_cast<int>(out->dimensions()[1]);
  args.columns = size(x, 1);
  args.is_float = out->element_type() == ffi::DataType::F32;
  return result(portable::launch_product(args, format_of(weights) == Format::kInt4, stream));
}

experts::sm80::WeightFormat expert_format_of(const In& weights) {
  if (weights.element_type() == ffi::DataType::BF16) return experts::sm80::WeightFormat::kBf16;
  return format_of(weights) == Format::kInt4 ? experts::sm80::WeightFormat::kInt4 : experts::sm80::WeightFormat::kE4m3;
}

// A matrix without scales is given in their place, scales without zero points in the place of those.
ffi::Error tile_experts(cudaStream_t stream, In x, In gate_up, In gate_up_scale, In gate_up_zero, In down,
                        In down_scale, In down_zero, In chosen, In shares, Out out, Out scratch, int32_t layer,
                        int32_t num_experts, int32_t most_few_tokens) {
  experts::sm80::Shapes shapes = {};
  shapes.tokens = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.chosen = size(chosen, 1);
  shapes.experts = size(down, 1);
  shapes.mlp = size(gate_up, 3);
  shapes.format = expert_format_of(down);
  auto stack_of = [&](const In& weights, const In& scale, const In& zero) {
    experts::sm80::Stack stack = {data<uint8_t>(weights), {}};
    if (shapes.format != experts::sm80::WeightFormat::kBf16) stack.scales = matrix_of(weights, scale, zero).scales;
    return stack;
  };
  experts::sm80::Call call = {};
  call.x = data<bf16>(x);
  call.gate_up = stack_of(gate_up, gate_up_scale, gate_up_zero);
  call.down = stack_of(down, down_scale, down_zero);
  call.experts = data<int>(chosen);
  call.shares = data<float>(shares);
  call.out = data<bf16>(out);
  call.scratch = data<uint8_t>(scratch);
  call.layer = layer;
  call.num_experts = num_experts;
  call.most_few_tokens = most_few_tokens;
  const size_t needed = experts::sm80::scratch_bytes(shapes);
  if (needed > scratch->size_bytes()) {
    return result(std::string("the scratch buffer needs ") + std::to_string(needed) + " bytes");
  }
  return result(experts::sm80::launch(shapes, call, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    meshserve_tile_experts, tile_experts,
    bind(operands<9>, results<2>).Attr<int32_t>("layer").Attr<int32_t>("num_experts").Attr<int32_t>("most_few_tokens"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_few_token_product, few_token_product,
                              bind(operands<5>, results<1>).Attr<int32_t>("has_residual"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_tile_attention, tile_attention,
                              bind(operands<5>, results<4>)
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("tile_rows")
                                  .Attr<int32_t>("tile_keys"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve

// Loads the kernels onto CUDA devices. Writes a failure to `error`; returns whether loading succeeded.
extern "C" int meshserve_load_kernels(const int* ordinals, int num, char* error, int size) {
  return meshserve::load_kernels(ordinals, num, error, size, nullptr);
}

// Returns the bytes of scratch memory of a layer's experts; `format` is a WeightFormat.
extern "C" size_t meshserve_tile_expert_scratch_bytes(int tokens, int chosen, int num_experts, int embed, int mlp,
                                                      int format) {
  using meshserve::experts::sm80::WeightFormat;
  return meshserve::experts::sm80::scratch_bytes(
      {tokens, chosen, num_experts, embed, mlp, static_cast<WeightFormat>(format)});
}

// Returns the number of kernels that are loaded.
extern "C" int meshserve_num_kernels() { return static_cast<int>(meshserve::listed_kernels().size()); }
