#include "experts/sm80/stream_run.cuh"

namespace meshserve::experts::sm80 {

MESHSERVE_EXPERTS(Int4<32>)

}  // namespace meshserve::experts::sm80
