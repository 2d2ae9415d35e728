// The XLA FFI calls. decode_layers runs a range of layers in one call, on one GPU or on each GPU of a mesh with an open
// P2P group; prompt_layers does it for tokens of prompts, on one GPU. decode_qkv, paged_attention, project_residual and
// decode_gate_up are parts of it, for meshes where XLA sums after the o and down projections. qk_norm_rope and
// prefill_attention are for steps without fused layers. sampling_threshold finds the smallest key that the sampling
// filters keep. p2p_all_reduce and p2p_all_gather are single collectives. Every call only launches kernels on XLA's
// stream, always the same ones for the same shapes, so it can be captured in a command buffer, and all but
// prompt_layers are. Weights are stacked over layers, with the layer as an attribute, because a slice would be a copy.
#include "decode_ffi.cuh"
#include "experts_ffi.cuh"
#include "ffi_arguments.cuh"
#include "launch.cuh"
#include "prefill_launch.cuh"
#include "preload.cuh"
#include "qk_norm_rope.cuh"
#include "threshold.cuh"

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
  Step step(shapes, tuning_of(tuning), stream);
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
    if (step.error().empty()) step.note(prefill::launch(call, stream));
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
  Step step(shapes, tuning_of(tuning), stream);
  step.cache = {data<void>(cache), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  step.scale = scale;
  size_t needed = step.scratch.carve(shapes, data<uint8_t>(scratch));
  if (needed > scratch->element_count()) return too_small(needed);
  step.prepare_attention();
  step.attention(layer, data<bf16>(q), data<bf16>(out));
  return result(step);
}

// Its operands are those of `project`.
ffi::Error project_residual(cudaStream_t stream, ffi::RemainingArgs all, Out out, int32_t layer, int32_t has_residual,
                            int32_t is_down, Ints tuning) {
  return project<Bf16Weights>(stream, all, out, nullptr, layer, has_residual != 0, is_down != 0, tuning);
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

ffi::Error qk_norm_rope(cudaStream_t stream, In rows, In q_norm, In k_norm, In cosines, In sines, In cache,
                        In page_table, In positions, In requests, Out q, Out cache_out, int32_t layer, float epsilon) {
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  const size_t norm = static_cast<size_t>(layer) * shapes.head_dim;
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
  args.pages = data<uint8_t>(cache_out) + layer * (cache.size_bytes() / shapes.layers);
  args.num_tokens = size(rows, 0);
  args.kv_heads = shapes.kv_heads;
  args.group = size(rows, 1) / (shapes.kv_heads * shapes.head_dim) - 2;
  args.max_pages = shapes.max_pages;
  args.page_size = shapes.page_size;
  args.epsilon = epsilon;
  auto kernel = shapes.head_dim == 128 ? rope::qk_norm_rope_kernel<128> : rope::qk_norm_rope_kernel<64>;
  if (is_fp8(cache)) {
    kernel =
        shapes.head_dim == 128 ? rope::qk_norm_rope_kernel<128, Fp8Cache> : rope::qk_norm_rope_kernel<64, Fp8Cache>;
  }
  const int num_threads = args.num_tokens * args.kv_heads * (shapes.head_dim / 4);
  kernel<<<(num_threads + rope::kThreads - 1) / rope::kThreads, rope::kThreads, 0, stream>>>(args);
  return result(cudaGetLastError());
}

ffi::Error sampling_threshold(cudaStream_t stream, In logits, In temperature, In top_k, In top_p, In min_p,
                              Out threshold) {
  const sampling::Args args = {data<float>(logits), data<float>(temperature),  data<float>(top_p), data<float>(min_p),
                               data<int>(top_k),    data<uint32_t>(threshold), size(logits, 1)};
  constexpr int kBytes = sampling::kListed * sizeof(uint32_t);
  cudaError_t status =
      cudaFuncSetAttribute(sampling::threshold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status == cudaSuccess) {
    sampling::threshold_kernel<<<size(logits, 0), sampling::kThreads, kBytes, stream>>>(args);
    status = cudaGetLastError();
  }
  return result(status);
}

template <bool kIsSum>
ffi::Error one_shot(cudaStream_t stream, In x, Out out, Ints ordinals) {
  OneShotArgs args = {};
  ffi::Error error = find_p2p_group(ordinals, Channel::kOneShot, x.size_bytes(), &args.p2p);
  if (error.failure()) return error;
  if (x.size_bytes() % 8 != 0) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a multiple of 8 bytes is needed");
  args.in = data<uint2>(x);
  args.out = data<uint2>(out);
  args.num_pairs = static_cast<int>(x.size_bytes() / 8);
  const int blocks = std::min((args.num_pairs + kP2PThreads - 1) / kP2PThreads, kMaxP2PBlocks);
  one_shot_kernel<kIsSum><<<blocks, kP2PThreads, 0, stream>>>(args);
  return result(cudaGetLastError());
}

ffi::Error two_shot(cudaStream_t stream, In x, Out out, Ints ordinals) {
  TwoShotArgs args = {};
  ffi::Error error = find_p2p_group(ordinals, Channel::kTwoShot, 0, &args.p2p);
  if (error.failure()) return error;
  const int num = args.p2p.num;
  if (!has_two_shots(num) || x.size_bytes() % (num * sizeof(uint4)) != 0) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "2 or 4 GPUs and a multiple of 16 bytes for each are needed");
  }
  for (size_t at = 0; at < x.size_bytes(); at += kTwoShotBytes) {
    args.in = data<uint4>(x) + at / sizeof(uint4);
    args.out = data<uint4>(out) + at / sizeof(uint4);
    args.chunk = static_cast<int>(std::min(kTwoShotBytes, x.size_bytes() - at) / sizeof(uint4) / num);
    const int blocks = std::min((args.chunk + kTwoShotThreads - 1) / kTwoShotThreads, kMaxP2PBlocks);
    (num == 2 ? two_shot_kernel<2> : two_shot_kernel<4>)<<<blocks, kTwoShotThreads, 0, stream>>>(args);
  }
  return result(cudaGetLastError());
}

