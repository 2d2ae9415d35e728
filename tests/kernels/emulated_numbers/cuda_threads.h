// Runs CUDA threads on one host thread: each keeps it until it waits for others. Switching between them takes a tenth
// of the time of a switch between host threads. Whoever goes first changes at random from round to round, so that
// a missing barrier shows, whichever thread is ahead.
#pragma once
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

// The CUDA threads of this host thread.
class Switched {
 public:
  virtual ~Switched() = default;
  // Lets others run, at least until `*counter` differs from `seen`, if there is a counter.
  virtual void give_way(const unsigned* counter, unsigned seen) = 0;
  inline static thread_local Switched* running = nullptr;
};

// Waits in a loop for what another thread does.
inline void give_way() {
  if (Switched::running != nullptr) {
    Switched::running->give_way(nullptr, 0);
  } else {
    sched_yield();
  }
}

// A barrier of CUDA threads, whether they are switched or host threads.
class Meeting {
 public:
  explicit Meeting(int num_threads) : num_threads_(num_threads), host_threads_(num_threads) {}

  void arrive_and_wait() {
    if (Switched::running == nullptr) return host_threads_.arrive_and_wait();
    if (++num_arrived_ == num_threads_) {
      num_arrived_ = 0;
      ++num_phases_;
    } else {
      Switched::running->give_way(&num_phases_, num_phases_);
    }
  }

 private:
  int num_threads_, num_arrived_ = 0;
  unsigned num_phases_ = 0;
  std::barrier<> host_threads_;
};

// Runs all that was added, when it is destroyed. Each CUDA thread has values of its own of the variables.
template <class... Variables>
class CudaThreads : Switched {
 public:
  explicit CudaThreads(Variables&... variables) : variables_(variables...) {}
  CudaThreads(const CudaThreads&) = delete;

  void emplace_back(std::function<void()> body) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->body = std::move(body);
  }

  ~CudaThreads() override {
    Switched* const outer = running;
    running = this;
    for (size_t num_running = threads_.size(); num_running > 0; sched_yield()) {
      const bool is_forward = random_() % 2 == 0;
      for (size_t i = 0; i < threads_.size(); ++i) {
        current_ = threads_[is_forward ? i : threads_.size() - 1 - i].get();
        if (current_->is_done || (current_->counter != nullptr && *current_->counter == current_->seen)) continue;
        resume();
        if (current_->is_done) current_->stack.reset(), --num_running;
      }
    }
    running = outer;
  }

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  struct Thread {
    std::function<void()> body;
    jmp_buf context;
    std::unique_ptr<char[]> stack;
    const unsigned* counter = nullptr;
    unsigned seen = 0;
    bool is_done = false;
  };

  // Runs the current thread until it gives way or ends. Unlike swapcontext, these jumps make no system call.
  __attribute__((noinline)) void resume() {
    if (_setjmp(scheduler_) != 0) return;
    if (current_->stack != nullptr) _longjmp(current_->context, 1);
    current_->stack.reset(new char[kStackBytes]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = current_->stack.get();
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, &CudaThreads::enter, 0);
    setcontext(&context);
  }

  static void enter() {
    auto* threads = static_cast<CudaThreads*>(running);
    threads->current_->body();
    threads->current_->is_done = true;
    _longjmp(threads->scheduler_, 1);
  }

  void give_way(const unsigned* counter, unsigned seen) override {
    Thread* const thread = current_;
    const std::tuple<Variables...> kept = variables_;
    thread->counter = counter;
    thread->seen = seen;
    if (_setjmp(thread->context) == 0) _longjmp(scheduler_, 1);
    variables_ = kept;
  }

  std::tuple<Variables&...> variables_;
  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* current_ = nullptr;
  jmp_buf scheduler_;
  inline static thread_local std::minstd_rand random_;
};
