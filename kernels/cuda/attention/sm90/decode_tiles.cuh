// What a warp does with a tile of keys and values in decode attention.
//
// Tokens are the rows of the matrix instruction and queries its 8 columns:
//   scores [16 tokens, 8 queries] = K Q^T;  out [H, 8 queries] += V^T P^T
// A lane therefore holds the same two queries in both, and one transposition of the 16 x 8 scores connects them.
//
// A cache in 8 bits is kept so in shared memory and converted between ldmatrix and the product. A lane then reads four
// neighboring elements of a key at once, and the queries' elements have the same order; the transposed rows of values
// come in pairs, so that row r of 16 of the result is element 2 r, and row r + 8 is element 2 r + 1.
//
// Tiles of such a cache may have 32 tokens (LongFp8Cache): the copy engine takes longer for two copies of 2 KB than for
// one of 4 KB, and the largest scores of 32 tokens are found in the time of those of 16. Products are then in f16,
// which holds every e4m3 number: one instruction converts two, and to bf16 it takes nine for four. Other tiles could
// have f16 products, too, which has not been measured.
//
// Page contents beyond the request's length are masked (keys) or overwritten with zeros (values), so NaN is harmless.
#pragma once
#include "attention/context_parts.cuh"
#include "common/fp8_cache.cuh"
#include "common/sm90/ptx.cuh"

namespace meshserve {

constexpr int kProductTokens = 16;  // the rows of a product
constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kMaxGroup = 8;

struct LongFp8Cache : Fp8Cache {};  // with tiles of 32 tokens
template <class C>
constexpr bool is_long = std::is_same_v<C, LongFp8Cache>;
template <class C>
constexpr int kTileTokens = is_long<C> ? 32 : kProductTokens;

// A warp's partial result. `out` is relative to exp2(largest) and not yet divided by `sum`.
template <int H>
struct Partial {
  static constexpr int kStride = H + 4;  // floats; the extra 4 avoid bank conflicts
  float out[kMaxGroup * kStride];
  float largest[kMaxGroup], sum[kMaxGroup];
};

// Address of the 16-byte chunk of a token's row in a tile [H / 64 halves, 16 tokens, 128 bytes], swizzled.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int token, int chunk) {
  return tile + (chunk / 8) * (kProductTokens * 128) + token * 128 + (((chunk % 8) ^ (token % 8)) * 16);
}

// The same in a tile [tokens, H] of e4m3, whose swizzle is as wide as a row.
template <int H>
__device__ __forceinline__ uint32_t fp8_chunk_address(uint32_t tile, int token, int chunk) {
  const uint32_t offset = token * H + chunk * 16;
  return tile + (offset ^ (offset / 128 % (H / 16) * 16));
}

// Returns how many of the request's first tiles may be fetched before the previous kernel ends. Rows of consecutive
// positions may be new tokens of one request; if they are not, some tiles are only fetched later than possible.
__device__ __forceinline__ int count_early_tiles(const int* positions, int request, int num_tiles, int tile_tokens) {
  const int position = positions[request];
  int num_new = 1;
#pragma unroll 1
  while (num_new <= request && positions[request - num_new] == position - num_new) ++num_new;
  return num_new > 1 ? (position + 1 - num_new) / tile_tokens : num_tiles;
}

template <int H>
struct WarpState {
  uint32_t q[H / 16][2];     // queries as the B operand: query lane / 4, elements 16 k + 2 (lane % 4) ..
  float out[H / 16][4];      // elements 16 h + lane / 4 (+ 8) of queries 2 (lane % 4), + 1; see above for 8 bits
  float largest[2], sum[2];  // statistics of the two queries; `sum` covers only this lane's tokens
};

// Converts two bf16 numbers to f16. Those beyond its range become the largest number.
__device__ __forceinline__ uint32_t bf16_to_f16(uint32_t pair) {
  constexpr float kLargest = 65504.0f;
  auto clamp = [](float value) { return fminf(fmaxf(value, -kLargest), kLargest); };
  return pack_f16(clamp(__uint_as_float(pair << 16)), clamp(__uint_as_float(pair & 0xFFFF0000u)));
}

