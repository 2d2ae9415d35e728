// The XLA FFI calls of attention and of layers for the tokens of prompts. paged_attention is that of decodes, with the
// kernels of the fused layers; prefill_attention is for steps with prompts. prompt_layers runs a range of layers of
// such a step, on one GPU. All but prompt_layers can be captured in a command buffer.
#include "attention/sm90/prefill_launch.cuh"
#include "ffi/arguments.cuh"
#include "layers/step.cuh"

namespace meshserve {
namespace {

// Describes prefill attention of a step. Its queries, its result and the pages of a layer are set by the caller.
prefill::Call attention_call(const Shapes& shapes, const In& parts, const In& page_table, const In& positions,
                             Out& unmerged, Out& counters, int num_tokens, int group, float scale) {
  prefill::Call call = {};
  call.parts = data<int4>(parts);
  call.page_table = data<int>(page_table);
  call.positions = data<int>(positions);
  call.unmerged = data<float>(unmerged);
  call.counters = data<int>(counters);
  call.num_tokens = num_tokens;
  call.num_parts = size(parts, 0);
  call.num_slots = static_cast<int>(unmerged->dimensions()[0]);
  call.slot_rows = static_cast<int>(unmerged->dimensions()[2]);
  call.num_pages = shapes.pages;
  call.max_pages = shapes.max_pages;
  call.kv_heads = shapes.kv_heads;
  call.group = group;
  call.page_size = shapes.page_size;
  call.head_dim = shapes.head_dim;
  call.scale = scale;
  return call;
}

// The layers of a step whose tokens may belong to the same request: as in decode_layers, but for the attention.
ffi::Error prompt_layers(cudaStream_t stream, In x, In input_norm, In qkv, In q_norm, In k_norm, In o, In post_norm,
                         In gate_up, In down, In cache, In token_pages, In positions, In inverse_frequencies, In parts,
                         In page_table, Out x_out, Out cache_out, Out scratch, Out unmerged, Out counters,
                         int32_t first_layer, int32_t num_layers, float epsilon, float scale, float rotary_scale,
                         Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, token_pages);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  shapes.mlp = size(gate_up, 2);
  Step<Bf16Weights> step(shapes, tuning_of(tuning), stream);
  step.weights = {data<bf16>(input_norm), data<bf16>(qkv),       data<bf16>(q_norm),  data<bf16>(k_norm),
                  data<bf16>(o),          data<bf16>(post_norm), data<bf16>(gate_up), data<bf16>(down)};
  step.cache = {data<void>(cache_out), is_fp8(cache), data<int>(token_pages), data<int>(positions)};
  step.inverse_frequencies = data<float>(inverse_frequencies);
  step.epsilon = epsilon;
  step.rotary_scale = rotary_scale;
  size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);

  prefill::Call call =
      attention_call(shapes, parts, page_table, positions, unmerged, counters, shapes.batch, shapes.group, scale);
  call.q = step.scratch.q;
  call.is_fp8 = is_fp8(cache);
  call.out = step.scratch.attended;
  const auto attend = [&](int layer) {
    step.qkv(layer, step.scratch.q);
    call.pages = data<uint8_t>(cache_out) + layer * (cache.size_bytes() / shapes.layers);
    if (step.error().empty()) step.sequence().note(prefill::launch(call, stream));
  };
  step.layers(data<bf16>(x), data<bf16>(x_out), first_layer, num_layers, nullptr, attend);
  return result(step);
}

ffi::Error paged_attention(cudaStream_t stream, In q, In cache, In page_table, In positions, Out out, Out scratch,
                           int32_t layer, float scale, Ints tuning) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(q, 0);
  shapes.group = size(q, 2);
  Step<Bf16Weights> step(shapes, tuning_of(tuning), stream);
  step.cache = {data<void>(cache), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  step.scale = scale;
  size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);
  step.prepare_attention();
  step.attention(layer, data<bf16>(q), data<bf16>(out));
  return result(step);
}

ffi::Error prefill_attention(cudaStream_t stream, In q, In cache, In parts, In page_table, In positions, Out out,
                             Out unmerged, Out counters, Out sums, int32_t layer, float scale) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  prefill::Call call =
      attention_call(shapes, parts, page_table, positions, unmerged, counters, size(q, 0), size(q, 2), scale);
  call.q = data<bf16>(q);
  call.is_fp8 = is_fp8(cache);
  call.pages = data<uint8_t>(cache) + layer * (cache.size_bytes() / shapes.layers);
  call.out = data<bf16>(out);
  if (sums->element_count() * shapes.head_dim == q.element_count()) call.sums = data<float>(sums);
  return result(prefill::launch(call, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    meshserve_paged_attention, paged_attention,
    bind(operands<4>, results<2>).Attr<int32_t>("layer").Attr<float>("scale").Attr<Ints>("tuning"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_prefill_attention, prefill_attention,
                              bind(operands<5>, results<4>).Attr<int32_t>("layer").Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});

// Not captured: prompts often find the device idle. It then begins with the first layer while the host launches the
// others; of a command buffer, nothing runs until the host has set up all kernels anew, if buffers have moved, and
// launched them, which takes longer than the layers.
XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_prompt_layers, prompt_layers,
                              bind(operands<15>, results<5>)
                                  .Attr<int32_t>("first_layer")
                                  .Attr<int32_t>("num_layers")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<float>("rotary_scale")
                                  .Attr<Ints>("tuning"));

}  // namespace meshserve
