// Runs a list of ops on a thread pool. Each op starts when the previous one is done, or beside it if permitted.
//
// A step of a small model is a few hundred short ops, so the overhead between ops matters. Threads take units from a
// counter, and an op is done when its units are, not when every thread has passed it. So a thread that was descheduled
// finds less work when it returns, and delays no other.
#include "native.h"

#include "panels.h"

#include <atomic>
#include <memory>
#include <thread>

#if defined(__linux__)
#include <sys/resource.h>
#endif
#if defined(__linux__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// About 30 microseconds: longer than a wait between ops, shorter than the delay that a sleeping thread causes.
constexpr int64_t SPINS = 1000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    // Not `yield`, which takes no time on processors without hardware threads.
    asm volatile("isb");
#endif
}

bool ask_for_tiles() {
#if defined(__linux__) && defined(__AMX_BF16__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

// Only on Linux is niceness per thread; elsewhere it is per process.
void stand_back(int64_t niceness) {
#if defined(__linux__)
    if (niceness)
        setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + niceness);
#endif
}

enum class Verdict { NONE, GO_ON, PAUSE };

struct alignas(128) Progress {
    std::atomic<int64_t> taken, done;
    std::atomic<Verdict> verdict;
};

class Pool {
  public:
    explicit Pool(int64_t num_threads, int64_t niceness = 0) {
        for (int64_t i = 1; i < num_threads; i++)
            workers.emplace_back([this, niceness] {
                stand_back(niceness);
                serve();
            });
    }

    ~Pool() {
        is_ending = true;
        generation.fetch_add(1);
        generation.notify_all();
        for (std::thread &worker : workers)
            worker.join();
    }

    // Returns how many ops were run: all, unless `wish` became nonzero and an op may pause.
    int64_t run(const Op *first, int64_t count, const int64_t *wish) {
        if (count > capacity) {
            progress = std::make_unique<Progress[]>(count);
            capacity = count;
        }
        for (int64_t i = 0; i < count; i++) {
            progress[i].taken.store(0, std::memory_order_relaxed);
            progress[i].done.store(0, std::memory_order_relaxed);
            progress[i].verdict.store(Verdict::NONE, std::memory_order_relaxed);
        }
        ops = first, num_ops = count, wished = wish;
        const uint32_t next = generation.load() + 1;
        open = next;
        generation.store(next);
        generation.notify_all();
        const int64_t num_run = work();
        // No worker enters any more, and those inside only have to notice that all is done.
        open = CLOSED;
        for (int64_t spins = 0; num_inside.load() != 0; spins++)
            spins < SPINS ? relax() : std::this_thread::yield();
        return num_run;
    }

  private:
    void serve() {
        uint32_t seen = 0;
        for (;;) {
            for (int64_t spins = 0; spins < SPINS && generation.load(std::memory_order_relaxed) == seen; spins++)
                relax();
            generation.wait(seen);
            seen = generation.load();
            if (is_ending)
                return;
            num_inside.fetch_add(1);
            if (open.load() == seen)
                work();
            num_inside.fetch_sub(1);
        }
    }

    int64_t work() {
        // Concurrent ops are counted together, in the first one's `done`.
        int64_t first = 0, units_of_all = 0, i = 0;
        for (; i < num_ops; i++) {
            const Op &op = ops[i];
            if (op.may_pause && i > 0 && pauses_before(i))
                break;
            if (!op.begins_beside) {
                wait(first, units_of_all);
                first = i, units_of_all = 0;
            }
            // Many ops are for adapters, which the step may not have; even asking for their units takes time.
            if (*op.count == 0)
                continue;
            const int64_t units = op.kernel(op, -1);
            const int64_t num_mine = run_units(i, units);
            if (num_mine)
                progress[first].done.fetch_add(num_mine, std::memory_order_release);
            units_of_all += units;
            release_tiles();
        }
        wait(first, units_of_all);
        return i;
    }

    // Returns how many units of an op this thread ran. It takes each before it runs the one before, so that this can
    // fetch what the next one reads; but the last units go to whoever is free first.
    int64_t run_units(int64_t op, int64_t units) {
        const auto take = [&] { return progress[op].taken.fetch_add(1, std::memory_order_relaxed); };
        const int64_t first_of_last = units - 2 * static_cast<int64_t>(workers.size() + 1);
        int64_t num_mine = 0;
        for (int64_t unit = take(), next; unit < units; unit = next, num_mine++) {
            const bool is_last = unit >= first_of_last;
            next = is_last ? -1 : take();
            next_unit = next < units ? next : -1;
            ops[op].kernel(ops[op], unit);
            if (is_last)
                next = take();
        }
        return num_mine;
    }

    // The first thread decides for all, so that they stop at the same op.
    bool pauses_before(int64_t op) const {
        Verdict verdict = progress[op].verdict.load(std::memory_order_relaxed);
        if (verdict == Verdict::NONE) {
            const Verdict mine = __atomic_load_n(wished, __ATOMIC_RELAXED) ? Verdict::PAUSE : Verdict::GO_ON;
            if (progress[op].verdict.compare_exchange_strong(verdict, mine, std::memory_order_relaxed))
                verdict = mine;
        }
        return verdict == Verdict::PAUSE;
    }

    void wait(int64_t op, int64_t units) const {
        for (int64_t spins = 0; progress[op].done.load(std::memory_order_acquire) < units; spins++)
            spins < SPINS ? relax() : std::this_thread::yield();
    }

    std::vector<std::thread> workers;
    std::unique_ptr<Progress[]> progress;
    int64_t capacity = 0, num_ops = 0;
    const Op *ops = nullptr;
    const int64_t *wished = nullptr;
    // Generations wrap after 2^32 runs; as an int64, none equals CLOSED.
    static constexpr int64_t CLOSED = -1;
    std::atomic<uint32_t> generation{0};
    std::atomic<int64_t> open{CLOSED};
    std::atomic<int64_t> num_inside{0};
    std::atomic<bool> is_ending{false};
};

} // namespace

extern "C" {
void op_run(const Op *op) {
    const int64_t units = op->kernel(*op, -1);
    for (int64_t unit = 0; unit < units; unit++)
        op->kernel(*op, unit);
}
void *pool_create(int64_t num_threads, int64_t niceness) {
    may_use_tiles = ask_for_tiles();
    return new Pool(num_threads, niceness);
}
void pool_destroy(void *pool) { delete static_cast<Pool *>(pool); }
int64_t pool_run(void *pool, const Op *ops, int64_t count, const int64_t *wish) {
    return static_cast<Pool *>(pool)->run(ops, count, wish);
}
}