// Begins with the queries q [group, H] of a KV head.
template <int H, class C>
__device__ __forceinline__ void load_queries(WarpState<H>& state, const bf16* q, int group, int lane) {
  constexpr int kFirst = C::kIsFp8 ? 2 : 1, kSecond = C::kIsFp8 ? 1 : 4;
  const bool is_head = lane / 4 < group;
#pragma unroll
  for (int k = 0; k < H / 16; ++k) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(q + (lane / 4) * H + 16 * k);
    uint32_t first = is_head ? words[kFirst * (lane % 4)] : 0;
    uint32_t second = is_head ? words[kFirst * (lane % 4) + kSecond] : 0;
    if constexpr (is_long<C>) {
      first = bf16_to_f16(first);
      second = bf16_to_f16(second);
    } else if constexpr (C::kIsFp8) {
      const uint32_t even = __byte_perm(first, second, 0x5410);
      second = __byte_perm(first, second, 0x7632);
      first = even;
    }
    state.q[k][0] = first;
    state.q[k][1] = second;
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[k][i] = 0.0f;
  }
  state.largest[0] = state.largest[1] = -INFINITY;
  state.sum[0] = state.sum[1] = 0.0f;
}

// Converts four e4m3 numbers for a product: neighbors to a pair of f16 each, or numbers 0 and 2 and 1 and 3 to bf16.
template <class C>
__device__ __forceinline__ void widen(uint32_t word, uint32_t& first, uint32_t& second) {
  is_long<C> ? e4m3_to_f16(word, first, second) : convert_e4m3(word, first, second);
}
// The same of two tokens' elements 2 r and 2 r + 1: to a pair of each element.
template <class C>
__device__ __forceinline__ void widen_values(uint32_t word, uint32_t& even, uint32_t& odd) {
  widen<C>(is_long<C> ? __byte_perm(word, 0, 0x3120) : word, even, odd);
}
// c[16, 8] += a[16, 16] b[16, 8]
template <class C>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  is_long<C> ? multiply_16x8x16_f16(c, a, b0, b1) : multiply_16x8x16(c, a, b0, b1);
}

