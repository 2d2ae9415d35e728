// Runs the kernel of mail.cuh on the host, and takes what it has mailed.
#include "mail.cuh"

using namespace meshserve::mail;

static uint64_t boxes[kNumBoxes * kMaxTokens];

extern "C" void mail_tokens(const uint32_t* tokens, uint32_t number, uint32_t* out, int num_tokens) {
  mail_kernel(tokens, &number, out, num_tokens, boxes);
}

extern "C" int take_mail(uint32_t number, int num_tokens, uint32_t* tokens, double sleep_seconds, double seconds) {
  return take(boxes, number, num_tokens, tokens, sleep_seconds, seconds);
}
