// The host side of logits by an FP8 output head in one pass over it.
#pragma once
#include <string>

#include "common/weight_formats.cuh"

namespace meshserve {
namespace wide_head {

struct Call {
  const bf16* input;     // [tokens, columns]
  ScaledMatrix weights;  // [rows, columns], with a scale for each row
  float* logits;         // [tokens, rows]
  uint8_t* numbers;      // scratch memory for the input: two e4m3 numbers for each element
  float* powers;         // and their powers of two
  int tokens, rows, columns;
};

// Returns an empty string or an error.
std::string launch(const Call& call, cudaStream_t stream);

}  // namespace wide_head
}  // namespace meshserve
