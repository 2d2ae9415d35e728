// What the projection kernel does with a token's sums, a warp for each token and tile. A lane has 4 of the tile's rows.
//
// An epilogue is made, and `begin` called, before the wait for the previous kernel, when it may load what no earlier
// kernel writes. `load` fetches a token's operands ahead, to hide their latency; `finish` takes its sums; `end` follows
// the block's last token. `n` is the token's number in its group of N.
#pragma once
#include "projection/sm90/block.cuh"

namespace meshserve {

// What epilogues have in common: nothing to fetch, to begin or to end.
template <Epilogue E, class W>
struct PlainEpilogue {
  struct Operands {};
  const ArgsOf<E, W>& args;
  int tile, lane;

  template <class Block>
  __device__ __forceinline__ explicit PlainEpilogue(const Block& block)
      : args(block.args), tile(block.tile), lane(block.lane) {}

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ Operands load(int) const { return {}; }
  __device__ __forceinline__ void end() const {}
};

__device__ __forceinline__ void store_bf16x4(bf16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

__device__ __forceinline__ float sum_of_squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 shuffle_xor(float4 v, int lanes) {
  return make_float4(__shfl_xor_sync(0xffffffffu, v.x, lanes), __shfl_xor_sync(0xffffffffu, v.y, lanes),
                     __shfl_xor_sync(0xffffffffu, v.z, lanes), __shfl_xor_sync(0xffffffffu, v.w, lanes));
}

// kResidual: out = residual + sum, rounded to bf16 like the residual stream. The inputs of the next norm use the
// rounded value.
template <Epilogue E, class W>
struct ResidualEpilogue : PlainEpilogue<E, W> {
  using Base = PlainEpilogue<E, W>;
  using Base::args, Base::tile, Base::lane;
  struct Operands {
    uint2 residual;
  };
  uint2 gain = {};  // the next norm's

  template <class Block>
  __device__ __forceinline__ explicit ResidualEpilogue(const Block& block) : Base(block) {
    if (args.next_gain != nullptr) {
      gain = *reinterpret_cast<const uint2*>(args.next_gain + tile * kTileRows + 4 * lane);
    }
  }

  __device__ __forceinline__ Operands load(int token) const {
    Operands operands = {};
    if (token >= args.batch) return operands;
    size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
    if (args.residual != nullptr) operands.residual = *reinterpret_cast<const uint2*>(args.residual + at);
    return operands;
  }

  __device__ __forceinline__ void finish(int, int token, float4 sum, const Operands& operands) const {
    add(token, sum, operands);
  }

  // Returns scaled_out, if it is written.
  __device__ __forceinline__ float4 add(int token, float4 sum, const Operands& operands) const {
    float4 x = unpack_bf16(operands.residual);
    uint2 rounded = make_uint2(pack_bf16(x.x + sum.x, x.y + sum.y), pack_bf16(x.z + sum.z, x.w + sum.w));
    size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
    *reinterpret_cast<uint2*>(args.out + at) = rounded;
    if (args.next_gain == nullptr) return {};
    x = unpack_bf16(rounded);
    float4 g = unpack_bf16(gain);
    float4 scaled = make_float4(x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w);
    if constexpr (W::kIsQuantized) {
      const size_t row = static_cast<size_t>(token) * args.out_columns;
      uint8_t* exponents = exponents_of(args.scaled_out, args.batch, args.out_columns) + row / kExponentColumns;
      store_activations<OutputFormat<W>>(args.scaled_out + row, exponents, tile * kTileRows + 4 * lane, scaled);
    } else {
      store_bf16x4(args.scaled_out + at, scaled);
    }
    float squares = sum_over_lanes(sum_of_squares(x), 32);
    if (lane == 0) args.sums_out[token * (args.out_columns / kTileRows) + tile] = squares;
    return scaled;
  }

  __device__ __forceinline__ void end() const {}
};

// kRouted: the same, and scaled_out is multiplied by a router when all of the block's tokens are there. A step has at
// most N tokens.
template <Epilogue E, class W>
struct RoutedEpilogue : ResidualEpilogue<E, W> {
  using Base = ResidualEpilogue<E, W>;
  using Operands = typename Base::Operands;
  uint8_t* columns;  // the block's columns of its tokens, stored where the pipeline was
  int warp, split;
  experts::RouterRows router;

  template <class Block>
  __device__ __forceinline__ explicit RoutedEpilogue(const Block& block)
      : Base(block), columns(block.pipeline), warp(block.warp), split(block.split) {}

  __device__ __forceinline__ void begin() {
    const auto& args = Base::args;
    if (split < args.batch) router.load(args.part, warp, Base::tile, args.out_columns);
  }

  __device__ __forceinline__ void finish(int n, int token, float4 sum, const Operands& operands) const {
    const float4 scaled = Base::add(token, sum, operands);
    *experts::part_columns(columns, n, Base::lane) =
        make_uint2(pack_bf16(scaled.x, scaled.y), pack_bf16(scaled.z, scaled.w));
  }

  __device__ __forceinline__ void end() const {
    const auto& args = Base::args;
    if (split >= args.batch) return;
    sync_threads(1, kConsumers);
    router.score(args.part, columns, warp, Base::tile, gridDim.z,
                 [&](int token) { return token < args.batch && token % args.splits == split; });
  }
};

// kGateUp: out = silu(gate) * up. The lower half of the tile's rows is gate, the upper half the same rows of up: 16
// lanes each.
template <class W>
struct GateUpEpilogue : PlainEpilogue<Epilogue::kGateUp, W> {
  using Base = PlainEpilogue<Epilogue::kGateUp, W>;
  using Base::args, Base::tile, Base::lane, Base::Base;

  __device__ __forceinline__ void finish(int, int token, float4 sum, const typename Base::Operands&) const {
    float4 up = shuffle_xor(sum, 16);
    if (lane >= 16) return;
    auto silu = [](float v) { return __fdividef(v, 1.0f + __expf(-v)); };
    const float4 activated =
        make_float4(silu(sum.x) * up.x, silu(sum.y) * up.y, silu(sum.z) * up.z, silu(sum.w) * up.w);
    if constexpr (W::kIsQuantized) {
      if (!args.has_plain_output) {
        const size_t row = static_cast<size_t>(token) * args.out_columns;
        uint8_t* exponents = exponents_of(args.out, args.batch, args.out_columns) + row / kExponentColumns;
        return store_activations<W, 64>(args.out + row, exponents, tile * (kTileRows / 2) + 4 * lane, activated);
      }
    }
    bf16* to = args.out + static_cast<size_t>(token) * args.out_columns + tile * (kTileRows / 2) + 4 * lane;
    store_bf16x4(to, activated);
  }

  __device__ __forceinline__ void end() const {}
};

// kShare: sends the sum, rounded to bf16, to the inboxes of the mesh's GPUs.
template <class W>
struct ShareEpilogue : PlainEpilogue<Epilogue::kShare, W> {
  using Base = PlainEpilogue<Epilogue::kShare, W>;
  using Base::args, Base::tile, Base::lane, Base::Base;

  __device__ __forceinline__ void finish(int, int token, float4 sum, const typename Base::Operands&) const {
    size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
    send(args.p2p, args.round, at * sizeof(bf16), make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)));
  }

  __device__ __forceinline__ void end() const {}
};

// kLogits: stores the sums in float32. The last tile may have more rows than the matrix.
template <class W>
struct LogitsEpilogue : PlainEpilogue<Epilogue::kLogits, W> {
  using Base = PlainEpilogue<Epilogue::kLogits, W>;
  using Base::args, Base::tile, Base::lane, Base::Base;

  __device__ __forceinline__ void finish(int, int token, float4 sum, const typename Base::Operands&) const {
    const int row = tile * kTileRows + 4 * lane;
    float* to = reinterpret_cast<float*>(args.out) + static_cast<size_t>(token) * args.out_columns + row;
    if (row < args.out_columns) *reinterpret_cast<float4*>(to) = sum;
  }

  __device__ __forceinline__ void end() const {}
};

}  // namespace meshserve
