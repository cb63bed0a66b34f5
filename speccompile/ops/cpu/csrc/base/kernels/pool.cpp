// A step has over a hundred short parallel regions. OpenMP's threads spin until the last of them is done, and each has a
// fixed share: where another program runs on a core, every region waits until the thread there gets its next time
// slice. Here threads take items from one another's shares, those that wait sleep after microseconds, and a thread
// that comes late is not waited for. Which thread computes an item does not change its bits.
#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <exception>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <dirent.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>
#endif

namespace speccompile {
namespace {

using Clock = std::chrono::steady_clock;

// Regions at once; the caller of a further one works alone.
constexpr int kJobs = 16;
constexpr int64_t kMostThreads = 256;
// Longer than from one region of a step to the next, and far shorter than a time slice.
constexpr std::chrono::microseconds kSpin{100};
// Spins between two looks at the clock.
constexpr int kSpins = 32;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while `word` is `value`; may return sooner.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word.load() == value) {
    std::this_thread::sleep_for(kSpin);
  }
#endif
}

void wake(std::atomic<uint32_t>& word, int count) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#endif
}

// The core that the calling thread runs on; -1 where that is not known.
int core() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another core. Linux wakes a thread on the core of the one that wakes it when it looks for
// no idle core, as on a machine of two that are more than half used. There both would take turns.
void leave_core(int core) {
#ifdef __linux__
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return;
  }
  others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
#endif
}

#ifdef __linux__
// The cores of the process: those of its threads and of OpenMP's places. OpenMP may have bound the calling thread to one
// core already (OMP_PROC_BIND), and its other threads may have ended since.
cpu_set_t find_process_cores() {
  cpu_set_t found;
  CPU_ZERO(&found);
  const auto add_thread = [&](pid_t thread) {
    cpu_set_t cores;
    if (sched_getaffinity(thread, sizeof(cores), &cores) == 0) {
      CPU_OR(&found, &found, &cores);
    }
  };
  add_thread(0);
  if (DIR* const threads = opendir("/proc/self/task")) {
    while (const dirent* const entry = readdir(threads)) {
      if (const pid_t thread = std::atoi(entry->d_name)) {
        add_thread(thread);
      }
    }
    closedir(threads);
  }
  for (int place = 0; place < omp_get_num_places(); ++place) {
    std::vector<int> cores(omp_get_place_num_procs(place));
    omp_get_place_proc_ids(place, cores.data());
    for (const int core : cores) {
      CPU_SET(core, &found);
    }
  }
  return found;
}

// As the library is loaded: later more threads may be bound.
const cpu_set_t process_cores = find_process_cores();
#endif

// A new thread has its caller's cores, and a caller may be bound to a single one.
void use_process_cores() {
#ifdef __linux__
  sched_setaffinity(0, sizeof(process_cores), &process_cores);
#endif
}

// Fetches a line that is written next. Read first, it would cross from the other core's cache twice.
inline void fetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

template <typename Done>
bool spin_until(Done done) {
  if (done()) {
    return true;
  }
  const auto started = Clock::now();
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (done()) {
        return true;
      }
      relax();
    }
  } while (Clock::now() - started < kSpin);
  return false;
}

// How the calling thread rounds, and whether it flushes subnormal numbers.
class Rounding {
 public:
#if defined(__x86_64__)
  // Without the rest of fenv, which takes a tenth of a microsecond to read and as long to set.
  void get() { control_ = __builtin_ia32_stmxcsr(); }
  void set() const {
    if (__builtin_ia32_stmxcsr() != control_) {
      __builtin_ia32_ldmxcsr(control_);
    }
  }

 private:
  unsigned control_;
#else
  void get() { std::fegetenv(&environment_); }
  void set() const { std::fesetenv(&environment_); }

 private:
  std::fenv_t environment_;
#endif
};

// Items that are left of a thread's share. Its own thread takes from the front, the others from the back.
class alignas(64) Share {
 public:
  void set(uint64_t first, uint64_t last) { left_.store(first << 32 | last, std::memory_order_relaxed); }

