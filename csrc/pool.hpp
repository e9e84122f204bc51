// A small pool of threads that work through the units of any number of tasks.
//
// Contract: a task has a fixed number of units, handed out in order, each run exactly once, by at most `threads` threads at
// a time. `wait` lets the caller work too while a place is free. A task stays alive until its last unit is done, whoever
// drops it. An exception in a unit is kept, the units not yet begun are skipped, and `rethrow` gives it to the caller.
//
// Fork: the pool belongs to the process that started it. A child has none of its threads and never touches its locks; the
// parent's pool object is left behind in the child (a deliberate leak: its mutex may be held by a thread that is gone). A
// task that was in flight at the fork never ends in the child, so there `wait` throws and the destructor does not wait.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>

namespace memckpt {

using Clock = std::chrono::steady_clock;

class Task : public std::enable_shared_from_this<Task> {
public:
    Task(std::size_t units, unsigned threads);
    virtual ~Task() = default;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

    static void submit(const std::shared_ptr<Task>& task);  // starts threads where needed; returns at once; idempotent
    bool submitted() const noexcept { return submitted_.load(std::memory_order_acquire); }
    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    bool wait_until(Clock::time_point deadline);  // true when done; helps meanwhile
    void wait();
    void wait_noexcept() noexcept;  // for destructors; returns at once in a forked child
    void rethrow() const;           // after done
    bool owned_here() const noexcept;

protected:
    virtual void run(std::size_t unit) = 0;
    virtual void finished() noexcept {}  // once, after the last unit, before `done`

private:
    friend class Pool;
    bool enter() noexcept;  // take one of the places
    void leave() noexcept;
    bool exhausted() const noexcept { return next_.load(std::memory_order_relaxed) >= units_; }
    bool run_one() noexcept;  // false when no unit was left
    void complete() noexcept;

    const std::size_t units_;
    const unsigned threads_;
    const pid_t owner_;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::size_t> left_;
    std::atomic<unsigned> inside_{0};
    std::atomic<bool> submitted_{false};
    std::atomic<bool> done_{false};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
};

void shutdown_pool();                 // lets the threads finish what is queued, then joins them
std::size_t pool_threads() noexcept;  // threads of this process

}  // namespace memckpt
