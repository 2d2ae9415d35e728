#include "experts/sm80/stream_run.cuh"

namespace meshserve::experts::sm80 {

MESHSERVE_EXPERTS(E4m3)

}  // namespace meshserve::experts::sm80
