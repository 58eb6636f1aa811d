// How the threads of a pass share its work.
//
// A pass is a sequence of phases, each of which is cut into parts. A thread begins with its own parts. A thread that
// has none left waits for the others; after a moment, it takes those of their parts that they have not begun. So on a
// busy machine, a thread that is not running delays the others only if it was stopped within a part.
//
// Who computes a part does not matter for its bits (invariant 7).

#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include <atomic>
#include <memory>

namespace tokenleap {

class Team {
public:
    // Each thread has so many parts of every phase.
    void expect(int threads, int pieces) {
        threads_ = threads;
        pieces_ = threads > 1 ? pieces : 1;
        counts_.reset(new Count[threads]);
        parts_.reset(new Part[parts()]);
    }

    int threads() const { return threads_; }
    int parts() const { return threads_ * pieces_; }

    // The calling thread's next phase: work(part) for all parts, done when this returns. All threads go through the
    // same phases; one that comes when all parts are done goes on at once.
    template <class Work>
    void each(int id, Work work) {
        run(id, true, work);
    }

    // Go on when all threads are here.
    void meet(int id) {
        run(id, false, [](int) {});
    }

private:
    static constexpr int PATIENCE = 200;  // spins before others' parts are taken: 2 to 8 microseconds
    static constexpr int SPINS = 2000;    // and before a thread sleeps

    struct alignas(64) Count {
        int phases = 0;
    };
    struct alignas(64) Part {
        std::atomic<int> phase{0};  // the first in which no thread has taken it
    };

    template <class Work>
    void run(int id, bool may_help, Work work) {
        if (threads_ == 1) return work(0);
        int phase = counts_[id].phases++;
        for (int piece = 0; piece < pieces_; piece++) work_on(id * pieces_ + piece, phase, work);
        if (passed(phase, PATIENCE)) return;
        if (may_help) {
            for (int i = pieces_; i < parts(); i++) work_on((id * pieces_ + i) % parts(), phase, work);
        }
        if (passed(phase, SPINS)) return;
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep(phase);
        sleepers_.fetch_sub(1);
    }

    template <class Work>
    void work_on(int part, int phase, Work work) {
        int expected = phase;
        std::atomic<int>& next = parts_[part].phase;
        if (next.load(std::memory_order_relaxed) != phase) return;
        if (!next.compare_exchange_strong(expected, phase + 1, std::memory_order_acq_rel)) return;
        work(part);
        if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 < parts()) return;
        finished_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);  // a sleeper counts itself before it reads the phase
        if (sleepers_.load()) wake();
    }

    bool passed(int phase, int spins) const {
        for (; spins > 0; spins--) {
            if (phase_.load(std::memory_order_acquire) != phase) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("isb");  // takes about as long; `yield` takes no time
#endif
        }
        return false;
    }

#if defined(__linux__)
    // Returns at once if the phase is another one, and sometimes for no reason.
    void sleep(int phase) { syscall(SYS_futex, (int*)&phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, (int*)&phase_, FUTEX_WAKE_PRIVATE, threads_, nullptr, nullptr, 0); }
#else
    void sleep(int) { std::this_thread::yield(); }
    void wake() {}
#endif

    static_assert(sizeof(std::atomic<int>) == sizeof(int), "futexes are 32-bit integers");

    alignas(64) std::atomic<int> phase_{0};  // the first that is not done
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int> finished_{0};  // parts of that phase
    std::unique_ptr<Count[]> counts_;           // of each thread: the phases that it has begun
    std::unique_ptr<Part[]> parts_;
    int threads_ = 1, pieces_ = 1;
};

}  // namespace tokenleap
