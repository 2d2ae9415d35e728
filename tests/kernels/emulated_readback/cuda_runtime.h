// Replaces CUDA for readback.cuh on the host: a block has one thread.
#pragma once
#include <cstdint>

#define __global__
#define __launch_bounds__(threads)

struct Index {
  unsigned x;
};
// Not inline: other emulations in this process have a variable of this name for each thread, and would share it.
static Index threadIdx{0}, blockDim{1};