ffi::Error p2p_all_reduce(cudaStream_t stream, In x, Out out, Ints ordinals) {
  return x.size_bytes() <= kSlotBytes ? one_shot<true>(stream, x, out, ordinals) : two_shot(stream, x, out, ordinals);
}
ffi::Error p2p_all_gather(cudaStream_t stream, In x, Out out, Ints ordinals) {
  return one_shot<false>(stream, x, out, ordinals);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers, decode_layers<Bf16Weights>, decode_layers_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not captured: prompts often find the device idle. It then begins with the first layer while the host launches the
// others; of a command buffer, nothing runs until the host has set up all kernels anew, if buffers have moved, and
// launched them, which takes longer than the layers.
XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_prompt_layers, prompt_layers,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // input_norm
                                  .Arg<In>()  // qkv
                                  .Arg<In>()  // q_norm
                                  .Arg<In>()  // k_norm
                                  .Arg<In>()  // o
                                  .Arg<In>()  // post_norm
                                  .Arg<In>()  // gate_up
                                  .Arg<In>()  // down
                                  .Arg<In>()  // cache, aliased with the second result
                                  .Arg<In>()  // page table of the tokens
                                  .Arg<In>()  // positions
                                  .Arg<In>()  // inverse_frequencies
                                  .Arg<In>()  // parts of the attention
                                  .Arg<In>()  // page table of the requests
                                  .Ret<In>()  // x
                                  .Ret<In>()  // cache
                                  .Ret<In>()  // scratch
                                  .Ret<In>()  // partial results of the attention
                                  .Ret<In>()  // its counters
                                  .Attr<int32_t>("first_layer")
                                  .Attr<int32_t>("num_layers")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<float>("rotary_scale")
                                  .Attr<Ints>("tuning"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_experts, experts_of_layer<Bf16Weights>, experts_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_expert_layers, decode_expert_layers<Bf16Weights>,
                              expert_layers_binding(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_qkv, decode_qkv<Bf16Weights>, decode_qkv_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_paged_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // q
                                  .Arg<In>()  // cache
                                  .Arg<In>()  // page_table
                                  .Arg<In>()  // positions
                                  .Ret<In>()
                                  .Ret<In>()  // scratch
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("scale")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_prefill_attention, prefill_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // q
                                  .Arg<In>()  // cache
                                  .Arg<In>()  // parts
                                  .Arg<In>()  // page_table
                                  .Arg<In>()  // positions
                                  .Ret<In>()  // attended
                                  .Ret<In>()  // unmerged
                                  .Ret<In>()  // counters
                                  .Ret<In>()  // sums
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_qk_norm_rope, qk_norm_rope,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // rows
                                  .Arg<In>()  // q_norm
                                  .Arg<In>()  // k_norm
                                  .Arg<In>()  // cosines
                                  .Arg<In>()  // sines
                                  .Arg<In>()  // cache, aliased with the second result
                                  .Arg<In>()  // page_table
                                  .Arg<In>()  // positions
                                  .Arg<In>()  // requests
                                  .Ret<In>()  // q
                                  .Ret<In>()  // cache
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("epsilon"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_project_residual, project_residual,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .RemainingArgs()
                                  .Ret<In>()
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("is_down")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_gate_up, decode_gate_up<Bf16Weights>, decode_gate_up_binding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_sampling_threshold, sampling_threshold,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // logits
                                  .Arg<In>()  // temperature
                                  .Arg<In>()  // top_k
                                  .Arg<In>()  // top_p
                                  .Arg<In>()  // min_p
                                  .Ret<In>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_p2p_all_reduce, p2p_all_reduce,
                              ffi::Ffi::Bind().Ctx<Stream>().Arg<In>().Ret<In>().Attr<Ints>("ordinals"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_p2p_all_gather, p2p_all_gather,
                              ffi::Ffi::Bind().Ctx<Stream>().Arg<In>().Ret<In>().Attr<Ints>("ordinals"),
                              {ffi::Traits::kCmdBufferCompatible});

std::vector<const void*> quantised_kernels();   // of quantised.cu
std::vector<const void*> fp8_expert_kernels();  // of experts_fp8.cu
std::vector<const void*> wide_head_kernels();   // of wide_head.cu
std::vector<const void*> wide_step_kernels();   // of wide_layers.cu

// Loads the kernels onto CUDA devices. Writes a failure to `error`; returns whether loading succeeded.
extern "C" int meshserve_load_kernels(const int* ordinals, int num, char* error, int size) {
  std::vector<const void*> others = quantised_kernels();
  for (const void* kernel : fp8_expert_kernels()) others.push_back(kernel);
  for (const void* kernel : wide_head_kernels()) others.push_back(kernel);
  for (const void* kernel : wide_step_kernels()) others.push_back(kernel);
  std::string text = load_kernels(ordinals, num, others);
  snprintf(error, size, "%s", text.c_str());
  return text.empty();
}

// Opens the P2P group of a mesh, given its CUDA device ordinals by rank. Writes a failure to `error`; returns whether
// opening succeeded.
extern "C" int meshserve_open_p2p_group(const int* ordinals, int num, double patience_seconds, char* error, int size) {
  std::string text = num < 2 || num > kMaxRanks ? std::to_string(num) + " devices; a P2P group has 2 to 8"
                                                : P2PMeshes::all().open(ordinals, num, patience_seconds);
  snprintf(error, size, "%s", text.c_str());
  return text.empty();
}

// Returns 1 + the rank for which `rank` timed out waiting, or 0.
extern "C" int meshserve_stalled_rank(const int* ordinals, int num, int rank) {
  return P2PMeshes::all().stalled(ordinals, num, rank);
}

// Returns the bytes of scratch memory that calls with these shapes need.
extern "C" size_t meshserve_scratch_bytes(int batch, int embed, int kv_heads, int group, int head_dim, int mlp) {
  Shapes shapes;
  shapes.batch = batch;
  shapes.embed = embed;
  shapes.kv_heads = kv_heads;
  shapes.group = group;
  shapes.head_dim = head_dim;
  shapes.mlp = mlp;
  const size_t whole = Scratch::bytes(shapes);
  shapes.batch = (batch + 1) / 2;  // of each half, if they run on two streams
  return std::max(whole, 2 * Scratch::bytes(shapes));
}

// Returns the bytes of scratch memory that the experts of a layer need.
extern "C" size_t meshserve_expert_scratch_bytes(int tokens, int chosen, int embed, int mlp) {
  experts::ExpertShapes shapes;
  shapes.tokens = tokens;
  shapes.chosen = chosen;
  shapes.embed = embed;
  shapes.mlp = mlp;
  return experts::ExpertScratch::bytes(shapes);
}

}  // namespace meshserve