// Attends to a tile that begins with the request's token first_token.
template <int H, class C>
__device__ __forceinline__ void attend_tile(WarpState<H>& state, uint32_t k_tile, uint32_t v_tile, int first_token,
                                            int num_tokens, float scale_log2, int lane) {
  constexpr int kParts = kTileTokens<C> / kProductTokens;
  constexpr int kPartBytes = kProductTokens * H * sizeof(typename C::Element);
  float score[kParts][4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t keys = k_tile + part * kPartBytes;
    float even[4] = {}, odd[4] = {};  // two chains of multiplications hide each other's latency
    if constexpr (C::kIsFp8) {
#pragma unroll
      for (int k = 0; k < H / 16; k += 2) {
        uint32_t raw[4];
        load_matrices(raw, fp8_chunk_address<H>(keys, lane % 16, k + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          widen<C>(raw[2 * i], a[0], a[2]);
          widen<C>(raw[2 * i + 1], a[1], a[3]);
          multiply<C>(i ? odd : even, a, state.q[k + i][0], state.q[k + i][1]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < H / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, chunk_address(keys, lane % 16, 2 * k + lane / 16));
        multiply<C>(k % 2 ? odd : even, a, state.q[k][0], state.q[k][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + kProductTokens * part + lane / 4 + 8 * (i / 2);
      score[part][i] = token < num_tokens ? (even[i] + odd[i]) * scale_log2 : -INFINITY;
    }
  }
  float shrink[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float largest = fmaxf(score[0][c], score[0][c + 2]);
#pragma unroll
    for (int part = 1; part < kParts; ++part) largest = fmaxf(largest, fmaxf(score[part][c], score[part][c + 2]));
    for (int offset = 4; offset < 32; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    largest = fmaxf(largest, state.largest[c]);
    shrink[c] = rescale(state.largest[c], largest);
    state.largest[c] = largest;
    float sum = state.sum[c] * shrink[c];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      score[part][c] = exp2f(score[part][c] - largest);
      score[part][c + 2] = exp2f(score[part][c + 2] - largest);
      sum = sum + score[part][c] + score[part][c + 2];
    }
    state.sum[c] = sum;
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t values = v_tile + part * kPartBytes;
    auto transposed = [](float even, float odd) {
      return transpose_8x8(is_long<C> ? pack_f16(even, odd) : pack_bf16(even, odd));
    };
    const uint32_t p0 = transposed(score[part][0], score[part][1]), p1 = transposed(score[part][2], score[part][3]);
    auto add_values = [&](float (&out)[4], const uint32_t (&a)[4]) {
      if (part == 0) {
        out[0] *= shrink[0];
        out[1] *= shrink[1];
        out[2] *= shrink[0];
        out[3] *= shrink[1];
      }
      multiply<C>(out, a, p0, p1);
    };
    if constexpr (C::kIsFp8) {
#pragma unroll
      for (int h = 0; h < H / 16; h += 2) {
        uint32_t raw[4];  // for each 16 elements, tokens 0 to 7 and 8 to 15
        load_matrices_transposed(raw, fp8_chunk_address<H>(values, lane % 16, h + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          widen_values<C>(raw[2 * i], a[0], a[1]);
          widen_values<C>(raw[2 * i + 1], a[2], a[3]);
          add_values(state.out[h + i], a);
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < H / 16; ++h) {
        uint32_t a[4];
        load_matrices_transposed(a, chunk_address(values, lane % 8 + 8 * (lane / 16), 2 * h + (lane / 8) % 2));
        add_values(state.out[h], a);
      }
    }
  }
}

template <int H, class C>
__device__ __forceinline__ uint32_t row_address(uint32_t tile, int token, int chunk) {
  return C::kIsFp8 ? fp8_chunk_address<H>(tile, token, chunk) : chunk_address(tile, token, chunk);
}

// Replaces the values of a tile from `first_token` on with zeros.
template <int H, class C>
__device__ __forceinline__ void clear_values(uint32_t v_tile, int first_token, int lane) {
  constexpr int kChunks = H * sizeof(typename C::Element) / 16;
#pragma unroll 1
  for (int i = lane; i < (kTileTokens<C> - first_token) * kChunks; i += 32) {
    store_shared(row_address<H, C>(v_tile, first_token + i / kChunks, i % kChunks), make_uint4(0, 0, 0, 0));
  }
  __syncwarp();
}

// Patches the last tile with the current token's row that the previous kernel wrote (lanes 0..15 the key, 16..31 the
// value, 16 bytes each), and with zeros for values beyond the request's last token.
template <int H, class C>
__device__ __forceinline__ void patch_tile(uint32_t k_tile, uint32_t v_tile, int last_token, uint4 current, int lane) {
  constexpr int kChunks = H * sizeof(typename C::Element) / 16;
  if (lane % 16 < kChunks) store_shared(row_address<H, C>(lane < 16 ? k_tile : v_tile, last_token, lane % 16), current);
  clear_values<H, C>(v_tile, last_token + 1, lane);
}

// Merges the results of kWarps warps for 4 elements of a query.
template <int H, int kWarps = kAttentionWarps>
__device__ __forceinline__ Merged merge_partials(const uint8_t* memory, int warp_bytes, int query, int element) {
  Merged merged;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    merged.largest =
        fmaxf(merged.largest, reinterpret_cast<const Partial<H>*>(memory + w * warp_bytes)->largest[query]);
  }
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const Partial<H>* part = reinterpret_cast<const Partial<H>*>(memory + w * warp_bytes);
    merged.add(*reinterpret_cast<const float4*>(part->out + query * Partial<H>::kStride + element), part->sum[query],
               rescale(part->largest[query], merged.largest));
  }
  return merged;
}

// Stores the warp's result to shared memory.
template <int H, class C>
__device__ __forceinline__ void store_partial(Partial<H>* to, const WarpState<H>& state, int lane) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = state.sum[c];
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const int query = 2 * (lane % 4) + c;
    if (lane < 4) {
      to->largest[query] = state.largest[c];
      to->sum[query] = sum;
    }
#pragma unroll
    for (int h = 0; h < H / 16; ++h) {
      float* out = to->out + query * Partial<H>::kStride + 16 * h + (C::kIsFp8 ? 2 : 1) * (lane / 4);
      out[0] = state.out[h][c];
      out[C::kIsFp8 ? 1 : 8] = state.out[h][c + 2];
    }
  }
}

}  // namespace meshserve
