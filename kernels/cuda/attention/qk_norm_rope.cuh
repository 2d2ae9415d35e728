// Does everything between the QKV projection and attention in one pass: RMSNorm of every query and key head, rotary
// position embedding, and writing keys and values to their pages. For steps of few decodes, see projection.cuh.
//
// A group of lanes processes one kv head of a token: all its query heads, its key and its value. A lane holds four
// elements of a head: two neighbors, and the two half a head away that the rotary embedding pairs them with. Values are
// rounded at the same points as in the model's own steps: after the norm, after its gain, and after the rotation.
//
// It may be launched early, and decode attention behind it (see ptx.cuh).
#pragma once
#include "common/fp8_cache.cuh"

namespace meshserve {
namespace rope {

constexpr int kThreads = 256, kMaxGroup = 8;

struct Args {
  const bf16* rows;                 // [T, K, G + 2, H]
  const bf16 *q_gain, *k_gain;      // [H]
  const float *cosines, *sines;     // [T, H / 2]
  const int *positions, *requests;  // [T]; a position of -1 is padding; no requests: token i is of request i
  const int* page_table;            // [B, max_pages]
  bf16* q;                          // [T, K, G, H]
  void* pages;                      // one layer's [P, K, 2, S, H] of the cache's elements
  int num_tokens, kv_heads, group, max_pages, page_size;
  float epsilon;
};

__device__ __forceinline__ float4 times(float4 x, float factor) {
  return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}
__device__ __forceinline__ float4 times(float4 x, float4 y) {
  return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
__device__ __forceinline__ uint2 pack(float4 x) { return make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)); }
__device__ __forceinline__ float4 rounded(float4 x) { return unpack_bf16(pack(x)); }

// Loads a lane's elements of a head: two of its first half, then the two of its second half that are paired with them.
template <int H>
__device__ __forceinline__ uint2 load_quad(const bf16* head, int lane) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(head);
  return make_uint2(words[lane], words[H / 4 + lane]);
}
template <int H>
__device__ __forceinline__ void store_quad(bf16* head, int lane, uint2 v) {
  uint32_t* words = reinterpret_cast<uint32_t*>(head);
  words[lane] = v.x;
  words[H / 4 + lane] = v.y;
}
template <int H>
__device__ __forceinline__ void store_quad(uint8_t* head, int lane, uint2 v) {
  uint16_t* pairs = reinterpret_cast<uint16_t*>(head);
  pairs[lane] = narrow_to_e4m3(v.x);
  pairs[H / 4 + lane] = narrow_to_e4m3(v.y);
}

// `c` and `s` hold the cosines and sines of the two pairs, repeated twice.
template <int H>
__device__ __forceinline__ uint2 norm_and_rotate(uint2 v, float4 gain, float4 c, float4 s, float epsilon) {
  float4 x = unpack_bf16(v);
  const float squares = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  const float inverse = rsqrtf(sum_over_lanes(squares, H / 4) * (1.0f / H) + epsilon);
  x = rounded(times(rounded(times(x, inverse)), gain));
  return pack(make_float4(x.x * c.x - x.z * s.x, x.y * c.y - x.w * s.y, x.z * c.z + x.x * s.z, x.w * c.w + x.y * s.w));
}

template <int H, class C = Bf16Cache>
__global__ void __launch_bounds__(kThreads) qk_norm_rope_kernel(const __grid_constant__ Args args) {
  constexpr int kLanes = H / 4;
  if (threadIdx.x == 0) let_next_kernel_start();
  const int lane = threadIdx.x % kLanes, num_items = args.num_tokens * args.kv_heads;
  const int item = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
  const bool is_item = item < num_items;  // other lanes only take part in the sums over lanes
  const int token = is_item ? item / args.kv_heads : 0, kv_head = is_item ? item % args.kv_heads : 0;
  const bf16* row = args.rows + (static_cast<size_t>(token) * args.kv_heads + kv_head) * (args.group + 2) * H;

  const float4 q_gain = unpack_bf16(load_quad<H>(args.q_gain, lane));
  const float4 k_gain = unpack_bf16(load_quad<H>(args.k_gain, lane));
  const size_t angle = static_cast<size_t>(token) * (H / 2) + 2 * lane;
  const float *cosine = args.cosines + angle, *sine = args.sines + angle;
  const float4 c = make_float4(cosine[0], cosine[1], cosine[0], cosine[1]);
  const float4 s = make_float4(sine[0], sine[1], sine[0], sine[1]);
  const int position = args.positions[token];
  typename C::Element* place = nullptr;  // the key's; the value lies page_size rows after it
  if (is_item && position >= 0) {
    const size_t request = args.requests == nullptr ? token : args.requests[token];
    const size_t page = args.page_table[request * args.max_pages + position / args.page_size];
    place = static_cast<typename C::Element*>(args.pages) +
            ((page * args.kv_heads + kv_head) * 2 * args.page_size + position % args.page_size) * H;
  }
  wait_for_previous_kernel();
  uint2 heads[kMaxGroup + 2];  // all loads are in flight at once
#pragma unroll
  for (int i = 0; i < kMaxGroup + 2; ++i) {
    heads[i] = i < args.group + 2 ? load_quad<H>(row + i * H, lane) : make_uint2(0, 0);
  }

  bf16* q = args.q + (static_cast<size_t>(token) * args.kv_heads + kv_head) * args.group * H;
#pragma unroll
  for (int i = 0; i < kMaxGroup + 2; ++i) {
    if (i < args.group) {
      const uint2 turned = norm_and_rotate<H>(heads[i], q_gain, c, s, args.epsilon);
      if (is_item) store_quad<H>(q + i * H, lane, turned);
    } else if (i == args.group) {
      const uint2 turned = norm_and_rotate<H>(heads[i], k_gain, c, s, args.epsilon);
      if (place != nullptr) store_quad<H>(place, lane, turned);
    } else if (i == args.group + 1 && place != nullptr) {
      store_quad<H>(place + static_cast<size_t>(args.page_size) * H, lane, heads[i]);
    }
  }
}

}  // namespace rope
}  // namespace meshserve