  // A quarter of what is left, so that the last ones are few, and at most `most`.
  bool take(bool own, uint64_t most, uint64_t& first, uint64_t& last) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    while (true) {
      const uint64_t begin = left >> 32, end = left & 0xffffffff;
      if (begin >= end) {
        return false;
      }
      const uint64_t count = std::min(std::max<uint64_t>((end - begin) / 4, 1), most);
      first = own ? begin : end - count;
      last = first + count;
      const uint64_t rest = own ? last << 32 | end : begin << 32 | first;
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
        return true;
      }
    }
  }

 private:
  std::atomic<uint64_t> left_{0};
};

// A region. Its state: how many helpers are in it, how many there may be, whether more may come (there is work left),
// and whether its caller sleeps until the last one leaves.
constexpr uint32_t kHelper = 1, kHelpers = 0xfff, kMostShift = 12, kOpen = 1u << 24, kAsleep = 1u << 25;
static_assert(kMostThreads <= kHelpers);

// A line crosses from one core's cache to another's in a tenth of a microsecond or two, and a region is a few microseconds
// long. So what helpers write is one line, and what its caller alone writes is another.
struct alignas(64) Job {
  std::atomic<uint32_t> state{0};
  std::atomic<bool> failed{false};

  alignas(64) std::atomic<bool> taken{false};
  // That its caller was on when it began.
  std::atomic<int> core{-1};
  Rounding rounding;
  int64_t threads, begin, end, grain;
  Work work;
  const void* run;

  alignas(64) std::exception_ptr fault;
  Share shares[kMostThreads];

  // For a look beforehand: it may change at once.
  bool is_open() const {
    return state.load(std::memory_order_acquire) & kOpen;
  }

