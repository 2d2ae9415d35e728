// The sizes of a step and of its model, and the paged cache, as the host side of several operations needs them.
#pragma once

namespace meshserve {

struct Shapes {
  int layers = 0, batch = 0, embed = 0, kv_heads = 0, group = 0, head_dim = 0, mlp = 0;
  int pages = 0, page_size = 0, max_pages = 0;
  int max_context() const { return max_pages * page_size; }
  int q_columns() const { return kv_heads * group * head_dim; }
  int qkv_rows() const { return kv_heads * (group + 2) * head_dim; }
  // Returns the elements of a layer's cache.
  size_t layer_elements() const { return static_cast<size_t>(pages) * kv_heads * 2 * page_size * head_dim; }
};

struct Cache {
  void* pages;
  bool is_fp8;  // whether these are e4m3 and not bf16
  const int *page_table, *positions;

  int element_bytes() const { return is_fp8 ? 1 : 2; }
  void* of_layer(const Shapes& shapes, int layer) const {
    return static_cast<unsigned char*>(pages) + layer * shapes.layer_elements() * element_bytes();
  }
};

}  // namespace meshserve
