// What the host calls when it loads Hopper's library.
#include <algorithm>

#include "ffi/loading.cuh"
#include "layers/expert_layers.cuh"
#include "layers/side_stream.cuh"
#include "layers/wide_step.cuh"

namespace meshserve {
namespace {

Shapes shapes_of(int batch, int embed, int kv_heads, int group, int head_dim, int mlp) {
  Shapes shapes;
  shapes.batch = batch;
  shapes.embed = embed;
  shapes.kv_heads = kv_heads;
  shapes.group = group;
  shapes.head_dim = head_dim;
  shapes.mlp = mlp;
  return shapes;
}

}  // namespace

// Loads the kernels onto CUDA devices. Writes a failure to `error`; returns whether loading succeeded.
extern "C" int meshserve_load_kernels(const int* ordinals, int num, char* error, int size) {
  return load_kernels(ordinals, num, error, size, open_side_stream);
}

// Returns the number of kernels that are loaded.
extern "C" int meshserve_num_kernels() { return static_cast<int>(listed_kernels().size()); }

// Return the bytes of scratch memory that calls with these shapes need: of decode layers, of wide steps, and of the
// experts of a layer.
extern "C" size_t meshserve_scratch_bytes(int batch, int embed, int kv_heads, int group, int head_dim, int mlp) {
  const Shapes whole = shapes_of(batch, embed, kv_heads, group, head_dim, mlp);
  const Shapes half = shapes_of((batch + 1) / 2, embed, kv_heads, group, head_dim, mlp);
  return std::max(Scratch::bytes(whole), 2 * Scratch::bytes(half));  // halves may run on two streams
}

extern "C" size_t meshserve_wide_scratch_bytes(int batch, int embed, int kv_heads, int group, int head_dim, int mlp) {
  return wide::scratch_bytes(shapes_of(batch, embed, kv_heads, group, head_dim, mlp));
}

extern "C" size_t meshserve_expert_scratch_bytes(int tokens, int chosen, int embed, int mlp) {
  experts::ExpertShapes shapes;
  shapes.tokens = tokens;
  shapes.chosen = chosen;
  shapes.embed = embed;
  shapes.mlp = mlp;
  return experts::ExpertScratch::bytes(shapes);
}

}  // namespace meshserve