  bool join() {
    uint32_t now = state.load(std::memory_order_relaxed);
    while ((now & kOpen) && (now & kHelpers) < (now >> kMostShift & kHelpers)) {
      if (state.compare_exchange_weak(now, now + kHelper, std::memory_order_acquire, std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  void leave() {
    const uint32_t before = state.fetch_sub(kHelper, std::memory_order_acq_rel);
    if ((before & kHelpers) == kHelper && (before & kAsleep)) {
      wake(state, 1);
    }
  }

  // Returns when nothing is left to take, and lets no one in any more.
  void help(int64_t start) {
    const uint64_t items = (end - begin + grain - 1) / grain;
    const uint64_t most = std::max<uint64_t>(items / threads / 8, 1);
    for (int64_t i = 0; i < threads; ++i) {
      Share& from = shares[(start + i) % threads];
      for (uint64_t first, last; from.take(i == 0, most, first, last); fetch_to_write(&from)) {
        if (!failed.load(std::memory_order_relaxed)) {
          try {
            work(run, begin + first * grain, std::min<int64_t>(begin + last * grain, end));
          } catch (...) {
            if (!failed.exchange(true)) {
              fault = std::current_exception();
            }
          }
        }
      }
    }
    state.fetch_and(~kOpen, std::memory_order_relaxed);
  }

  void wait_for_helpers() {
    const auto alone = [&] { return (state.load(std::memory_order_acquire) & kHelpers) == 0; };
    if (spin_until(alone)) {
      return;
    }
    state.fetch_or(kAsleep);
    for (uint32_t now = state.load(std::memory_order_acquire); now & kHelpers;
         now = state.load(std::memory_order_acquire)) {
      sleep_while(state, now);
    }
  }
};

// A child of fork has none of the threads: it starts with all of this as new.
struct Pool {
  Job jobs[kJobs];
  // Changes whenever a region opens; waiting workers look at it all the time.
  alignas(64) std::atomic<uint32_t> opened{0};
  alignas(64) std::atomic<uint32_t> sleepers{0};
  std::atomic<int64_t> callers{0};
  std::atomic<int64_t> workers{0};
  std::mutex starting;
};

// Threads may still look at it while the process ends.
Pool* pool = new Pool;

thread_local bool is_inside = false;

void serve(Pool& of, int64_t index) {
  use_process_cores();
  is_inside = true;
  while (true) {
    const uint32_t opened = of.opened.load(std::memory_order_seq_cst);
    for (Job& job : of.jobs) {
      if (!job.is_open()) {
        continue;
      }
      fetch_to_write(&job.shares[(index + 1) % kMostThreads]);
      if (core() >= 0 && core() == job.core.load(std::memory_order_relaxed)) {
        leave_core(core());
      }
      if (job.join()) {
        job.rounding.set();
        job.help((index + 1) % job.threads);
        job.leave();
      }
    }
    const auto is_new = [&] { return of.opened.load(std::memory_order_acquire) != opened; };
    if (!spin_until(is_new)) {
      of.sleepers.fetch_add(1);
      sleep_while(of.opened, opened);
      of.sleepers.fetch_sub(1);
    }
  }
}

// Blocks all signals for the calling thread and those that it starts: signals are for the program's own threads.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

// Has as many as a caller wants for itself; for several at once, as many as there are cores for.
void ensure_workers(Pool& of, int64_t helpers) noexcept {
  static const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const int64_t wanted = std::max(helpers, std::min(helpers * of.callers.load(std::memory_order_relaxed), cores - 1));
  if (of.workers.load(std::memory_order_relaxed) >= wanted) {
    return;
  }
  try {
    const std::lock_guard<std::mutex> lock(of.starting);
    const WithoutSignals blocked;
    while (of.workers.load() < wanted) {
      std::thread(serve, std::ref(of), of.workers.load()).detach();
      ++of.workers;
    }
  } catch (const std::exception&) {
    // The system gives no more threads, or no memory for one: the existing ones do the work.
  }
}

Job* claim(Pool& of) {
  thread_local int last = 0;
  for (int i = 0; i < kJobs; ++i) {
    Job& job = of.jobs[(last + i) % kJobs];
    if (!job.taken.load(std::memory_order_relaxed) && !job.taken.exchange(true, std::memory_order_acquire)) {
      last = (last + i) % kJobs;
      return &job;
    }
  }
  return nullptr;
}

[[maybe_unused]] const int handlers = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void run_in_pool(
    int64_t threads, int64_t begin, int64_t end, int64_t grain, Work work, const void* run, const int64_t* ends) {
  // Shares are counted in 32 bits.
  grain = std::max({grain, int64_t{1}, (end - begin) >> 31});
  const int64_t items = begin < end ? (end - begin + grain - 1) / grain : 0;
  threads = std::min({threads, items, kMostThreads});
  Pool& of = *pool;
  Job* const job = threads < 2 || is_inside ? nullptr : claim(of);
  if (job == nullptr) {
    if (begin < end) {
      work(run, begin, end);
    }
    return;
  }
  of.callers.fetch_add(1, std::memory_order_relaxed);
  ensure_workers(of, threads - 1);
  job->threads = threads;
  job->begin = begin;
  job->end = end;
  job->grain = grain;
  job->work = work;
  job->run = run;
  job->failed.store(false, std::memory_order_relaxed);
  job->core.store(core(), std::memory_order_relaxed);
  job->rounding.get();
  for (int64_t i = 0, first = 0; i < threads; ++i) {
    const int64_t last = i + 1 == threads ? items : ends ? ends[i] : items * (i + 1) / threads;
    job->shares[i].set(first, last);
    first = last;
  }
  const int helpers = static_cast<int>(threads - 1);
  job->state.store(kOpen | helpers << kMostShift, std::memory_order_release);
  of.opened.fetch_add(1);
  if (of.sleepers.load() > 0) {
    wake(of.opened, helpers);
  }
  is_inside = true;
  job->help(0);
  job->wait_for_helpers();
  is_inside = false;
  std::exception_ptr fault;
  std::swap(fault, job->fault);
  of.callers.fetch_sub(1, std::memory_order_relaxed);
  job->taken.store(false, std::memory_order_release);
  if (fault) {
    std::rethrow_exception(fault);
  }
}

}  // namespace speccompile
