// The host side of the collectives: the inboxes of a mesh, which are allocated once, before anything is compiled or
// run, and the launches of single collectives. One process drives all GPUs of a mesh.
#pragma once
#include <string>

#include "collectives/two_shot.cuh"

namespace meshserve {

// Opens the P2P group of a mesh, given its CUDA device ordinals by rank. Returns an empty string or an error.
std::string open_p2p_group(const int* ordinals, int num, double patience_seconds);

// Gets a channel of an open P2P group for the calling thread's device. Returns an empty string or an error.
std::string find_p2p_group(const int* ordinals, int num, Channel channel, P2PGroup* out);

// Returns 1 + the rank for which `rank` timed out waiting, or 0.
int stalled_rank(const int* ordinals, int num, int rank);

// Returns the number of blocks of kP2PThreads threads for `threads` threads, or as many as run at once: none may wait
// for one that cannot start.
int p2p_blocks(int threads);

// Sums x over the ranks if `is_sum`, in one shot or two, or gathers it in one shot. Returns an empty string or an
// error.
std::string launch_one_shot(OneShotArgs args, bool is_sum, cudaStream_t stream);
std::string launch_two_shot(const P2PGroup& p2p, const void* x, void* out, size_t num_bytes, cudaStream_t stream);

}  // namespace meshserve
