// The epilogues of the QKV projection: norm and rotation of query and key heads, and keys and values to their pages.
#pragma once
#include "projection/sm90/epilogues.cuh"

namespace meshserve {

__device__ __forceinline__ uint32_t narrow_to_e4m3(float4 v) {
  return narrow_to_e4m3(pack_bf16(v.x, v.y)) | narrow_to_e4m3(pack_bf16(v.z, v.w)) << 16;
}

// The 4 rows of a tile that a lane has, as elements of a head.
template <class Args>
struct HeadRows {
  struct Operands {
    float4 cosine, sine;
  };
  const Args& args;
  int lane;
  int kv_head, slot, element;  // slot: 0..G-1 query heads, G key, G+1 value
  bool is_valid;
  uint2 gain;  // the head norm's
  float inverse_dim;

  __device__ __forceinline__ HeadRows(const Args& args, int tile, int lane) : args(args), lane(lane) {
    int row = tile * kTileRows + 4 * lane, head = row / args.head_dim, heads_per_kv = args.group + 2;
    kv_head = head / heads_per_kv;
    slot = head % heads_per_kv;
    element = row % args.head_dim;
    is_valid = kv_head < args.kv_heads;
    const bf16* gains = slot == args.group ? args.k_gain : args.q_gain;
    gain = *reinterpret_cast<const uint2*>(gains + element);
    inverse_dim = 1.0f / static_cast<float>(args.head_dim);
  }

  __device__ __forceinline__ Operands load(int token) const {
    Operands operands = {};
    if (token >= args.batch) return operands;
    int half = args.head_dim / 2;
    const float* angles = args.cos_sin + token * args.head_dim + ((4 * lane) & (half - 1));
    operands.cosine = *reinterpret_cast<const float4*>(angles);
    operands.sine = *reinterpret_cast<const float4*>(angles + half);
    return operands;
  }

  // Applies RMSNorm and rotary embedding to a query or key head. A head spans 16 or 32 lanes; the elements paired by
  // the rotary embedding are half a head apart, in different lanes.
  __device__ __forceinline__ float4 norm_and_rotate(float4 sum, const Operands& operands) const {
    int lanes = args.head_dim / 4;
    float squares = sum_over_lanes(sum_of_squares(sum), lanes);
    float4 value = sum;
    if (slot <= args.group) {
      float scale = rsqrtf(squares * inverse_dim + args.epsilon);
      float4 g = unpack_bf16(gain);
      value = make_float4(sum.x * scale * g.x, sum.y * scale * g.y, sum.z * scale * g.z, sum.w * scale * g.w);
    }
    float4 other = shuffle_xor(value, lanes / 2);
    if (slot <= args.group) {
      float4 c = operands.cosine, s = operands.sine;
      float sign = element < args.head_dim / 2 ? -1.0f : 1.0f;
      value = make_float4(value.x * c.x + sign * other.x * s.x, value.y * c.y + sign * other.y * s.y,
                          value.z * c.z + sign * other.z * s.z, value.w * c.w + sign * other.w * s.w);
    }
    return value;
  }

  // Writes a key or value to the token's page.
  __device__ __forceinline__ void store_in_cache(float4 value, long long offset) const {
    long long slab = 2 * kv_head + (slot - args.group);
    const size_t at = offset + slab * args.page_size * args.head_dim + element;
    if (args.has_fp8_cache) {
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(args.cache) + at) = narrow_to_e4m3(value);
    } else {
      store_bf16x4(static_cast<bf16*>(args.cache) + at, value);
    }
  }
};

// kQkv: writes a finished head to q_out or the token's page.
template <class W>
struct QkvEpilogue : HeadRows<ArgsOf<Epilogue::kQkv, W>> {
  using Base = HeadRows<ArgsOf<Epilogue::kQkv, W>>;
  using Operands = typename Base::Operands;
  const long long* cache_offsets;  // one for each token of the group

  template <class Block>
  __device__ __forceinline__ explicit QkvEpilogue(const Block& block)
      : Base(block.args, block.tile, block.lane), cache_offsets(block.cache_offsets) {}

  __device__ __forceinline__ void begin() {}

  __device__ __forceinline__ void finish(int n, int token, float4 sum, const Operands& operands) const {
    const auto& args = Base::args;
    const long long offset = cache_offsets[n];
    const float4 value = Base::norm_and_rotate(sum, operands);
    if (!Base::is_valid) return;
    if (Base::slot < args.group) {
      size_t head = (static_cast<size_t>(token) * args.kv_heads + Base::kv_head) * args.group + Base::slot;
      store_bf16x4(args.q_out + head * args.head_dim + Base::element, value);
    } else if (offset >= 0) {
      Base::store_in_cache(value, offset);
    }
  }

  __device__ __forceinline__ void end() const {}
};

// kAttend, kAttendFp8: the heads are kept in shared memory, for attention by the blocks of the cluster.
template <Epilogue E, class W>
struct AttendEpilogue : HeadRows<ArgsOf<E, W>> {
  using Base = HeadRows<ArgsOf<E, W>>;
  using Operands = typename Base::Operands;

  // A warp finishes a head of the KV head, or nothing.
  template <class Block>
  __device__ __forceinline__ explicit AttendEpilogue(const Block& block)
      : Base(block.args, blockIdx.z * (block.args.group + 2) + min(block.warp, block.args.group + 1), block.lane) {}

  // Adds up the parts of the head that this warp finishes for the block's token, and leaves it in shared memory. The
  // first part of a context also writes the key and value to the token's page.
  template <class Block>
  __device__ __forceinline__ void finish_head(const Block& block, const HeadPart& part,
                                              const Operands& operands) const {
    const auto& args = Base::args;
    const float inverse_rms = block.inverse_rms[part.token];
    const long long offset = block.cache_offsets[part.token];
    HeadMemory* memory = block.head_memory();
    float4 sum = {};
#pragma unroll 1
    for (int r = 0; r < args.splits; ++r) {
      const int row = block.warp * args.splits + r;
      sum = add(sum, load_shared_float4(block.received + (row * kSumStride + 4 * block.lane) * 4));
    }
    sum = make_float4(sum.x * inverse_rms, sum.y * inverse_rms, sum.z * inverse_rms, sum.w * inverse_rms);
    const float4 value = Base::norm_and_rotate(sum, operands);
    if (Base::slot < args.group) return store_bf16x4(memory->q + block.warp * kHeadDim + Base::element, value);
    const int at = (Base::slot - args.group) * kHeadDim + Base::element;
    if constexpr (CacheOf<E>::kIsFp8) {
      *reinterpret_cast<uint32_t*>(memory->current + at) = narrow_to_e4m3(value);
    } else {
      store_bf16x4(reinterpret_cast<bf16*>(memory->current) + at, value);
    }
    if (part.index == 0 && offset >= 0) Base::store_in_cache(value, offset);
  }
};

}  // namespace meshserve
